"""What people ask about a node: which part it plays, which module it belongs to, and what its value looks like.
Arguments bound to their names are in `call_info.py`, source lines in `ir/origin.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchgraft.analysis.dry_run import DryRun, computing_if_needed
from torchgraft.analysis.shapes.metadata import memory_format_of
from torchgraft.capturing.symbolic.tracer import symbolic_trace
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import is_guard
from torchgraft.ir.node import Node
from torchgraft.ir.printing import DTYPE_LETTERS
from torchgraft.ir.verify import find_attribute

ROLES = ("input", "tangent", "parameter", "buffer", "constant", "guard", "operation", "output")


def graph_of(program: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> tuple[Graph, Any]:
    """The graph of a program, and what must be kept alive while it is read; a plain model is captured first."""
    if isinstance(program, Graph):
        return program, program
    if isinstance(program, GraphModule):
        return program.graph, program
    homes = {".".join(base.__module__.split(".")[:2]) for base in type(program).__mro__}
    for home, door in (("torch.fx", "from_fx"), ("torch.export", "from_export")):
        if home in homes:
            raise GraftError(
                f"cannot look at a {type(program).__name__} of {home}: bring it in first, with torchgraft.{door}()"
            )
    if isinstance(program, torch.nn.Module):
        from torchgraft.capturing.program import capture

        module = capture(program, args, kwargs) if args or kwargs else symbolic_trace(program)
        return module.graph, module
    raise GraftError(
        f"cannot look at {type(program).__name__}: give a program (a GraphModule or Graph of torchgraft) or an nn.Module"
    )


def role_of(node: Node) -> str:
    """Which of `ROLES` a node has.

    >>> graph = Graph()
    >>> role_of(graph.placeholder("x")), role_of(graph.placeholder("tangents_1"))
    ('input', 'tangent')
    """
    if node.op == "placeholder":
        kind = node.meta.get("origin_kind")
        if kind in ROLES:
            return kind
        return "tangent" if str(node.target).startswith("tangents_") else "input"
    if node.op == "get_attr":
        owner = node.graph.owning_module
        if isinstance(find_attribute(owner, node.target)[0], torch.nn.Parameter):
            return "parameter"
        prefix, _, name = node.target.rpartition(".")
        holder = find_attribute(owner, prefix)[0] if prefix else owner
        is_buffer = isinstance(holder, torch.nn.Module) and name in holder._buffers
        # Values met while capturing become unsaved buffers of a GraphModule, but they are no state of the model.
        return "buffer" if is_buffer and node.target not in node.graph._constants else "constant"
    if is_guard(node.target):
        return "guard"
    return "output" if node.op == "output" else "operation"


def origin_name(node: Node) -> str | None:
    """Which parameter, buffer or result of the model an input of a program is, where it has another name."""
    if node.op == "get_attr":
        return str(node.target)
    return node.meta.get("origin_name")


def module_stack_of(node: Node) -> list[tuple[str, str]]:
    """The modules around a node, outermost first, each as (path, name of its class).

    Programs write the paths in three ways (`layer1.0`, `L['self'].layer1[0]`, with or without the root); here they are
    those of `named_modules()`, and the root is "".
    """
    stack = node.meta.get("nn_module_stack") or {}
    return [(_plain_path(path), class_name(kind)) for path, kind in stack.values()]


def class_name(kind: Any) -> str:
    """The name of a class that is given as the class or as its dotted name.

    >>> class_name(torch.nn.Linear), class_name("torch.nn.modules.linear.Linear")
    ('Linear', 'Linear')
    """
    return kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2].rstrip("'>")


def _plain_path(path: str) -> str:
    for prefix in ("L['self']", "L__self__"):
        if path.startswith(prefix):
            path = path.removeprefix(prefix)
            break
    for old, new in (("['", "."), ("']", ""), ("[", "."), ("]", "")):
        path = path.replace(old, new)
    # Calling one module twice gives its second call a path of its own, `fc@1`.
    return path.lstrip(".").partition("@")[0]


def module_path_of(node: Node) -> str:
    """The path of the innermost module that a node belongs to; "" is the model itself."""
    if node.op == "call_module":
        return str(node.target)
    if node.op == "get_attr" and "nn_module_stack" not in node.meta:
        return str(node.target).rpartition(".")[0]
    stack = module_stack_of(node)
    return stack[-1][0] if stack else ""


def phases_of(graph: Graph) -> dict[Node, str]:
    """ "forward" or "backward" for every node of a joint program; empty for other programs."""
    backward = {node for node in graph.nodes if node.meta.get("partitioner_tag") == "is_backward"}
    if not backward:
        return {}
    return {node: "backward" if node in backward or role_of(node) == "tangent" else "forward" for node in graph.nodes}


# ---- values ----


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
    program: GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any], describe: Callable[[Any], Any] = facts_of
) -> dict[Node, Any]:
    """Run a program once and say what every node gave; on fake tensors where the program allows it, else on copies."""
    found: dict[Node, Any] = {}

    def note(node: Node, value: Any) -> None:
        found[node] = describe(value)

    computing_if_needed(
        lambda compute: DryRun(program, args, dict(kwargs), node_done=note, compute=compute).forward(),
        after_any_error=True,
    )
    return found
