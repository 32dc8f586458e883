"""What is known of the value of each node: shape, dtype and memory format, from metadata or from one run on examples.
Nothing is written to the program; values themselves are not kept (`recording/` does that).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchgraft.analysis.dry_run import DryRun
from torchgraft.analysis.shapes.metadata import memory_format_of
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node
from torchgraft.ir.printing import DTYPE_LETTERS
from torchgraft.ir.verify import find_attribute

_META_KEYS = ("tensor_meta", "val", "example_value")


@dataclass(frozen=True)
class TensorFacts:
    """Shape, dtype and memory format of a tensor as plain data; a size that is no number yet is its name."""

    shape: tuple[int | str, ...]
    dtype: str
    memory_format: str | None = None

    def __str__(self) -> str:
        known = getattr(torch, self.dtype, None)
        letters = DTYPE_LETTERS.get(known, self.dtype) if isinstance(known, torch.dtype) else self.dtype
        return f"{letters}[{', '.join(map(str, self.shape))}]"


# What is known of a value: a tensor, a tuple of such, or the name of another type.
Facts = TensorFacts | tuple[Any, ...] | str | None


def facts_of(value: Any) -> Facts:
    """What can be said about a value, or about what shape propagation noted of one.

    >>> facts_of((torch.ones(2, 3), 4))
    (TensorFacts(shape=(2, 3), dtype='float32', memory_format='contiguous_format'), 'int')
    """
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and isinstance(dtype, torch.dtype):
        sizes = tuple([size if type(size) is int else str(size) for size in shape])
        return TensorFacts(sizes, str(dtype).removeprefix("torch."), _memory_format(value, sizes))
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return tuple([facts_of(item) for item in value])
    return None if value is None else type(value).__name__


def _memory_format(value: Any, sizes: tuple[int | str, ...]) -> str | None:
    noted = getattr(value, "memory_format", None)
    if isinstance(noted, torch.memory_format):
        return str(noted).removeprefix("torch.")
    if not isinstance(value, torch.Tensor) or any(type(size) is not int for size in sizes):
        return None  # asking would fix the sizes that are still free
    found = memory_format_of(value)
    return None if found is None else str(found).removeprefix("torch.")


def part(facts: Facts, field: str) -> Any:
    """One field of every tensor in `facts`, in the same structure; None where there is no tensor."""
    if isinstance(facts, TensorFacts):
        return getattr(facts, field)
    if isinstance(facts, tuple):
        parts = tuple([part(item, field) for item in facts])
        return None if all(item is None for item in parts) else parts
    return None


def facts_text(facts: Facts) -> str:
    """`f32[2, 3]`, `(f32[2, 3], i64[2])`, `int`, or nothing where nothing is known."""
    if isinstance(facts, tuple):
        return f"({', '.join([facts_text(item) or 'None' for item in facts])})"
    return "" if facts is None else str(facts)


def known_facts(graph: Graph, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> dict[Node, Facts]:
    """What is known of every node: from one run if example inputs are given, else from metadata and the module's tensors."""
    owner = graph.owning_module
    observed = observe(owner, args, kwargs or {}) if (args or kwargs) and owner is not None else {}
    return {node: observed[node] if node in observed else _noted(node, owner) for node in graph.nodes}


def _noted(node: Node, owner: Any) -> Facts:
    meta = node.meta
    for key in _META_KEYS:
        if meta.get(key) is not None:
            return facts_of(meta[key])
    if node.op == "get_attr" and owner is not None:
        value, problem = find_attribute(owner, node.target)
        return None if problem else facts_of(value)
    return None


def observe(
    program: GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    describe: Callable[[Any], Any] = facts_of,
) -> dict[Node, Any]:
    """Run a program once and say what every node gave; on fake tensors where the program allows it, else on copies."""
    found: dict[Node, Any] = {}

    def note(node: Node, value: Any) -> None:
        found[node] = describe(value)

    def run(compute: bool) -> None:
        DryRun(program, args, dict(kwargs), node_done=note, compute=compute).forward()

    try:
        run(compute=False)
    except Exception:  # a program may fail on fakes in any way; if it is at fault itself, it fails again here
        run(compute=True)
    return found
