"""Which values of a program are surely one tensor each: by schemas, by annotations of torch's functions, or by what a pass noted.
Nothing is run; which memory a tensor shares is asked in `aliases.py`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from torchgraft.analysis.effects.calls import submodule
from torchgraft.analysis.effects.operators import ARITHMETIC, Operator, operator_of
from torchgraft.ir.graph import Graph
from torchgraft.ir.modules import is_from_torch
from torchgraft.ir.node import Node

_CASTS = frozenset({"half", "float", "double", "bfloat16", "long", "int", "bool", "cpu", "cuda"})
_SEVERAL_TENSORS = frozenset(
    {"unbind", "chunk", "split", "tensor_split", "topk", "sort", "var_mean", "std_mean", "split_with_sizes", "hsplit"}
)


def tensor_nodes(graph: Graph) -> set[Node]:
    """The nodes whose value is surely one tensor.

    >>> graph = Graph()
    >>> x = graph.placeholder("x")
    >>> graph.call_method("relu", (graph.call_function(operator.add, (x, 1)),))
    relu
    >>> sorted(tensor_nodes(graph), key=str)
    [add, relu]
    """
    operators: dict[Any, Operator | None] = {}
    result = _used_as_tensors(graph, operators)
    for node in graph.nodes:
        if node._op == "call_module":
            module = submodule(graph.owning_module, node._target)
            is_one = module is not None and is_from_torch(module) and _says_tensor(type(module).forward)
        elif node._op == "placeholder":
            is_one = node._type is torch.Tensor
        elif node._target is operator.getitem:
            is_one = _is_item_of_tensors(node, result)
        elif is_arithmetic(node):
            is_one = has_operand_of(result, node)
        else:
            is_one = _returns_tensor(node, operators)
        if is_one:
            result.add(node)
    return result


def is_arithmetic(node: Node) -> bool:
    """Whether a node calls an operator of Python's that computes on numbers and tensors."""
    return node._op == "call_function" and type(node._target).__hash__ is not None and node._target in ARITHMETIC


def has_operand_of(tensors: set[Node], node: Node) -> bool:
    """Whether a tensor is an operand itself, and not in a list that is one."""
    return any(type(value) is Node and value in tensors for value in node._args)


def _used_as_tensors(graph: Graph, operators: dict[Any, Operator | None]) -> set[Node]:
    """The values that operators take for tensors; a program in which they are none raises, whatever a pass does."""
    result: set[Node] = set()
    for node in graph.nodes:
        first = node._args[0] if node._args else None
        if type(first) is Node and first not in result and node._op in ("call_function", "call_method"):
            found = _operator(node, operators)
            if found is not None and found.signatures:
                if all(s.parameters and s.parameters[0].kind == "Tensor" for s in found.signatures):
                    result.add(first)
    return result


def _returns_tensor(node: Node, operators: dict[Any, Operator | None]) -> bool:
    if node._op == "call_method" and node._target in _CASTS:
        return True
    found = _operator(node, operators) if node._op in ("call_function", "call_method") else None
    if found is not None and found.signatures:
        return all(signature.returns == "tensor" for signature in found.signatures)
    is_functional = getattr(node._target, "__module__", None) == "torch.nn.functional"
    if node._op == "call_function" and is_functional and _says_tensor(node._target):
        return True
    meta = node._meta or {}
    known = meta.get("tensor_meta", meta.get("val"))
    return hasattr(known, "dtype") and hasattr(known, "shape")


def _operator(node: Node, operators: dict[Any, Operator | None]) -> Operator | None:
    try:
        return operators[node._op, node._target]
    except KeyError:
        found = operators[node._op, node._target] = operator_of(node._op, node._target)
        return found
    except TypeError:  # a callable object that cannot be a key
        return None


def _says_tensor(function: Any) -> bool:
    return getattr(function, "__annotations__", {}).get("return") is torch.Tensor


def _is_item_of_tensors(node: Node, tensors: set[Node]) -> bool:
    """Whether an item is a tensor: that of a tensor, of several tensors, or one taken by several indices at once."""
    source, index = node._args
    if source in tensors or type(index) is tuple:
        return True
    name = getattr(source._target, "__name__", source._target) if isinstance(source, Node) else None
    return type(index) is int and name in _SEVERAL_TENSORS
