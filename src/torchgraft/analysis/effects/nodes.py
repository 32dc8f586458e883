"""The questions passes ask about a node.
How an answer is found is said in the other files of this folder; how it is remembered, in `answers.py`.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

from torchgraft.analysis.effects.answers import Answers, submodule
from torchgraft.analysis.effects.builtin_functions import DIAGNOSTICS, is_always_pure
from torchgraft.analysis.effects.calls import declared_effects
from torchgraft.analysis.effects.functions import Analysis
from torchgraft.analysis.effects.operators import operator_of
from torchgraft.analysis.effects.values import OUTSIDE, CannotTell, Findings, Local, Value, reachable


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


_answers: Answers[Effects] = Answers()
# Operators and C functions of which no call has an effect unless one of these keywords is given; by identity, which is
# cheaper than the hash of an overload. The target is kept so that its identity stays its own.
_plain: dict[int, tuple[Any, frozenset[str]]] = {}
_plain_methods: dict[str, frozenset[str]] = {}
_declared = 0


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
        plain = _plain.get(id(node.target))
        if plain is not None and plain[1].isdisjoint(node.kwargs) and declared_effects() == _declared:
            return False
    elif op == "call_method":
        keywords = _plain_methods.get(node.target)
        if keywords is not None and keywords.isdisjoint(node.kwargs):
            return False
    elif op == "get_attr":
        return False
    elif op != "call_module":
        return True
    effects = _effects_by_position(node)
    return bool(effects.writes) or effects.unknown or (impure_random and effects.random)


def effects_of(node: Any) -> Effects:
    """Everything that is known about the effects of a node.

    >>> import torch
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
    effects = _effects_by_position(node)
    inputs = _inputs(node)

    def named(places: frozenset[Any]) -> frozenset[Any]:
        return frozenset(inputs[place] if isinstance(place, int) else place for place in places)

    return Effects(named(effects.writes), effects.random, effects.unknown, named(effects.shares), effects.reasons)


def _effects_by_position(node: Any) -> Effects:
    """The effects of a call, with the positions of input nodes in the place of the nodes."""
    global _declared
    if declared_effects() != _declared:
        _declared = declared_effects()
        _plain.clear()
        _answers.clear()
    return _answers.get(node, _find)


def _find(node: Any) -> tuple[Effects, Findings]:
    analysis = Analysis()
    values = {source: Value(places=frozenset((i,))) for i, source in enumerate(_inputs(node))}
    root = node.graph.owning_module
    module = Value() if root is None else Value(root, frozenset(("",)))
    for source, value in values.items():
        # An operator on programs (cond, map, …) takes them from attributes.
        program = submodule(root, source.target) if source.op == "get_attr" else None
        if program is not None:
            values[source] = Value(program, value.places)
            analysis.cacheable = False
    try:
        result = analysis.run_node(("node",), node, module, values)
    except CannotTell:
        result = analysis.unknown_result(values.values())
    if not analysis.unknown and not analysis.writes and result.known is None and _may_return_nothing(node):
        analysis.write_outside("it returns nothing, so it is called for its effect")
    shares = frozenset(place for place in reachable((result,)) if not isinstance(place, Local))
    reasons = tuple(dict.fromkeys(analysis.reasons))
    effects = Effects(frozenset(analysis.writes), analysis.random, analysis.unknown, shares, reasons)
    if not effects:
        _remember_plain(node)
    return effects, analysis


def _inputs(node: Any) -> list[Any]:
    """The input nodes in the order in which the arguments mention them, which `call_key` counts too."""
    found: dict[Any, None] = {}
    pending: list[Any] = [*node.kwargs.values()][::-1] + [*node.args][::-1]
    while pending:
        value = pending.pop()
        if hasattr(type(value), "all_input_nodes"):
            found[value] = None
        elif isinstance(value, list | tuple):
            pending += value[::-1]
        elif isinstance(value, dict):
            pending += [*value.values()][::-1]
        elif isinstance(value, slice):
            pending += [value.step, value.stop, value.start]
    return list(found)


def _may_return_nothing(node: Any) -> bool:
    """Whether a result that is None means that there is none (and not that None was looked up somewhere)."""
    if node.op != "call_function":
        return node.op == "call_module"
    return isinstance(node.target, types.FunctionType) or node.target in DIAGNOSTICS


def _remember_plain(node: Any) -> None:
    """Note that every call of the node's target is without effect, where that is so."""
    target = node.target
    operator = operator_of(node.op, target)
    if node.op == "call_method":
        if operator is not None and operator.is_plain:
            _plain_methods[target] = operator.written_keywords
    elif node.op == "call_function":
        if operator is not None and operator.is_plain:
            _plain[id(target)] = target, operator.written_keywords
        elif is_always_pure(target):
            _plain[id(target)] = target, frozenset()
