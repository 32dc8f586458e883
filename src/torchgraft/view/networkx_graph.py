"""`to_networkx`: a program as a `networkx.MultiDiGraph` of plain data, which can be analysed, edited and saved without torch.
Bringing edits back is in `networkx_edits.py`, files are in `graph_files.py`.

A node's id is its name. An edge is one use of a value, and its key is the position of that use among those of the user, so
`x * x` has two edges. `args` and `kwargs` of a node say where each goes: `{"input": key}`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.codegen.calling import example_inputs
from torchgraft.errors import GraftError
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_of
from torchgraft.ir.printing import target_text
from torchgraft.ir.verify import find_attribute
from torchgraft.view.call_info import CallInfo, node_call_info
from torchgraft.view.node_facts import (
    Facts,
    facts_text,
    graph_of,
    known_facts,
    module_path_of,
    module_stack_of,
    origin_name,
    part,
    phases_of,
    role_of,
)
from torchgraft.view.plain import encode, is_at, readable

if TYPE_CHECKING:
    import networkx

FORMAT_VERSION = 1
NODE_ATTRIBUTES = (
    *("op", "target", "importable", "args", "kwargs", "order", "node_index", "role", "phase", "origin_name"),
    *("node_call_info", "module_path", "module_stack", "module", "source", "source_function", "source_text"),
    *("result", "shape", "dtype", "memory_format"),
)
EDGE_ATTRIBUTES = ("argument", "shape", "dtype", "memory_format")


def import_networkx() -> Any:
    """networkx, or an error that says how to get it."""
    try:
        import networkx
    except ImportError as error:
        raise GraftError(
            "graphs need the package networkx, which is not installed\nrun: pip install networkx"
        ) from error
    return networkx


def to_networkx(program: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> networkx.MultiDiGraph:
    """A program as a `networkx.MultiDiGraph`.

    Shapes come from what is noted in the program (operator and joint programs have it) or, if example inputs are given, from
    one run on them, on fake tensors where that is possible. A plain `nn.Module` is captured first.

    Nodes carry `op`, `target`, `args`, `kwargs`, `order`, `role` ("input", "tangent", "parameter", "buffer", "constant",
    "guard", "operation", "output"), `node_call_info` (the arguments by the names of the signature, defaults filled in),
    `module_path`, `source`, `shape`, `dtype`, `memory_format` and more; edges carry `argument`, `shape`, `dtype` and
    `memory_format`. What is not known is None.

    >>> from torchgraft import symbolic_trace
    >>> graph = to_networkx(symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())), torch.ones(3, 4))
    >>> graph.nodes["_0"]["target"], [(u, v, data["shape"]) for u, v, data in graph.edges(data=True)]
    ('0', [('input_1', '_0', (3, 4)), ('_0', '_1', (3, 2)), ('_1', 'output', (3, 2))])
    """
    networkx = import_networkx()
    args, kwargs = example_inputs(args, kwargs)
    source, owner = graph_of(program, args, kwargs)
    facts = known_facts(source, args, kwargs)
    phases = phases_of(source)
    name = type(owner).__name__
    result = networkx.MultiDiGraph(name=name, format="torchgraft", format_version=FORMAT_VERSION)
    for order, node in enumerate(source.nodes):
        info = node_call_info(node)
        result.add_node(node.name, **_node_attributes(node, order, info, facts[node], phases.get(node)))
        for key, (used, argument) in enumerate(uses_of(node, info)):
            result.add_edge(used.name, node.name, key=key, argument=argument, **_value_attributes(facts[used]))
    return result


def as_networkx(program: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> networkx.MultiDiGraph:
    """A graph of `to_networkx` as it is, or the graph of a program."""
    networkx = import_networkx()
    if isinstance(program, networkx.Graph):
        if not isinstance(program, networkx.MultiDiGraph):
            raise GraftError(
                f"cannot read a {type(program).__name__}\ngive a networkx.MultiDiGraph as to_networkx() makes it"
            )
        return program
    return to_networkx(program, args, kwargs)


def _node_attributes(node: Node, order: int, info: CallInfo, facts: Facts, phase: str | None) -> dict[str, Any]:
    line, stack = source_of(node), module_stack_of(node)
    keys = itertools.count()
    use = lambda used: {"input": next(keys)}  # noqa: E731 (encode visits uses in the order of the keys)
    return {
        "op": node.op,
        "target": target_text(node.target),
        "importable": is_at(target_text(node.target), node.target) if node.op == "call_function" else None,
        "args": [encode(item, use) for item in node.args],
        "kwargs": {name: encode(item, use) for name, item in node.kwargs.items()},
        "order": order,
        "node_index": order,
        "role": role_of(node),
        "phase": phase,
        "origin_name": origin_name(node),
        "node_call_info": {
            "target": info.target,
            "args": {name: readable(value) for name, value in info.arguments.items()},
            "bound": info.bound,
            "signature": info.signature,
        },
        "module_path": module_path_of(node),
        "module_stack": [list(entry) for entry in stack],
        "module": _module_text(node),
        "source": f"{line.file}:{line.line}" if line else None,
        "source_function": line.function if line else None,
        "source_text": line.text if line else None,
        "result": facts_text(facts) or None,
        **_value_attributes(facts),
    }


def _module_text(node: Node) -> str | None:
    module = find_attribute(node.graph.owning_module, node.target)[0] if node.op == "call_module" else None
    return f"{type(module).__name__}({module.extra_repr()})" if isinstance(module, torch.nn.Module) else None


def _value_attributes(facts: Facts) -> dict[str, Any]:
    return {field: part(facts, field) for field in ("shape", "dtype", "memory_format")}


def uses_of(node: Node, info: CallInfo) -> Iterator[tuple[Node, str]]:
    """Every use of another node's value by `node`, in order, with the name of the argument: `input`, `tensors[1]`.

    >>> from torchgraft import Graph
    >>> graph = Graph()
    >>> x = graph.placeholder("x")
    >>> node = graph.call_function(torch.cat, ([x, x],))
    >>> list(uses_of(node, node_call_info(node)))
    [(x, 'tensors[0]'), (x, 'tensors[1]')]
    """
    entries = node.meta.get("entries") if node.op == "output" else None
    if entries and node.args and isinstance(node.args[0], (tuple, list)) and len(entries) == len(node.args[0]):
        for entry, value in zip(entries, node.args[0], strict=True):
            yield from _uses_in(value, f"{entry.kind} {entry.name}")
        return
    values = [*node.args, *node.kwargs.values()]
    for name, value in zip(info.given, values, strict=True):
        yield from _uses_in(value, name)


def _uses_in(value: Any, name: str) -> Iterator[tuple[Node, str]]:
    if isinstance(value, Node):
        yield value, name
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _uses_in(item, f"{name}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _uses_in(item, f"{name}[{key!r}]")
    elif isinstance(value, slice):
        for word in ("start", "stop", "step"):
            yield from _uses_in(getattr(value, word), f"{name}.{word}")
