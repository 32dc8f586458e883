"""A joint program cut in two: a forward that also returns what the backward needs, and a backward that takes it.
Nothing is computed twice except views, which cost nothing; how a joint program is made is in `training.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch

from torchgraft.analysis.cost.elementwise import is_view
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import is_guard
from torchgraft.ir.node import Node, map_arg
from torchgraft.lowering.autocast import regions_without
from torchgraft.lowering.entries import OutputEntry, finish


def partition(joint: GraphModule) -> tuple[GraphModule, GraphModule]:
    """The forward and the backward of a joint program; see `capture_training`."""
    output = joint.graph.output_node()
    entries = list(zip(output.meta["entries"], output.args[0], strict=True))
    ahead = [(entry, value) for entry, value in entries if entry.kind != "gradient"]
    gradients = [(entry, value) for entry, value in entries if entry.kind == "gradient"]
    forward = _forward_nodes(joint.graph, nodes_of_gradients(joint.graph), [value for _, value in ahead])
    backward, saved = _backward_nodes(joint.graph, forward, [value for _, value in gradients])
    backward |= regions_without(joint.graph)
    ahead += [(OutputEntry("saved", node.name), node) for node in saved]
    name = type(joint).__name__
    tangents = [node for node in joint.graph.find_nodes(op="placeholder") if node.meta["origin_kind"] == "tangent"]
    return (
        _program(joint, f"{name}Forward", [], forward, ahead),
        _program(joint, f"{name}Backward", [*saved, *tangents], backward, gradients),
    )


def nodes_of_gradients(graph: Graph) -> set[Node]:
    """What can only run after the backward has begun."""
    found: set[Node] = set()
    for node in graph.nodes:
        is_late = node.meta.get("partitioner_tag") == "is_backward" or node.meta.get("origin_kind") == "tangent"
        # Parts and sizes of what the forward computed are known there, whoever asked for them first.
        is_known = (
            node.target in _PARTS or is_guard(node.target) or getattr(node.target, "__module__", "") == "_operator"
        )
        if (is_late and not is_known) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


_PARTS = frozenset({operator.getitem, "size", "stride"})


def _forward_nodes(graph: Graph, late: set[Node], outputs: Iterable[Any]) -> set[Node]:
    """The inputs of the model, and what ran before the gradients, as far as somebody needs it."""
    ahead = [node for node in graph.nodes if node not in late and node.op != "output"]
    needed = {value for value in outputs if isinstance(value, Node)}
    needed |= {node for node in ahead if node.op == "placeholder" or (node.op == "call_function" and node.is_impure())}
    # What a gradient reads was computed then: memory may have been written since.
    needed |= {node for node in ahead if any(user in late or user.op == "output" for user in node._users)}
    for node in reversed(ahead):
        if node in needed:
            needed.update(node.all_input_nodes)
    return needed


def _backward_nodes(graph: Graph, forward: set[Node], outputs: Iterable[Any]) -> tuple[set[Node], list[Node]]:
    """What gradients are computed from besides the forward, and the values of the forward that this needs."""
    writes = any(node.op == "call_function" and _writes(node.target) for node in forward)
    needed = {value for value in outputs if isinstance(value, Node)}
    needed |= {node for node in graph.nodes if node.op == "call_function" and node not in forward and node.is_impure()}
    saved: set[Node] = set()
    for node in reversed(graph.nodes):
        if node not in needed:
            continue
        if node not in forward or node.op == "get_attr" or (_is_view(node) and not writes):
            needed.update(node.all_input_nodes)
        else:
            saved.add(node)
    return needed - saved, [node for node in graph.nodes if node in saved]


def _writes(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _is_view(node: Node) -> bool:
    """Whether a node gives another shape to the memory of its only input; computing that again is free."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or len(node.all_input_nodes) != 1 or _writes(target):
        return False
    return len(target._schema.returns) == 1 and is_view(target)


def _program(
    joint: GraphModule, name: str, inputs: list[Node], nodes: set[Node], outputs: list[tuple[OutputEntry, Any]]
) -> GraphModule:
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.create_node("placeholder", node.name, name=node.name)
        copies[node].meta = dict(node.meta)
        copies[node].meta.setdefault("origin_kind", "saved")
        copies[node].meta.setdefault("origin_name", node.name)
    for node in joint.graph.nodes:
        if node in nodes and node not in copies and node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    finish(graph, [(entry, map_arg(value, copies.__getitem__)) for entry, value in outputs])
    return GraphModule(joint, graph, name)
