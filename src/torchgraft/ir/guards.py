"""Guards: calls in a program that raise when it runs in a situation it was not captured for, and how a guard is written.
Which reads become guards is decided while capturing; what inputs have to look like is in `input_kinds.py`.

A guard is a node like any other, a call of a function marked `@guard`, so whatever copies, splits, interprets, saves or
translates a program takes its guards along. There are no guards outside the graph. Their arguments are nodes and plain
constants, which any code generator can spell, and they follow torch's override protocol, so that whoever traces a program
records them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from torchgraft.errors import GuardError
from torchgraft.ir.arguments import immutable_dict, immutable_list
from torchgraft.ir.input_kinds import fixed_values, in_words, is_instance, misfit
from torchgraft.ir.input_kinds import tensor_attributes as tensor_attributes

if TYPE_CHECKING:
    from torchgraft.ir.graph import Graph
    from torchgraft.ir.node import Node

# What a guard asks for, in words, and the answer that it wants.
Conditions = Iterable[tuple[str, Any]]
_CONTAINERS = frozenset({tuple, list, dict, immutable_list, immutable_dict})
_AGAIN = "capture the model again with inputs like these"


def guard(describe: Callable[..., Conditions]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a guard of a function that raises GuardError; `describe` takes the same arguments and says what it asks for.

    The first parameter is what is looked at: a value, or a tuple or dict of values. The last one says where the model asked.
    """

    def mark(check: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(check)
        def checked(found: Any, *details: Any) -> Any:
            values = _values(found)
            if has_torch_function(values):  # a proxy, or a mode that watches the run: the guard is recorded
                _keep_in_other_graphs(checked, values)
                return handle_torch_function(checked, values, found, *details)
            return check(found, *details)

        # The effect keeps it from being removed as dead code (analysis/effects), the guard is written as a bare call.
        checked.__torchgraft_effect__ = checked.__torchgraft_guard__ = True  # type: ignore[attr-defined]
        checked.__torchgraft_describe__ = describe  # type: ignore[attr-defined]
        return checked

    return mark


def _values(found: Any) -> tuple[Any, ...]:
    """The values that a guard looks at, those inside containers included."""
    if type(found) not in _CONTAINERS:
        return (found,)
    items = tuple(found.values()) if isinstance(found, dict) else tuple(found)
    for item in items:
        if type(item) in _CONTAINERS:
            return tuple([value for item in items for value in _values(item)])
    return items


def _keep_in_other_graphs(check: Callable[..., None], values: tuple[Any, ...]) -> None:
    """torch.fx removes calls whose result is not used, unless it is told about them."""
    if any(type(value).__module__ == "torch.fx.proxy" for value in values):
        from torchgraft.bridge.counterparts import keep_in_torch_fx

        keep_in_torch_fx(check)


def is_guard(target: Any) -> bool:
    """Whether calling this only checks that a program runs in the situation it was captured for.

    >>> is_guard(check_value), is_guard(print)
    (True, False)
    """
    return getattr(target, "__torchgraft_guard__", False) is True


def refuse(what: str, where: str, remedy: str) -> None:
    """Raise GuardError: what happened, then the line of the model that asked, then what to do, each on a line of its own."""
    raise GuardError(f"{what}\n  {'in' if where.startswith('the inputs of') else 'at'} {where}\n  {remedy}")


_MODES = {True: "training mode", False: "evaluation mode"}


def _refuse_mode(found: bool, expected: bool, where: str) -> None:
    refuse(
        f"the program was captured in {_MODES[expected]} and the module is now in {_MODES[found]}, but the model "
        "branched on self.training",
        where,
        f"capture the model again in {_MODES[found]}, or switch this module back with .{'train' if expected else 'eval'}()",
    )


# TorchScript compiles the guard and calls this, and wants to see the types themselves.
_refuse_mode.__annotations__ = {"found": bool, "expected": bool, "where": str, "return": None}
torch.jit.ignore(_refuse_mode)


@guard(lambda found, expected, where: [(str(getattr(found, "target", "training")), expected)])
def check_training(found: bool, expected: bool, where: str) -> None:
    """Raise unless the module is in the mode in which the program was captured."""
    if found != expected:  # which TorchScript compiles; the text it does not
        _refuse_mode(bool(found), expected, where)


@guard(lambda found, name, where: [(f"'{name}' is given", True)])
def check_given(found: Any, name: str, where: str) -> None:
    """Raise if an argument is None although the program was captured with a value for it."""
    if found is None:
        refuse(
            f"the program was captured with a value for the argument '{name}', and now it is None",
            where,
            f'capture the model again with concrete_args={{"{name}": None}}, or give a value',
        )


def are_different(*values: Any) -> bool:
    """Whether no two of some inputs are one tensor.

    >>> x = torch.ones(2)
    >>> are_different(x, torch.ones(2), 1, 1), are_different(x, 1, x)
    (True, False)
    """
    places = [id(value) for value in values if isinstance(value, torch.Tensor)]
    return len(set(places)) == len(places)


# Read by analysis/effects: a question has no effect.
are_different.__torchgraft_pure__ = True  # type: ignore[attr-defined]


@guard(lambda found, expected, condition, where: [(condition, expected)])
def check_value(found: Any, expected: Any, condition: str, where: str) -> None:
    """Raise unless a value that decided what the program does is what it was when the program was captured.

    A tensor is looked into: a program that reads one only to check it can so be compiled as one graph.
    """
    if isinstance(found, torch.Tensor):
        if torch.compiler.is_compiling():  # the value is not known yet: the compiled program checks it when it runs
            holds = torch.isnan(found) if expected != expected else found == expected
            text = f"{_captured_for(condition, expected)}, at {where}; {_AGAIN}"
            # Compilers write the text into C++ as it is.
            return torch._assert_async(holds, text.replace('"', "'").replace("\\", "/").replace("\n", " "))
        found = found.item()
    if type(expected) is bool and torch.compiler.is_compiling():
        found = True if found else False  # noqa: SIM210 (a compiler can branch on a truth value, but not compare it)
    if found == expected or (found != found and expected != expected):
        return
    refuse(
        f"{_captured_for(condition, expected)}, and now it is {found!r}",
        where,
        f"{_AGAIN}, or rewrite that line with tensor operations",
    )


def _captured_for(condition: str, expected: Any) -> str:
    return f"the program was captured for {condition} = {expected!r}"


@guard(lambda found, expected, where: [(f"the argument '{path}'", value) for path, value in fixed_values(expected)])
def check_inputs(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    """Raise unless the inputs are of the kinds, and the plain values among them those, that the program was captured for.

    >>> check_inputs({"x": 5}, {"x": "tensor"}, "the inputs of Net")
    Traceback (most recent call last):
    torchgraft.errors.GuardError: expected a tensor for 'x', got 5
      in the inputs of Net
      capture the model again with inputs like these
    """
    for name, value in found.items():
        kind = expected[name]
        # The commonest case first: guards are run with every call.
        if kind == "tensor" and type(value) is torch.Tensor and (torch.compiler.is_compiling() or not value.__dict__):
            continue
        problem = misfit(kind, value, name)
        if problem is not None:
            path, wanted, got = problem
            refuse(f"expected {wanted} for '{path}', got {got}", where, _AGAIN)


@guard(lambda found, expected, condition, where: [(condition, expected)])
def check_length(found: Any, expected: int, condition: str, where: str) -> None:
    """Raise unless a call returned as many values as it did when the program was captured."""
    if len(found) != expected:
        refuse(f"{_captured_for(condition, expected)}, and now it is {len(found)}", where, _AGAIN)


def is_told_length(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator returns one value for each size in a list that it is given: nobody has to check how many."""
    given = (*args[1:], *kwargs.values())
    return name in ("split", "split_with_sizes") and any(isinstance(value, list | tuple) for value in given)


@guard(lambda found, kind, name, where: [(f"'{name}' is a {_short(kind)}", True)])
def check_kind(found: Any, kind: str, name: str, where: str) -> None:
    """Raise unless a value is of the class, given by its full name, that the model was told when it asked."""
    if not is_instance(found, kind):
        refuse(
            f"expected a {_short(kind)} for '{name}', got {in_words(found)}",
            where,
            "fix the value with concrete_args, or name its type in the signature",
        )


@guard(lambda found, kind, length, name, where: [(f"the result of '{name}' is a {_short(kind)}", True)])
def check_result(found: Any, kind: str, length: int | None, name: str, where: str) -> None:
    """Raise unless a module that is kept whole gave what it gave when the program was captured, by its class and length."""
    if not is_instance(found, kind) or (length is not None and len(found) != length):
        count = f" of {len(found)}" if isinstance(found, (tuple, list, dict)) else ""
        refuse(
            f"expected a {_short(kind)}{'' if length is None else f' of {length}'} as the result of '{name}', got "
            f"{in_words(found)}{count}",
            where,
            "capture the model again with inputs, and in a mode, like these",
        )


def _short(kind: str) -> str:
    return kind.rpartition(".")[2]


@guard(lambda found, count, where: [(f"the first {count} inputs that are written are no other inputs", True)])
def check_distinct(found: tuple[Any, ...], count: int, where: str) -> None:
    """Raise if one of the first `count` objects, into which the model writes, came in twice: the program reads everything
    before it writes."""
    places = [id(value) for value in found]
    if len(set(places[:count])) < count or not set(places[:count]).isdisjoint(places[count:]):
        refuse(
            "the program was captured for objects that are all different, and now one that the model writes into is among the "
            "inputs twice",
            where,
            f"{_AGAIN}, or give copies",
        )


# ---- what the guards of a program say ----


@dataclass(frozen=True)
class Guard:
    """Something the program was captured for: it raises GuardError where it is not so."""

    condition: str
    expected: Any
    where: str
    node: Node

    def __str__(self) -> str:
        return f"{self.condition} is {self.expected!r}, because of {self.where}"


def guards_of(node: Node) -> list[Guard]:
    """What one node checks; nothing where it is no guard."""
    if node._op != "call_function" or not is_guard(node._target):
        return []
    arguments = [*node._args, *node._kwargs.values()]
    constants = node.graph._constants
    return [
        Guard(
            condition,
            constants.get(expected._target, expected) if hasattr(expected, "_target") else expected,
            arguments[-1],
            node,
        )
        for condition, expected in node._target.__torchgraft_describe__(*arguments)
    ]


def find_guards(graph: Graph) -> list[Guard]:
    """Every guard of a program, in order."""
    return [found for node in graph.nodes for found in guards_of(node)]
