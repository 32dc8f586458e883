"""The questions passes ask about a node, and the memory of answers that keeps them cheap.
How an answer is found is said in the other files of this folder.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from typing import Any

import torch

from torchgraft.analysis.effects.calls import is_declared_effect
from torchgraft.analysis.effects.machine import Arguments
from torchgraft.analysis.effects.operators import (
    Operator,
    operator_of_function,
    operator_of_method,
    operator_of_overload,
    operator_of_packet,
)
from torchgraft.analysis.effects.statements import Analysis
from torchgraft.analysis.effects.values import OUTSIDE, CannotTell, Local, Value, reachable


@dataclass(frozen=True)
class Effects:
    """What a node may do beyond returning a value.

    `writes` holds the input nodes whose memory may change, the paths of module state that may change
    (`"bn.running_mean"`), and `"<outside>"` for anything else in the world. `shares` holds what the result may share
    memory with, in the same terms. `unknown` means that the node may do anything; `reasons` says why, for people.
    """

    writes: frozenset[Any] = frozenset()
    random: bool = False
    unknown: bool = False
    shares: frozenset[Any] = frozenset()
    reasons: tuple[str, ...] = field(default=(), compare=False)

    def __bool__(self) -> bool:
        return bool(self.writes) or self.random or self.unknown


@dataclass(frozen=True)
class _Answer:
    """Effects of a call with numbers in the place of input nodes, and the reads it depends on."""

    effects: Effects
    reads: tuple[tuple[Any, str, Any], ...]

    def still_holds(self) -> bool:
        return all(namespace.get(name) is found for namespace, name, found in self.reads)


# Targets of which no call has an effect, except through `out=`: operators and C functions, which never change.
_plain: set[Any] = set()
_plain_methods: set[str] = set()
_answers: dict[Any, _Answer] = {}
_ANSWER_LIMIT = 16_384


def is_impure(node: Any, impure_random: bool = True) -> bool:
    """Whether the node must stay even if nobody uses its result.

    Inputs and outputs must, and so must every node that may write, or do something unknown; one that only draws random
    numbers must unless `impure_random` is False.

    >>> from torchgraft.ir.graph import Graph
    >>> graph = Graph()
    >>> x = graph.placeholder("x")
    >>> [is_impure(graph.call_method(name, (x,))) for name in ("relu", "relu_", "bernoulli")]
    [False, True, True]
    """
    op = node.op
    if op == "call_function":
        target = node.target
        try:
            if target in _plain and not node.kwargs and not is_declared_effect(target):
                return False
        except TypeError:
            pass
    elif op == "call_method":
        if node.target in _plain_methods and not node.kwargs:
            return False
    elif op == "get_attr":
        return False
    elif op != "call_module":
        return True
    effects = _answer(node)
    return bool(effects.writes) or effects.unknown or (impure_random and effects.random)


def effects_of(node: Any) -> Effects:
    """Everything that is known about the effects of a node.

    >>> from torchgraft.ir.graph import Graph
    >>> graph = Graph()
    >>> x, y = graph.placeholder("x"), graph.placeholder("y")
    >>> effects_of(graph.call_function(torch.add, (x, x), {"out": y})).writes
    frozenset({y})
    """
    if node.op in ("placeholder", "output"):
        return Effects(writes=frozenset((OUTSIDE,)), reasons=(f"{node.op} nodes are the program's interface",))
    if node.op == "get_attr":
        return Effects(shares=frozenset((node.target,)))
    effects = _answer(node)
    inputs = node.all_input_nodes

    def named(places: frozenset[Any]) -> frozenset[Any]:
        return frozenset(inputs[place] if isinstance(place, int) else place for place in places)

    return Effects(named(effects.writes), effects.random, effects.unknown, named(effects.shares), effects.reasons)


def _answer(node: Any) -> Effects:
    """The effects of a call, with the positions of input nodes in the place of the nodes."""
    key = _key(node)
    if key is not None:
        answer = _answers.get(key)
        if answer is not None and answer.still_holds() and not (node.op == "call_function" and is_declared_effect(node.target)):
            return answer.effects
    analysis = Analysis()
    values = {source: Value(places=frozenset((i,))) for i, source in enumerate(node.all_input_nodes)}
    root = node.graph.owning_module
    module = Value() if root is None else Value(root, frozenset(("",)))
    try:
        result = analysis.run_node(("node",), node, module, values)
    except CannotTell:
        result = analysis.unknown_result(values.values())
    if not analysis.unknown and not analysis.writes and result.known is None and _is_python(node):
        analysis.write_outside("it returns nothing, so it is called for its effect")
    shares = frozenset(place for place in reachable((result,)) if not isinstance(place, Local))
    effects = Effects(
        frozenset(analysis.writes), analysis.random, analysis.unknown, shares, tuple(dict.fromkeys(analysis.reasons))
    )
    if key is not None and analysis.cacheable:
        if len(_answers) >= _ANSWER_LIMIT:
            _answers.clear()
        _answers[key] = _Answer(effects, tuple(analysis.reads))
    if not effects and _is_plain(node):
        (_plain if node.op == "call_function" else _plain_methods).add(node.target)
    return effects


def _is_python(node: Any) -> bool:
    return node.op == "call_module" or (node.op == "call_function" and isinstance(node.target, types.FunctionType))


def _is_plain(node: Any) -> bool:
    """Whether every call of the node's target is like this one (as long as it has no keyword arguments)."""
    if node.op == "call_method":
        operator = operator_of_method(node.target)
        return operator is not None and hasattr(torch.Tensor, node.target) and operator.is_plain
    if node.op != "call_function":
        return False
    operator = _operator(node.target)
    if operator is not None:
        return operator.is_plain
    module = getattr(node.target, "__module__", None)
    return isinstance(node.target, types.BuiltinFunctionType) and module in ("_operator", "math", "builtins")


def _operator(target: Any) -> Operator | None:
    if isinstance(target, torch._ops.OpOverload):
        return operator_of_overload(target)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return operator_of_packet(target)
    return operator_of_function(target) if isinstance(target, types.BuiltinFunctionType) else None


def _key(node: Any) -> Any:
    """What the answer depends on besides the reads, or None where it must not be remembered.

    Modules are read afresh each time (their attributes may have changed), and so are functions that live in no module:
    remembering them would keep them, and all they refer to, alive.
    """
    op, target = node.op, node.target
    if op == "call_module" or (op == "call_function" and not _is_permanent(target)):
        return None
    order: dict[Any, int] = {}
    try:
        parts = tuple([_argument_key(value, order) for value in node.args])
        named = tuple([(name, _argument_key(value, order)) for name, value in node.kwargs.items()]) if node.kwargs else ()
        key = (op, target, parts, named)
        hash(key)
    except TypeError:
        return None
    return key


def _is_permanent(target: Any) -> bool:
    if isinstance(target, types.FunctionType):
        module = sys.modules.get(target.__module__ or "")
        return getattr(module, target.__qualname__, None) is target
    return isinstance(target, types.BuiltinFunctionType | torch._ops.OperatorBase | torch._ops.OpOverloadPacket)


def _argument_key(value: Any, order: dict[Any, int]) -> Any:
    if hasattr(type(value), "all_input_nodes"):
        return _Position(order.setdefault(value, len(order)))
    if isinstance(value, list | tuple):
        return (type(value), *[_argument_key(item, order) for item in value])
    if isinstance(value, torch.Tensor | torch.nn.Module):
        raise TypeError("an object whose memory must not be kept")
    # 1, 1.0 and True are equal, but not for `isinstance` in the code that is read.
    return (type(value), value)


class _Position(int):
    """The number of an input node, told apart from the constant of the same value by its class."""

    def __hash__(self) -> int:
        return hash((_Position, int(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Position) and int(self) == int(other)
