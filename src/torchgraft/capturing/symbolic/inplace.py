"""In-place operators in a finished trace: `y += x` becomes `y + x` where nobody could tell the difference.
Everything else stays in place, because an alias of the value may be looking.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node

PLAIN_FORM = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
    operator.imatmul: operator.matmul,
    operator.ilshift: operator.lshift,
    operator.irshift: operator.rshift,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
}
_FRESH_OPERATORS = frozenset(PLAIN_FORM.values()) | {operator.neg, operator.invert}


def simplify_in_place(nodes: list[Node], paths: dict[torch.nn.Module, str], has_regions: bool) -> None:
    """Replace in-place operators by plain ones where the value written is new and nothing else refers to it.

    `v += w` keeps the type of `v`, and `v + w` may not; so the types must be known to agree. `nodes` are those of a graph,
    `paths` has the model's modules, and `has_regions` says whether the graph enters contexts.
    """
    candidates = [node for node in nodes if node._target in PLAIN_FORM and node._op == "call_function"]
    under_autocast = _under_autocast(nodes) if has_regions else set()
    types = _Types({path: module for module, path in paths.items()}, under_autocast)
    for node in candidates:
        if types.may_be_plain(node):
            node.target = PLAIN_FORM[node._target]


def renew_constants(graph: Graph, ids_outside: Callable[[], frozenset[int]]) -> None:
    """Have tensors that the traced function made where nobody saw it (of numpy's arrays, say), and that the program may write
    into or hand out, be new in every run: the program has a copy of each, and makes another one of it. `ids_outside` has the
    tensors that were there before."""
    fetches: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node._op == "get_attr" and isinstance(graph._constants.get(node._target), torch.Tensor):
            fetches.setdefault(node._target, []).append(node)
    suspects = [nodes for nodes in fetches.values() if any(map(_may_be_written, nodes))]
    known = ids_outside() if suspects else frozenset()
    for nodes in suspects:
        if id(graph._constants[nodes[0]._target]) in known:
            continue
        with graph.inserting_after(nodes[0]):
            renewed = graph.create_node("call_method", "clone", (nodes[0],))
        renewed._origin = nodes[0]._origin
        for node in nodes:
            node.replace_all_uses_with(renewed, delete_user_cb=functools.partial(operator.is_not, renewed))
            if node is not nodes[0]:
                graph.erase_node(node)


def _may_be_written(node: Node) -> bool:
    """Whether a value, or one made of it, is written into, goes to somebody who might, or is returned."""
    if any(user._op == "output" for user in node._users):
        return True
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop()._users:
            if user not in seen:
                if _writes(user):
                    return True
                seen.add(user)
                pending.append(user)
    return False


def _writes(node: Node) -> bool:
    target = node._target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if node._op == "call_module" or "out" in node._kwargs or "inplace" in node._kwargs:
        return True
    if node._op == "call_function" and not (getattr(target, "__module__", None) or "").startswith(_PLAIN_HOMES):
        return True
    if writes_by_schema(target):
        return True
    return (name.endswith("_") and not name.endswith("__")) or target in PLAIN_FORM or target is operator.setitem


def writes_by_schema(function: Any) -> bool:
    """Whether an operator of `torch.ops` writes what it is given, other than `out`.

    >>> writes_by_schema(torch.ops.aten.add_.Tensor), writes_by_schema(torch.ops.aten.add)
    (True, False)
    """
    if isinstance(function, torch._ops.OpOverload):
        return bool(function._schema.is_mutable)
    return isinstance(function, torch._ops.OpOverloadPacket) and any(
        getattr(function, name)._schema.is_mutable for name in function.overloads() if "out" not in name
    )


_PLAIN_HOMES = ("torch", "_operator", "builtins")


def _under_autocast(nodes: list[Node]) -> set[Node]:
    """The nodes that run under autocast, which decides on types by rules of its own."""
    found: set[Node] = set()
    regions: list[Any] = []
    for node in nodes:
        if node._target is enter_context:
            regions.append(node._args[0])
        elif node._target is exit_context and regions:
            regions.pop()
        elif torch.autocast in regions:
            found.add(node)
    return found


class _Types:
    """The element types of values where modules of torch.nn decide them, worked out when they are asked for: each as it is, and
    as it is where somebody runs the program under autocast, which has rules of its own."""

    def __init__(self, modules: dict[str, torch.nn.Module], under_autocast: set[Node]) -> None:
        self._modules = modules
        self._under_autocast = under_autocast
        self._types: dict[Node, _TwoTypes] = {}

    def may_be_plain(self, node: Node) -> bool:
        """Whether nobody can tell an in-place operator from the plain one."""
        written, other = node._args
        if not isinstance(written, Node) or len(written._users) > 1 or not self._is_new(written):
            return False
        if isinstance(other, Node):
            (known, narrow), (known_other, narrow_other) = self._types_of(written), self._types_of(other)
            wanted = known_other or self._wanted(other, node)
            return known is not None and known == wanted and narrow is not None and narrow == narrow_other
        # A float, or a quotient, would make floats of integers, where eager raises.
        if isinstance(other, float) or node._target is operator.itruediv:
            known, _ = self._types_of(written)
            return isinstance(other, int | float) and known is not None and known.is_floating_point
        return isinstance(other, int)

    def _types_of(self, node: Node) -> _TwoTypes:
        """The types of the value of a node, as far as they are known without an input."""
        types = self._types
        if node in types:
            return types[node]
        pending = [(node, *self._rule(node))]
        while pending:  # no recursion: a chain may be longer than Python's stack
            current, decided, sources, keeps = pending[-1]
            if decided is None:
                for source in sources:
                    if source not in types:
                        pending.append((source, *self._rule(source)))
                if pending[-1][0] is not current:
                    continue
                known, narrow = types[sources[0]]
                for source in sources[1:]:
                    other = types[source]
                    known = known if other[0] == known else None
                    narrow = narrow if other[1] == narrow else None
                decided = known, narrow if keeps else None
            types[current] = decided
            pending.pop()
        return types[node]

    def _rule(self, node: Node) -> tuple[_TwoTypes | None, Sequence[Node], bool]:
        """The types of a node if a module decides them, the nodes whose common types they are otherwise, and whether that is so
        under autocast too."""
        target = node._target
        if node._op == "call_module":
            module: Any = self._modules.get(target)
            rules = _rules_of_autocast(type(module))  # type: ignore[arg-type]
            if rules is not None and node not in self._under_autocast:
                # Products with a weight need, and give, the type of the weight, or that of autocast; other modules keep the
                # type they get.
                is_product, keeps = rules
                weight = None if keeps else _weight_of(module)
                if weight is not None:
                    return (weight.dtype, _TYPE_OF_AUTOCAST if is_product else None), (), False
                if node._inputs:
                    return None, node._inputs[:1], keeps
        elif (target in _FRESH_OPERATORS or target in PLAIN_FORM) and node._op == "call_function" and node._inputs:
            return None, node._inputs, target not in _OPERATORS_OF_AUTOCAST
        return _NOTHING_KNOWN, (), False

    def _torch_module(self, node: Node) -> torch.nn.Module | None:
        module: Any = self._modules.get(node._target)
        return None if _rules_of_autocast(type(module)) is None else module  # type: ignore[arg-type]

    def _wanted(self, node: Node, operator_node: Node) -> torch.dtype | None:
        """The type a value must have because a product with a weight takes it, or would raise."""
        if operator_node in self._under_autocast:
            return None
        for user in node._users:
            if user._op == "call_module" and user._args and user._args[0] is node:
                module = self._torch_module(user)
                if module is not None and not isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
                    weight = _weight_of(module)
                    if weight is not None:
                        return weight.dtype
        return None

    def _is_new(self, node: Node) -> bool:
        """Whether the value of a node surely shares no memory with anything that was there before."""
        if node._op == "call_module":
            module = self._torch_module(node)
            # A torch.nn module that owns parameters computes with them; those that hand their input through own none. A hook
            # may have kept the output.
            if module is None or module._forward_hooks or module._forward_pre_hooks:
                return False
            for table in (module._parameters, module._buffers):
                for value in table.values():
                    if value is not None:
                        return True
            return False
        # Schemas do not say it of all functions (atleast_2d hands its input through); Python's operators always do.
        return node._op == "call_function" and node._target in _FRESH_OPERATORS


_TwoTypes = tuple[torch.dtype | None, torch.dtype | None]
_NOTHING_KNOWN: _TwoTypes = (None, None)
# In the place of the one that autocast was told.
_TYPE_OF_AUTOCAST = torch.bfloat16

_nn = torch.nn.modules
_PRODUCTS = (_nn.Linear, _nn.conv._ConvNd)
# Those without a rule in autocast, on any device; pools of three dimensions have one.
_KEEP_TYPES = (
    _nn.batchnorm._BatchNorm, _nn.instancenorm._InstanceNorm, _nn.dropout._DropoutNd, _nn.Identity,
    _nn.MaxPool1d, _nn.MaxPool2d, _nn.AvgPool1d, _nn.AvgPool2d, _nn.AdaptiveAvgPool1d, _nn.AdaptiveAvgPool2d,
    _nn.ReLU, _nn.ReLU6, _nn.LeakyReLU, _nn.SiLU, _nn.GELU, _nn.Hardswish, _nn.Hardtanh, _nn.Hardsigmoid, _nn.Mish,
    _nn.ELU, _nn.Sigmoid, _nn.Tanh,
)  # fmt: skip
_OPERATORS_OF_AUTOCAST = frozenset({operator.pow, operator.ipow, operator.matmul, operator.imatmul})


@functools.cache
def _rules_of_autocast(cls: Any) -> tuple[bool, bool] | None:
    """Whether modules of a class of torch's give the type that autocast was told, and whether they keep the type they get."""
    is_torch = cls.__module__.startswith("torch.nn.modules")
    return (issubclass(cls, _PRODUCTS), issubclass(cls, _KEEP_TYPES)) if is_torch else None


def _weight_of(module: torch.nn.Module) -> torch.Tensor | None:
    weight = module._parameters.get("weight")
    return weight if weight is not None and weight.dim() > 1 else None
