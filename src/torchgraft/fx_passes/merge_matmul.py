"""torch.fx's experimental.merge_matmul: products with one right side become a product of the left sides put together.
Which other calls may be merged, and how equal ones are found, is the business of `passes/`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from torchgraft.capturing.symbolic.tracer import symbolic_trace
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import RunError
from torchgraft.fx_passes.tools import legalize_graph
from torchgraft.ir.node import Node


def split_result_tensors(result: Any, inputs: Sequence[Any], other: Any = None) -> Any:
    """The product of each of `inputs`, out of the product of all of them put together with `other`.

    That is possible for a right side that is one matrix: a batch of them would meet other rows than it should.
    """
    if any(left.dim() < 2 for left in inputs) or (other is not None and other.dim() > 2):
        sides = ", ".join(f"{left.dim()}-D" for left in inputs)
        raise RunError(
            f"cannot merge products of {sides} tensors with one of {getattr(other, 'dim', lambda: 2)()} dimensions\n"
            "  merge_matmul is for matrices, or batches of them, times one matrix; leave this model as it is"
        )
    return torch.split(result, [left.shape[0] for left in inputs])


def may_depend_on(a: Node, b: Node, search_depth: int = 6) -> bool:
    """Whether node `a` is computed from `b`; `search_depth` is torch.fx's, which gives up where this one goes on."""
    pending, seen = [a], {a}
    while pending:
        node = pending.pop()
        if node is b:
            return True
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                pending.append(source)
    return False


def are_nodes_independent(nodes: list[Node]) -> bool:
    """Whether none of these nodes is computed from another."""
    return not any(may_depend_on(one, other) for one in nodes for other in nodes if one is not other)


def merge_matmul(in_mod: torch.nn.Module) -> GraphModule:
    """A program in which `torch.matmul` runs once for all left sides that have a right side in common.

    Products that depend on one another, or between which something is written, stay as they are.

    >>> def function(a, b, weight):
    ...     return torch.matmul(a, weight) + torch.matmul(b, weight)
    >>> program = merge_matmul(function)
    >>> [node.name for node in program.graph.find_nodes(op="call_function", target=torch.matmul)]
    ['matmul_2']
    >>> program(torch.ones(1, 2), torch.ones(1, 2), torch.ones(2, 3))
    tensor([[4., 4., 4.]])
    """
    program = symbolic_trace(in_mod)
    for products in _products_by_right_side(program).values():
        if len(products) > 1 and are_nodes_independent(products) and _nothing_is_written(products[0], products[-1]):
            _merge(program, products)
    program.graph.lint()
    return program


def _products_by_right_side(program: GraphModule) -> dict[Any, list[Node]]:
    found: dict[Any, list[Node]] = {}
    for node in program.graph.find_nodes(op="call_function", target=torch.matmul):
        if len(node.args) == 2 and not node.kwargs and all(isinstance(side, Node) for side in node.args):
            right = node.args[1]
            # A parameter is fetched anew for each use.
            found.setdefault(right.target if right.op == "get_attr" else right, []).append(node)
    return found


def _nothing_is_written(first: Node, last: Node) -> bool:
    node = first
    while node is not last:
        if node.is_impure():
            return False
        node = node.next
    return True


def _merge(program: GraphModule, products: list[Node]) -> None:
    graph = program.graph
    left = [node.args[0] for node in products]
    right = products[0].args[1]
    with graph.inserting_before(products[-1].next):
        together = graph.call_function(torch.cat, (left,))
        product = graph.call_function(torch.matmul, (together, right))
        parts = graph.call_function(split_result_tensors, (product, left, right))
        results = [graph.call_function(operator.getitem, (parts, index)) for index in range(len(left))]
    for old, new in zip(products, results, strict=True):
        new.meta.update(old.meta)
        old.replace_all_uses_with(new)
        graph.erase_node(old)
    legalize_graph(program)  # a product may have been used before the last left side was there
