"""The guards of a program that speak of its inputs and attributes alone, as a program of their own.
Whoever runs something made of the program in another form, such as its gradients, checks the inputs with it first.
"""

from __future__ import annotations

import operator
from typing import Any

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import are_different, is_guard
from torchgraft.ir.node import Node

_PLAIN = frozenset({getattr, hasattr, isinstance, type, len, int, float, min, max, are_different})
_METHODS = frozenset({"size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "is_complex", "keys"})


def input_checks(program: GraphModule) -> GraphModule:
    """A program that is called like another one, and does nothing but check its inputs.

    >>> import torch, torchgraft
    >>> program = torchgraft.capture(lambda x: x if x.shape[0] > 2 else -x, (torch.ones(3),))
    >>> [guard.condition for guard in input_checks(program).guards]
    ['(x.size(0) > 2)']
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in program.graph.nodes:
        if node.op in ("placeholder", "get_attr") or (
            _is_plain(node) and all(item in copies for item in node.all_input_nodes)
        ):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(None)
    for node in reversed(graph.nodes):
        if node.op in ("get_attr", "call_function", "call_method") and not node._users and not is_guard(node.target):
            graph.erase_node(node)
    graph.set_codegen(program.graph._codegen)
    return GraphModule(program, graph, f"{type(program).__name__}Inputs")


def _is_plain(node: Node) -> bool:
    """Whether a node checks, or computes no tensor."""
    if node.op == "call_method":
        return node.target in _METHODS
    return node.op == "call_function" and (is_guard(node.target) or node.target in _PLAIN or is_question(node.target))


def is_question(target: Any) -> bool:
    """Whether a function asks something about values, or computes with numbers."""
    home = getattr(target, "__module__", "")
    return home == "torchgraft.ir.input_kinds" or (home == "_operator" and target is not operator.matmul)
