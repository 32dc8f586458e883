"""A joint program cut in two: a forward that also returns what the backward needs, and a backward that takes it.
Nothing is computed twice except views, which cost nothing; how a joint program is made is in `training.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from torchgraft.bridge.checked_calls import CheckedCodeGen, InputCheck, tensor_conditions
from torchgraft.bridge.program_calls import layout_of, situation
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node, map_arg

KINDS = ("result", "update", "assignment", "gradient", "saved")


class OutputEntry(NamedTuple):
    """What one entry of the output of a training program is.

    `kind` is "result" (of the model, or of the loss), "update" (the new value of a buffer or input that the model writes in
    place), "assignment" (a tensor that it puts in the place of a buffer or attribute), "gradient" (of a parameter or input)
    or "saved" (for the backward); `name` says of what.
    """

    kind: str
    name: str


def partition(joint: GraphModule) -> tuple[GraphModule, GraphModule]:
    """The forward and the backward of a joint program; see `capture_training`."""
    output = joint.graph.output_node()
    entries = list(zip(output.meta["entries"], output.args[0], strict=True))
    ahead = [(entry, value) for entry, value in entries if entry.kind != "gradient"]
    gradients = [(entry, value) for entry, value in entries if entry.kind == "gradient"]
    forward = _forward_nodes(joint.graph, [value for _, value in ahead])
    backward, saved = _backward_nodes(joint.graph, forward, [value for _, value in gradients])
    ahead += [(OutputEntry("saved", node.name), node) for node in saved]
    name = type(joint).__name__
    tangents = [node for node in joint.graph.find_nodes(op="placeholder") if node.meta["origin_kind"] == "tangent"]
    return (
        _program(joint, f"{name}Forward", [], forward, ahead),
        _program(joint, f"{name}Backward", [*saved, *tangents], backward, gradients),
    )


def _forward_nodes(graph: Graph, outputs: Iterable[Any]) -> set[Node]:
    """The inputs of the model, and everything that results, updates and effects are computed from."""
    after: set[Node] = set()  # what can only be computed after the backward has begun
    needed = {value for value in outputs if isinstance(value, Node)}
    for node in graph.nodes:
        if node.meta.get("origin_kind") == "tangent" or not after.isdisjoint(node.all_input_nodes):
            after.add(node)
        elif node.op == "placeholder" or (node.op == "call_function" and _belongs_to_forward(node)):
            needed.add(node)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    for node in graph.nodes:
        # A value taken out of a tuple goes where the tuple is: only tensors can be saved.
        if node.target is operator.getitem and node.all_input_nodes[0] in needed:
            needed.add(node)
    return needed


def _belongs_to_forward(node: Node) -> bool:
    """Effects and random draws that the tracer saw in the forward stay there, even if only gradients use them."""
    return node.meta.get("partitioner_tag") != "is_backward" and node.is_impure()


def _backward_nodes(graph: Graph, forward: set[Node], outputs: Iterable[Any]) -> tuple[set[Node], list[Node]]:
    """What gradients are computed from besides the forward, and the values of the forward that this needs."""
    needed = {value for value in outputs if isinstance(value, Node)}
    needed |= {node for node in graph.nodes if node.op == "call_function" and node not in forward and node.is_impure()}
    saved: set[Node] = set()
    for node in reversed(graph.nodes):
        if node not in needed:
            continue
        if node not in forward or node.op == "get_attr" or _is_view(node):
            needed.update(node.all_input_nodes)
        else:
            saved.add(node)
    return needed - saved, [node for node in graph.nodes if node in saved]


def _is_view(node: Node) -> bool:
    """Whether a node gives another shape to the memory of its only input; computing that again is free."""
    if not isinstance(node.target, torch._ops.OpOverload) or len(node.all_input_nodes) != 1:
        return False
    schema = node.target._schema
    aliases = [argument.alias_info for argument in schema.arguments if argument.alias_info is not None]
    returned = [value.alias_info for value in schema.returns]
    return (
        len(returned) == 1 and returned[0] is not None and bool(aliases) and not any(item.is_write for item in aliases)
    )


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
    values = map_arg(tuple(value for _, value in outputs), copies.__getitem__)
    finish_program(graph, values, [entry for entry, _ in outputs])
    return GraphModule(joint, graph, name)


def finish_program(graph: Graph, values: tuple[Any, ...], entries: list[OutputEntry]) -> None:
    """Add the output, with its entries named, and the check of the inputs."""
    output = graph.output(values)
    output.meta["entries"] = entries
    output.meta["val"] = map_arg(values, lambda node: node.meta.get("val"))
    graph.set_codegen(CheckedCodeGen(_check(graph)))


def _check(graph: Graph) -> InputCheck:
    nodes = graph.find_nodes(op="placeholder")
    # Saved values come from the forward as they are; kernels may keep notes in them whose size the tracer does not know.
    known = [node for node in nodes if node.meta["origin_kind"] != "saved"]
    conditions = [text for node in known for text in tensor_conditions(node.name, node.meta["val"])]
    conditions += [text for node in known for text in node.meta.get("conditions", ())]
    conditions += situation(node.meta["val"] for node in known)
    titles = {node.name: f"the {node.meta['origin_kind']} {node.meta['origin_name']!r}" for node in known}
    check = InputCheck([node.name for node in nodes], conditions, titles=titles)
    check.layouts = {node.name: layout_of(node.meta["val"]) for node in known}
    return check
