"""What a backend supports, said with torch.fx's classes: by the name of what a node calls and the dtypes it is called on.
What is done with the answer is in `partitioner.py` and `split.py`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchgraft.errors import GraphError
from torchgraft.ir.node import Node
from torchgraft.ir.printing import qualified_name

CALLABLE_NODE_OPS = {"call_module", "call_function", "call_method"}

Modules = Mapping[str, torch.nn.Module]
IsNodeSupported = Callable[[Modules, Node], bool]
SupportedArgumentDTypes = tuple[Sequence[Sequence[torch.dtype] | None], Mapping[str, Sequence[torch.dtype]]] | None
SupportDict = Mapping[str, SupportedArgumentDTypes]


def get_acc_ops_name(k: str | type) -> str:
    """The name of a type as support tables write it: `torch.nn.modules.linear.Linear`."""
    if isinstance(k, str):
        return k
    module = k.__module__ or ""
    if "acc_ops" in module:
        return f"acc_ops.{k.__name__}"
    return f"{module.replace('torch._ops', 'torch.ops')}.{k.__name__}"


def get_node_target(submodules: Modules, node: Node) -> str:
    """The name of what a call calls: of the function, of the type of the module, or of the method.

    >>> from torchgraft.ir.graph import Graph
    >>> graph = Graph()
    >>> get_node_target({}, graph.call_function(torch.relu, (graph.placeholder("x"),)))
    'torch.relu'
    """
    if node.op == "call_module":
        module = submodules[node.target]
        return get_acc_ops_name(getattr(module, "_base_class_origin", type(module)))
    if node.op == "call_function":
        home = getattr(node.target, "__module__", None) or ""
        return f"acc_ops.{node.target.__name__}" if "acc_ops" in home else qualified_name(node.target)
    if node.op == "call_method":
        return node.target
    raise GraphError(
        f"cannot say what node '{node.name}' calls: it is a {node.op}; ask for {', '.join(sorted(CALLABLE_NODE_OPS))}"
    )


class OperatorSupportBase(abc.ABC):
    """Says whether a backend supports a node."""

    @abc.abstractmethod
    def is_node_supported(self, submodules: Modules, node: Node) -> bool:
        """Whether the node is supported; `submodules` are the program's modules by name."""


class OperatorSupport(OperatorSupportBase):
    """Support by a table from names (see `get_node_target`) to the dtypes that arguments may have; None for any.

    Dtypes are a pair: for positional arguments a list each (None for any), for keywords a list by name.

    >>> from torchgraft.ir.graph import Graph
    >>> graph = Graph()
    >>> node = graph.call_function(torch.relu, (graph.placeholder("x"),))
    >>> OperatorSupport({"torch.relu": None}).is_node_supported({}, node)
    True
    """

    _support_dict: SupportDict

    def __init__(self, support_dict: SupportDict | None = None) -> None:
        self._support_dict = support_dict or {}

    def is_node_supported(self, submodules: Modules, node: Node) -> bool:
        if node.op not in CALLABLE_NODE_OPS:
            return True
        target = get_node_target(submodules, node)
        if target not in self._support_dict:
            return False
        dtypes = self._support_dict[target]
        if dtypes is None:
            return True
        positional, keywords = dtypes
        pairs = [
            *zip(positional, node.args, strict=False),
            *[(allowed, node.kwargs[name]) for name, allowed in keywords.items() if name in node.kwargs],
        ]
        return all(
            argument_dtype(value) in allowed
            for allowed, value in pairs
            if allowed is not None and isinstance(value, Node)
        )


def argument_dtype(argument: Node) -> Any:
    """The dtype that a pass noted on a node, or the Python type of what is no tensor."""
    known = argument.meta.get("tensor_meta")
    if known is None and "type" not in argument.meta:
        known = argument.meta.get("val")
    dtype = getattr(known, "dtype", None)
    if dtype is not None:
        return dtype
    if "type" in argument.meta:
        return argument.meta["type"]
    raise GraphError(
        f"cannot compare dtypes: nothing is known about the dtype of node '{argument.name}'; propagate shapes first, for example "
        "with ShapeProp(module).propagate(*inputs)"
    )


class _Function(OperatorSupportBase):
    def __init__(self, function: IsNodeSupported) -> None:
        self._function = function

    def is_node_supported(self, submodules: Modules, node: Node) -> bool:
        return self._function(submodules, node)


def create_op_support(is_node_supported: IsNodeSupported) -> OperatorSupportBase:
    """Support by a function of the modules and the node."""
    return _Function(is_node_supported)


def chain(*op_support: OperatorSupportBase) -> OperatorSupportBase:
    """Support where all of these support."""
    return _Function(lambda modules, node: all(each.is_node_supported(modules, node) for each in op_support))


def any_chain(*op_support: OperatorSupportBase) -> OperatorSupportBase:
    """Support where any of these supports."""
    return _Function(lambda modules, node: any(each.is_node_supported(modules, node) for each in op_support))


class OpSupports:
    """Small pieces of support to put together with `chain`."""

    @classmethod
    def decline_if_input_dtype(cls, dtype: torch.dtype) -> OperatorSupportBase:
        """No support for a node with an input of this dtype."""
        return _Function(lambda modules, node: all(argument_dtype(source) != dtype for source in node.all_input_nodes))

    @classmethod
    def decline_if_node_in_names(cls, disallow_set: set[str]) -> OperatorSupportBase:
        """No support for nodes of these names."""
        return _Function(lambda modules, node: node.name not in disallow_set)
