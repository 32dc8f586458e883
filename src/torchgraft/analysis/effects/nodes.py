"""The questions passes ask about a node, and the memory of answers.
How a call is found out is said in `calls.py` and the files that it asks.
"""

from __future__ import annotations

from typing import Any

from torchgraft.analysis.effects.calls import call_key, find_call, inputs_of
from torchgraft.analysis.effects.declared import declared_effects
from torchgraft.analysis.effects.findings import NO_PLACES, OUTSIDE, Effects, Places
from torchgraft.analysis.effects.operators import operator_of
from torchgraft.analysis.effects.python_functions import is_always_pure

_MOST_ANSWERS = 16_384

# By call, with the numbers of inputs in the place of nodes. Keys hold no model: modules go by their configuration.
_answers: dict[Any, Effects] = {}
# Operators and C functions of which no call has an effect unless one of these keywords is given, and whether the result is
# always new memory; by identity, which is cheaper than the hash of an overload. The target is kept so that it stays its own.
_plain: dict[int, tuple[Any, frozenset[str], bool]] = {}
_plain_methods: dict[str, tuple[frozenset[str], bool]] = {}
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
        known = _plain_methods.get(node.target)
        if known is not None and known[0].isdisjoint(node.kwargs):
            return False
    elif op == "get_attr":
        return False
    elif op != "call_module":
        return True
    effects = _effects_by_number(node)
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
    effects = _effects_by_number(node)
    if not effects.writes and not effects.shares:
        return effects
    inputs = inputs_of(node)
    return Effects(
        _named(effects.writes, node, inputs),
        effects.random,
        effects.unknown,
        _named(effects.shares, node, inputs),
        effects.reasons,
    )


def shares_of(node: Any) -> Places:
    """What the value of a node may share memory with, as `effects_of` says, found quickly for most operators.

    >>> from torchgraft.ir.graph import Graph
    >>> graph = Graph()
    >>> x = graph.placeholder("x")
    >>> shares_of(graph.call_method("relu", (x,))), shares_of(graph.call_method("view", (x, -1)))
    (frozenset(), frozenset({x}))
    """
    if node.op == "call_function":
        plain = _plain.get(id(node.target))
        if plain is not None and plain[2] and plain[1].isdisjoint(node.kwargs):
            return NO_PLACES
    elif node.op == "call_method":
        known = _plain_methods.get(node.target)
        if known is not None and known[1] and known[0].isdisjoint(node.kwargs):
            return NO_PLACES
    return effects_of(node).shares


def _named(places: Places, node: Any, inputs: list[Any]) -> Places:
    """Places with input nodes for their numbers, and with whole paths for those inside a module."""
    if not places:
        return places
    prefix = f"{node.target}." if node.op == "call_module" else ""
    return frozenset(
        [
            inputs[place] if isinstance(place, int) else place if place == OUTSIDE else f"{prefix}{place}".rstrip(".")
            for place in places
        ]
    )


def _effects_by_number(node: Any) -> Effects:
    """The effects of a call, with the numbers of input nodes in the place of the nodes."""
    global _declared
    if declared_effects() != _declared:
        _declared = declared_effects()
        _plain.clear()
        _plain_methods.clear()
        _answers.clear()
    try:
        key = call_key(node)
        known = _answers.get(key)
    except TypeError:
        return find_call(node)
    if known is None:
        known = find_call(node)
        if len(_answers) >= _MOST_ANSWERS:
            _answers.clear()
        _answers[key] = known
        if not known:
            _remember_plain(node)
    return known


def _remember_plain(node: Any) -> None:
    """Note that every call of the node's target is without effect, where that is so."""
    target = node.target
    operator = operator_of(node.op, target)
    if operator is not None:
        if operator.is_plain and node.op == "call_method":
            _plain_methods[target] = operator.written_keywords, operator.makes_new_memory
        elif operator.is_plain:
            _plain[id(target)] = target, operator.written_keywords, operator.makes_new_memory
    elif node.op == "call_function" and is_always_pure(target):
        _plain[id(target)] = target, frozenset(), False
