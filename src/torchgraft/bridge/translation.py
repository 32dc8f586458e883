"""A graph from one language into the other, node by node: names, arguments, users, metadata and the state of the graph.
The modules around graphs are in `torch_fx.py`.
"""

from __future__ import annotations

import enum
import functools
import operator
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.fx.immutable_collections import immutable_dict as their_dict
from torch.fx.immutable_collections import immutable_list as their_list

from torchgraft.analysis.effects.declared import is_declared_effect
from torchgraft.bridge.calling import our_codegen, their_codegen
from torchgraft.bridge.counterparts import (
    enter_region,
    factory_name,
    note_tracer,
    our_target,
    our_tracer,
    their_target,
)
from torchgraft.errors import BridgeError
from torchgraft.ir.arguments import EMPTY_DICT, immutable_dict, immutable_list, map_plain, rebuild_tuple
from torchgraft.ir.contexts import enter_context
from torchgraft.ir.copying import import_object
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import _LEAVES, Node
from torchgraft.ir.structures import remade

# What a trace calls the values that were no attributes of the model.
_CONSTANT = re.compile(r"_(tensor_constant|module_constant|\w+_constant_|torchbind_obj|generator)\d+")
# The mark of a leaf function that has another name in torch.fx.
_OUR_WRAPPED = "torchgraft_is_wrapped"


class Translation:
    """The nodes of one graph and what they have become in the other."""

    def __init__(self, node_type: Any, list_type: Any, dict_type: Any) -> None:
        self.nodes: dict[Any, Any] = {}
        self._node_type = node_type
        self._list_type = list_type
        self._dict_type = dict_type

    def argument(self, value: Any, user: str) -> Any:
        """An argument tree with nodes of the other language, which freezes it; `user` is named if a node is unknown."""

        def counterpart(leaf: Any) -> Any:
            if not isinstance(leaf, self._node_type):
                return leaf
            if leaf not in self.nodes:
                raise BridgeError(
                    f"cannot convert node '{user}': its argument '{leaf.name}' is not in the same graph; "
                    "graph.lint() shows what else is wrong"
                )
            return self.nodes[leaf]

        return value if type(value) in _LEAVES else map_plain(value, counterpart)

    def entries(self, values: dict[Any, Any]) -> dict[Any, Any]:
        """A dict of its own with the same entries, nodes in the values mapped."""
        return {key: self.metadata(value) for key, value in values.items()}

    def metadata(self, value: Any) -> Any:
        """The same value where it mentions no node; otherwise a copy that mentions the other language's.

        Nodes of third graphs stay what they are.
        """
        cls = type(value)
        if cls in _LEAVES:
            return value
        if isinstance(value, self._node_type):
            return self.nodes.get(value, value)
        if isinstance(value, list):
            own = self._list_type if cls in (their_list, immutable_list) else None
            return self._rebuilt(value, list(value), own)
        if isinstance(value, tuple):
            return self._rebuilt(value, list(value), None, lambda items: rebuild_tuple(value, items))
        if isinstance(value, dict):
            own = self._dict_type if cls in (their_dict, immutable_dict) else None
            return self._rebuilt(value, list(value.items()), own, lambda items: remade(value, dict(items)))
        if isinstance(value, (set, frozenset)):
            return self._rebuilt(value, list(value))
        if isinstance(value, slice):
            return self._rebuilt(value, [value.start, value.stop, value.step], None, lambda items: slice(*items))
        return value

    def _rebuilt(
        self, value: Any, items: list[Any], own: Any = None, remake: Callable[[list[Any]], Any] | None = None
    ) -> Any:
        """A container with its items mapped; `own` is its class in the other language, if that has one for it."""
        mapped = [self.metadata(item) for item in items]
        if own is not None and own is not type(value):
            return own(mapped)
        if all(new is old for new, old in zip(mapped, items, strict=True)):
            return value
        return remade(value, mapped) if remake is None else remake(mapped)

    def users(self, users: dict[Any, None]) -> dict[Any, None]:
        """The users of a node, in their order."""
        return {self.nodes[user]: None for user in users if user in self.nodes}


# ---- from torch.fx ----


def graph_from_fx(source: torch.fx.Graph) -> tuple[Graph, Translation]:
    """Our graph with the same nodes, and the nodes that correspond."""
    graph = Graph(tracer_cls=our_tracer(source), tracer_extras=source._tracer_extras)
    translation = Translation(torch.fx.Node, immutable_list, immutable_dict)
    # All nodes come first, so that a graph whose order is wrong arrives as it is and lint() can say so.
    for theirs in source.nodes:
        if getattr(theirs, "_repr_fn", None) is not None:
            raise BridgeError(
                f"cannot convert node '{theirs.name}': it has a _repr_fn, which lets torch.fx write it in a way of its own; "
                "set it to None and rename the node instead"
            )
        ours = Node(graph, theirs.name, theirs.op, our_target(theirs.target), (), None, theirs.type)
        graph._link(ours, graph._root)
        translation.nodes[theirs] = ours
    for theirs, ours in translation.nodes.items():
        args = translation.argument(theirs.args, theirs.name)
        if theirs.target is enter_region:
            args = (import_object(args[0]), *args[1:])
        kwargs = translation.argument(theirs.kwargs, theirs.name) if theirs.kwargs else EMPTY_DICT
        ours._set_arguments(args, kwargs)
        ours._meta = translation.entries(theirs.meta)
        if ours._meta.pop(_OUR_WRAPPED, False):
            ours._meta["is_wrapped"] = True
        if vars(theirs):
            vars(ours).update(translation.entries(vars(theirs)))
    for theirs, ours in translation.nodes.items():
        ours._users = translation.users(theirs.users)
    names = source._graph_namespace
    graph._graph_namespace._used = {*names._used_names, *[node._name for node in graph.nodes]}
    graph._graph_namespace._counts = dict(names._base_count)
    graph._code_generator = our_codegen(source._codegen)
    return graph, translation


def find_constants(graph: Graph, module: torch.nn.Module) -> dict[str, Any]:
    """The values that a trace put into the module because the model has no attribute for them.

    Our graphs keep them, so that another module can be made of graph and model.
    """
    targets = [node._target for node in graph.nodes if node._op == "get_attr"]
    return {name: getattr(module, name) for name in targets if _CONSTANT.fullmatch(name) and hasattr(module, name)}


# ---- to torch.fx ----


def graph_to_fx(source: Graph) -> tuple[torch.fx.Graph, Translation]:
    """torch.fx's graph with the same nodes, and the nodes that correspond."""
    graph = torch.fx.Graph(tracer_extras=source._tracer_extras)
    note_tracer(source._tracer_cls, graph)
    translation = Translation(Node, their_list, their_dict)
    for ours in source.nodes:
        theirs = graph.create_node(ours._op, their_target(ours._target), name=ours._name, type_expr=ours._type)
        if theirs.name != ours._name:
            theirs.name = ours._name
            graph._graph_namespace._rename_object(theirs, ours._name)
        translation.nodes[ours] = theirs
    for ours, theirs in translation.nodes.items():
        args = ours._args
        if ours._target is enter_context:
            args = (factory_name(args[0], ours._name), *args[1:])
        kwargs = ours._kwargs
        if _is_of_torch(ours):
            args = tuple(map(_as_dtype, args))
            kwargs = {name: _as_dtype(value) for name, value in kwargs.items()}
        theirs.args = translation.argument(args, ours._name)
        theirs.kwargs = translation.argument(kwargs, ours._name)
        theirs.meta = translation.entries(ours.meta)
        if theirs.target is not ours._target and theirs.meta.pop("is_wrapped", False):
            theirs.meta[_OUR_WRAPPED] = True  # torch.fx would look for a function of the other name
        if vars(ours):
            vars(theirs).update(translation.entries(vars(ours)))
        check_writing(theirs)
        if ours._op == "call_function" and is_declared_effect(theirs.target):
            torch.fx.node.has_side_effect(theirs.target)
    for ours, theirs in translation.nodes.items():
        users = translation.users(ours._users)
        theirs.users.clear()
        theirs.users.update(users)
    names = source._graph_namespace
    graph._graph_namespace._used_names = {*names._used, *graph._graph_namespace._used_names}
    graph._graph_namespace._base_count = dict(names._counts)
    graph._codegen = their_codegen(source)
    return graph, translation


# What torch takes for a dtype and torch.fx has no way to write.
_DTYPES = {int: torch.int64, float: torch.float64, bool: torch.bool, complex: torch.complex128}


def _is_of_torch(node: Node) -> bool:
    """Whether a node calls a function of torch's, or a method that tensors have."""
    if node._op == "call_method":
        return hasattr(torch.Tensor, str(node._target))
    home = getattr(node._target, "__module__", None) or ""
    return node._op == "call_function" and home.partition(".")[0] == "torch"


def _as_dtype(value: Any) -> Any:
    return _DTYPES.get(value, value) if isinstance(value, type) else value


def warn(text: str) -> None:
    """Warn at the line that called `from_fx` or `to_fx`."""
    warnings.warn(text, stacklevel=5)


# ---- what code generated by torch.fx cannot say ----


_LITERALS = (int, float, complex, str, bytes, type(None), type(Ellipsis), range)
_TORCH_LITERALS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Written by torch.fx through a global of their own, but not inside dicts and named tuples.
_GLOBALS = (torch._ops.OpOverload, torch._ops.HigherOrderOperator, enum.Enum)
# The names that code generated by torch.fx can use.
_SCOPE = {"torch": torch, "device": torch.device, "inf": float("inf"), "nan": float("nan"), "NoneType": type(None)}


def check_writing(node: torch.fx.Node) -> None:
    """Raise BridgeError for an argument that torch.fx cannot write; warn where it writes something else than is meant."""
    inside = " in an output" if node.op == "output" and _writes_outputs_by_repr() else ""
    for value in [*node.args, *node.kwargs.values()]:
        _check_value(value, node, inside)
    is_power = node.op == "call_function" and node.target is operator.pow and bool(node.args)
    if is_power and type(node.args[0]) in (int, float) and repr(node.args[0]).startswith("-"):
        _warn(node, f"{node.args[0]!r} ** exponent, which Python reads as -({-node.args[0]!r} ** exponent)")  # type: ignore[operator]


@functools.cache
def _writes_outputs_by_repr() -> bool:
    """Whether torch.fx writes what is returned as `repr` says it, and not as it writes arguments; it did before 2.13."""
    graph = torch.fx.Graph()
    graph.output([torch.ops.aten.relu.default])
    return repr(torch.ops.aten.relu.default) in graph.python_code("self").src


def _check_value(value: Any, node: torch.fx.Node, inside: str) -> None:
    """`inside` names a container whose items torch.fx writes by their repr alone."""
    if isinstance(value, dict):
        for item in [*value.keys(), *value.values()]:
            _check_value(item, node, " inside a dict")
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        if inside:
            _refuse(value, node, inside)
        for item in value:
            _check_value(item, node, " inside a named tuple")
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_value(item, node, inside)
    elif isinstance(value, slice):
        for item in (value.start, value.stop, value.step):
            _check_value(item, node, inside)
    elif isinstance(value, _GLOBALS):
        if inside:
            _refuse(value, node, inside)
    elif isinstance(value, (torch.fx.Node, *_SYMBOLS)) or type(value) in (*_LITERALS, bool, *_TORCH_LITERALS):
        pass
    elif not _reads_back(value):
        _refuse(value, node, inside)


def _reads_back(value: Any) -> bool:
    """Whether the text that torch.fx would write means the same value."""
    try:
        return bool(eval(repr(value), dict(_SCOPE)) == value)
    except Exception:  # a repr is any text, and comparing may run any code
        return False


def _refuse(value: Any, node: torch.fx.Node, inside: str) -> None:
    raise BridgeError(
        f"cannot carry node '{node.name}' over to torch.fx: its argument {value!r} of type {type(value).__name__}{inside} "
        "cannot be written into code generated by torch.fx; keep the value as an attribute of the module and fetch it "
        "with a get_attr node"
    )


def _warn(node: torch.fx.Node, text: str) -> None:
    warnings.warn(
        f"torch.fx writes node '{node.name}' as {text}; its Interpreter runs the node right, its generated code does not",
        stacklevel=6,
    )
