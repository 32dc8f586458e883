"""torch.fx's source partitions: the nodes that came from one call of a function or of a module of some type.
Where a node came from is in its metadata, which capturing writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node


@dataclass
class SourcePartition:
    """The nodes of one call, what they take and give, and the parameters among them."""

    nodes: list[Node]
    source: Any
    input_nodes: list[Node] = field(default_factory=list)
    output_nodes: list[Node] = field(default_factory=list)
    params: list[Node] = field(default_factory=list)


def get_source_partitions(
    graph: Graph, wanted_sources: list[Any], filter_fn: Callable[[Node], bool] | None = None
) -> dict[Any, list[SourcePartition]]:
    """The partitions of every wanted source, a function or a module type; with `filter_fn`, those whose every node passes it.

    >>> import torch, torchgraft
    >>> module = torchgraft.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    >>> get_source_partitions(module.graph, [torch.nn.Linear])[torch.nn.Linear][0].output_nodes
    [_0]
    """
    found: dict[Any, dict[Any, list[Node]]] = {}
    for node in graph.nodes:
        for source, call in _sources(node, wanted_sources):
            found.setdefault(source, {}).setdefault(call, []).append(node)
            break
    return {
        source: [
            _partition(nodes, source) for nodes in calls.values() if filter_fn is None or all(map(filter_fn, nodes))
        ]
        for source, calls in found.items()
    }


def check_subgraphs_connected(subgraph1: SourcePartition, subgraph2: SourcePartition) -> bool:
    """Whether a node of the second uses a node of the first."""
    second = set(subgraph2.nodes)
    return any(user in second for node in subgraph1.nodes for user in node._users)


def _sources(node: Node, wanted: list[Any]) -> Iterator[tuple[Any, Any]]:
    """The wanted sources of a node, the surest first, each with a name of the call."""
    stack = node.meta.get("source_fn_stack")
    if stack:
        name, source = stack[-1]
        if source in wanted:
            yield source, name
        return
    if "torch_fn" in node.meta:
        name, text = node.meta["torch_fn"]
        if text.split(".")[-1] in wanted:
            yield text.split(".")[-1], name
    if node.op == "call_module" and node.graph.owning_module is not None:
        kind = type(node.graph.owning_module.get_submodule(node.target))
        if kind in wanted:
            yield kind, node.name
    if node.op != "call_function":
        return
    modules = node.meta.get("nn_module_stack")
    if modules:
        path, kind = list(modules.values())[-1]
        for source in wanted:
            if isinstance(source, type) and _is_kind(kind, source):
                yield source, path
    if node.target in wanted:
        yield node.target, node.name


def _is_kind(kind: Any, source: type) -> bool:
    if isinstance(kind, type):
        return issubclass(kind, source)
    return kind == f"{source.__module__}.{source.__qualname__}"


def _partition(nodes: list[Node], source: Any) -> SourcePartition:
    inside = set(nodes)
    inputs = dict.fromkeys(value for node in nodes for value in node.all_input_nodes if value not in inside)
    outputs = [node for node in nodes if node.op != "get_attr" and any(user not in inside for user in node._users)]
    params = [node for node in nodes if node.op == "get_attr"]
    return SourcePartition(nodes, source, [node for node in inputs if node.op != "get_attr"], outputs, params)
