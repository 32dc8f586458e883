"""Guards: calls in a program that raise when it runs in a situation it was not captured for.
Which reads become guards is decided while capturing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.errors import GuardError
from torchgraft.ir.structures import attributes_of

if TYPE_CHECKING:
    from torchgraft.ir.graph import Graph
    from torchgraft.ir.node import Node


def guard(function: Callable[..., None]) -> Callable[..., None]:
    """Mark a function as a guard: never dead code (analysis/effects reads the first mark), and written as a bare call."""
    function.__torchgraft_effect__ = function.__torchgraft_guard__ = True  # type: ignore[attr-defined]
    return function


def is_guard(target: Any) -> bool:
    """Whether calling this only checks that a program runs in the situation it was captured for.

    >>> is_guard(check_value), is_guard(print)
    (True, False)
    """
    return getattr(target, "__torchgraft_guard__", False) is True


@guard
def check_training(found: bool, expected: bool, where: str) -> None:
    """Raise unless the module is in the mode in which the program was captured."""
    if found != expected:
        modes = {True: "training mode", False: "evaluation mode"}
        raise GuardError(
            f"the program was captured in {modes[expected]} and the module is now in {modes[found]}, "
            f"but the model branched on self.training at {where}; "
            f"capture the model again in {modes[found]}, or switch this module back with .{'train' if expected else 'eval'}()"
        )


@guard
def check_modes(found: tuple[bool, ...], expected: tuple[bool, ...], where: str) -> None:
    """Raise unless modules are in the modes in which the program was captured, where a model has a `train` of its own: what
    that does, such as freezing some modules, switching the program does not do."""
    if tuple(found) != tuple(expected):
        raise GuardError(
            f"the program was switched to another mode, but the model has a train() of its own at {where}, which does more than "
            "that; switch the model before, and capture it again in that mode"
        )


@guard
def check_given(found: Any, name: str, where: str) -> None:
    """Raise if an argument is None although the program was captured with a value for it."""
    if found is None:
        raise GuardError(
            f"the program was captured with a value for the argument '{name}', and now it is None: the model asks about that at "
            f'{where}; capture it again with concrete_args={{"{name}": None}}, or give a value'
        )


def are_different(*values: Any) -> bool:
    """Whether no two of some inputs are one tensor.

    >>> x = torch.ones(2)
    >>> are_different(x, torch.ones(2), 1, 1), are_different(x, 1, x)
    (True, False)
    """
    places = [id(value) for value in values if isinstance(value, torch.Tensor)]
    return len(set(places)) == len(places)


@guard
def check_value(found: Any, expected: Any, condition: str, where: str) -> None:
    """Raise unless a value that decided what the program does is what it was when the program was captured."""
    if type(found) is type(expected) and found == expected:
        return
    if found == expected or (found != found and expected != expected):
        return
    raise GuardError(
        f"the program was captured for {condition} = {expected!r}, and now it is {found!r}: the model decided what to do by it"
        f" at {where}; capture the model again with inputs like these, or rewrite that line with tensor operations"
    )


class Like:
    """What an object given as an input has to look like: its type, and its attributes or items."""

    def __init__(self, kind: type, parts: dict[Any, Any]) -> None:
        self.kind = kind
        self.parts = parts

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({', '.join([f'{key}={part!r}' for key, part in self.parts.items()])})"


@guard
def check_inputs(expected: dict[str, Any], found: dict[str, Any], where: str) -> None:
    """Raise unless the inputs are of the kinds, and the plain values among them those, that the program was captured for."""
    for name, value in found.items():
        problem = _misfit(expected[name], value, name)
        if problem is not None:
            path, wanted, got = problem
            raise GuardError(
                f"the program was captured for {path} = {wanted}, and now it is {got}, in {where}; "
                "capture the model again with inputs like these"
            )


def _misfit(expected: Any, found: Any, path: str) -> tuple[str, str, str] | None:
    """Where a value differs from what is expected: the path, and both sides in words."""
    if expected is torch.Tensor:
        return misfit_of_tensor(found, path)
    if expected is int or expected is float:
        return None if type(found) is expected else (path, f"a number of type {expected.__name__}", _in_words(found))
    if isinstance(expected, Like):
        if type(found) is not expected.kind:
            return path, f"a {expected.kind.__name__}", _in_words(found)
        return _misfit_of_parts(expected.parts, parts_of(found), path)
    if isinstance(expected, (tuple, list, dict)):
        if isinstance(found, torch.Tensor) or not _is_same_container(expected, found):
            return path, f"a {_container(expected).__name__}", _in_words(found)
        return _misfit_of_parts(parts_of(expected), parts_of(found), path)
    same = found is expected or (type(found) is type(expected) and found == expected)
    return None if same else (path, repr(expected), _in_words(found))


def misfit_of_tensor(found: Any, path: str) -> tuple[str, str, str] | None:
    """A plain tensor is expected: none of a class of its own, which may be asked for, and without attributes."""
    if not isinstance(found, torch.Tensor) or not (is_plain(type(found)) or stands_in(type(found))):
        return path, "a tensor", _in_words(found)
    attributes = list(tensor_attributes(found))
    return (path, "a tensor without attributes", f"one with the attribute '{attributes[0]}'") if attributes else None


def is_plain(kind: type) -> bool:
    """Whether a class of tensors is torch's own."""
    return kind is torch.Tensor or kind is torch.nn.Parameter


def stands_in(kind: type) -> bool:
    """Whether tensors of a class answer every operator themselves, and so stand for others: fake tensors, say."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def tensor_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """What somebody has written onto a tensor; names with an underscore are for libraries.

    >>> x = torch.ones(2)
    >>> x.label = "cat"
    >>> tensor_attributes(x)
    {'label': 'cat'}
    """
    if not tensor.__dict__ or stands_in(type(tensor)):
        return {}
    return {name: value for name, value in tensor.__dict__.items() if not name.startswith("_")}


def _misfit_of_parts(expected: dict[Any, Any], found: dict[Any, Any], path: str) -> tuple[str, str, str] | None:
    if list(expected) != list(found):
        return path, f"something with {len(expected)} parts {list(expected)}", f"one with {len(found)} {list(found)}"
    problems = (_misfit(part, found[key], f"{path}[{key!r}]") for key, part in expected.items())
    return next((problem for problem in problems if problem is not None), None)


def _container(value: Any) -> type:
    return next(kind for kind in (tuple, list, dict) if isinstance(value, kind))


def _is_same_container(expected: Any, found: Any) -> bool:
    # What a graph holds are its own immutable lists and dicts.
    kind = _container(expected)
    return type(found) in (type(expected), kind)


def parts_of(value: Any) -> dict[Any, Any]:
    """The items of a container or the attributes of an object."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    return tensor_attributes(value) if isinstance(value, torch.Tensor) else attributes_of(value)


def _in_words(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor" if type(value) is torch.Tensor else f"a tensor of the class {type(value).__name__}"
    if isinstance(value, (int, float, str, bool, type(None))):
        return repr(value)
    return f"a {type(value).__name__}"


@guard
def check_length(found: Any, expected: int, condition: str, where: str) -> None:
    """Raise unless a call returned as many values as it did when the program was captured."""
    check_value(len(found), expected, condition, where)


@guard
def check_kind(found: Any, expected: type, name: str, where: str) -> None:
    """Raise unless a value is of the kind that the model was told when it asked."""
    if not isinstance(found, expected):
        raise GuardError(
            f"the program was captured for a {expected.__name__} as '{name}', and now it is a {type(found).__name__}: the model "
            f"asks what it is at {where}; fix the value with concrete_args, or name its type in the signature"
        )


@guard
def check_result(found: Any, expected: type, length: int | None, name: str, where: str) -> None:
    """Raise unless a module that is kept whole gave what it gave when the program was captured, by its kind."""
    count = len(found) if isinstance(found, (tuple, list, dict)) else None
    if not isinstance(found, expected) or (length is not None and count != length):
        size = "" if length is None else f" of {length}"
        now = _in_words(found) if count is None else f"{_in_words(found)} of {count}"
        raise GuardError(
            f"the program was captured for a {expected.__name__}{size} as the result of '{name}', and now it is {now}: what is "
            f"done with it at {where} was seen for the former; capture the model again with inputs, and in a mode, like these"
        )


@guard
def check_distinct(written: tuple[Any, ...], others: tuple[Any, ...]) -> None:
    """Raise if an object that the model writes into came in twice: the program reads everything before it writes."""
    places = [id(value) for value in (*written, *others)]
    if len(set(places[: len(written)])) < len(written) or not set(places[: len(written)]).isdisjoint(
        places[len(written) :]
    ):
        raise GuardError(
            "the program was captured for objects that are all different, and now one that the model writes into is among the "
            "inputs twice; capture the model again with inputs like these, or give copies"
        )


@dataclass(frozen=True)
class Guard:
    """Something the program was captured for: it raises GuardError where it is not so."""

    condition: str
    expected: Any
    where: str
    node: Node

    def __str__(self) -> str:
        return f"{self.condition} is {self.expected!r}, because of {self.where}"


def find_guards(graph: Graph) -> list[Guard]:
    """Every guard of a program, in order."""
    guards = []
    for node in graph.nodes:
        if node._target is check_value or node._target is check_length:
            _, expected, condition, where = node._args
            guards.append(Guard(condition, expected, where, node))
        elif node._target is check_inputs:
            fixed, _, where = node._args
            guards += _fixed_inputs(fixed, where, node)
        elif node._target is check_given:
            _, name, where = node._args
            guards.append(Guard(f"'{name}' is given", True, where, node))
        elif node._target is check_kind:
            _, kind, name, where = node._args
            guards.append(Guard(f"'{name}' is a {kind.__name__}", True, where, node))
        elif node._target is check_modes:
            _, expected, where = node._args
            guards.append(Guard("the modes of the modules inside", expected, where, node))
        elif node._target is check_result:
            _, kind, _, name, where = node._args
            guards.append(Guard(f"the result of '{name}' is a {kind.__name__}", True, where, node))
        elif node._target is check_training:
            found, expected, where = node._args
            guards.append(Guard(str(getattr(found, "target", "training")), expected, where, node))
    return guards


def _fixed_inputs(expected: Any, where: str, node: Node) -> list[Guard]:
    if not isinstance(expected, dict):  # kept as an attribute, because there are objects in it that code cannot spell
        expected = node.graph._constants.get(expected._target, {})
    return [Guard(f"the argument '{name}'", value, where, node) for name, value in expected.items() if _is_fixed(value)]


def _is_fixed(expected: Any) -> bool:
    """Whether an input has to have a certain value, not only to be of some kind."""
    if isinstance(expected, Like):
        return any(_is_fixed(part) for part in expected.parts.values())
    if isinstance(expected, (tuple, list)):
        return any(_is_fixed(part) for part in expected)
    if isinstance(expected, dict):
        return any(_is_fixed(part) for part in expected.values())
    return expected is not torch.Tensor and expected is not int and expected is not float


def explanation(graph: Graph) -> str:
    """What was fixed when a program was captured, and why, in plain words."""
    guards = find_guards(graph)
    if not guards:
        return "Nothing was fixed: the program has no guards."
    lines = [f"The program is right where these {len(guards)} things hold, and raises GuardError where one does not:"]
    lines += [f"  {number}. {guard}" for number, guard in enumerate(guards, 1)]
    return "\n".join(lines)
