"""torch.fx's `passes.tools_common`: names of targets, sorting a graph, and groups of nodes that hand each other non-tensors."""

from __future__ import annotations

from typing import Any

import torch

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.node import Node
from torchgraft.splitting.fusing import sorted_stably
from torchgraft.splitting.operator_support import CALLABLE_NODE_OPS, get_acc_ops_name, get_node_target

__all__ = [
    "CALLABLE_NODE_OPS",
    "FxNetAccFusionsFinder",
    "get_acc_ops_name",
    "get_node_target",
    "is_node_output_tensor",
    "legalize_graph",
    "stable_topological_sort",
]

Tensors = tuple[torch.Tensor] | list[torch.Tensor]
TensorOrTensors = torch.Tensor | Tensors
NodeList = list[Node]
NodeSet = set[Node]
Names = list[str]


def is_node_output_tensor(node: Node) -> bool:
    """Whether the value of a node is a tensor, as ShapeProp noted it."""
    kind = node.meta.get("type")
    return kind is not None and issubclass(kind, torch.Tensor)


def stable_topological_sort(gm: GraphModule) -> GraphModule:
    """Bring the nodes of a graph in an order in which each comes after its inputs, otherwise as they were; in place.

    >>> import torchgraft
    >>> module = torchgraft.symbolic_trace(lambda x: torch.cos(torch.sin(x)))
    >>> x, sin, cos, output = module.graph.nodes
    >>> sin.prepend(cos)
    >>> [node.name for node in stable_topological_sort(module).graph.nodes]
    ['x', 'sin', 'cos', 'output']
    """
    nodes = list(gm.graph.nodes)
    for node in sorted_stably(nodes, {node: node.all_input_nodes for node in nodes}):
        gm.graph._move(node, gm.graph._root)
    return gm


def legalize_graph(gm: GraphModule) -> GraphModule:
    """The same; torch.fx's own does not keep the order of nodes that do not depend on one another, this one does."""
    return stable_topological_sort(gm)


class FxNetAccFusionsFinder:
    """Groups of supported nodes that hand each other values that are no tensors, and what lies between them.

    A group with an unsupported node in it is taken out of `acc_nodes`. ShapeProp must have run.
    """

    def __init__(self, module: GraphModule, acc_nodes: set[Node]) -> None:
        self.module = module
        self.acc_nodes = acc_nodes

    def __call__(self) -> dict[Node, set[Node]]:
        result: dict[Node, set[Node]] = {}
        for node in self.module.graph.nodes:
            if node not in self.acc_nodes or node in result or "tensor_meta" in node.meta:
                continue
            group = self._group(node)
            if not group <= self.acc_nodes:
                self.acc_nodes -= group
                continue
            for member in set(group):
                group |= result.get(member, set())
            for member in group:
                result[member] = group
        return result

    def _group(self, start: Node) -> set[Node]:
        group: set[Node] = set()
        pending = [start]
        while pending:
            node = pending.pop()
            if node in group:
                continue
            group.add(node)
            neighbours: list[Any] = [source for source in node.all_input_nodes if "tensor_meta" not in source.meta]
            if "tensor_meta" not in node.meta:
                neighbours += node._users
            pending += [other for other in neighbours if other.op in CALLABLE_NODE_OPS]
            if not pending:
                pending += self._between(group)
        return group

    def _between(self, group: set[Node]) -> list[Node]:
        """Nodes outside of the group on a way from one of its nodes to another."""
        after: set[Node] = set()
        nodes = list(self.module.graph.nodes)
        for node in nodes:
            if any(source in group or source in after for source in node.all_input_nodes):
                after.add(node)
        before: set[Node] = set()
        for node in reversed(nodes):
            if any(user in group or user in before for user in node._users):
                before.add(node)
        return [node for node in nodes if node in after and node in before and node not in group]
