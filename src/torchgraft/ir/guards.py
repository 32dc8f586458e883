"""Guards: calls in a program that raise when it runs in a situation it was not captured for.
Which reads become guards is decided while capturing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchgraft.errors import GuardError

if TYPE_CHECKING:
    from torchgraft.ir.graph import Graph
    from torchgraft.ir.node import Node


def check_training(found: bool, expected: bool, where: str) -> None:
    """Raise unless the module is in the mode in which the program was captured."""
    if found != expected:
        modes = {True: "training mode", False: "evaluation mode"}
        raise GuardError(
            f"the program was captured in {modes[expected]} and the module is now in {modes[found]}, "
            f"but the model branched on self.training at {where}; "
            f"capture the model again in {modes[found]}, or switch this module back with .{'train' if expected else 'eval'}()"
        )


# Read by analysis/effects: a guard is never dead code.
check_training.__torchgraft_effect__ = True  # type: ignore[attr-defined]


def check_given(found: Any, name: str, where: str) -> None:
    """Raise if an argument is None although the program was captured with a value for it."""
    if found is None:
        raise GuardError(
            f"the program was captured with a value for the argument '{name}', and now it is None: the model asks about that at "
            f'{where}; capture it again with concrete_args={{"{name}": None}}, or give a value'
        )


check_given.__torchgraft_effect__ = True  # type: ignore[attr-defined]


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


check_value.__torchgraft_effect__ = True  # type: ignore[attr-defined]


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
        if node._target is check_value:
            _, expected, condition, where = node._args
            guards.append(Guard(condition, expected, where, node))
        elif node._target is check_given:
            _, name, where = node._args
            guards.append(Guard(f"'{name}' is given", True, where, node))
        elif node._target is check_training:
            found, expected, where = node._args
            guards.append(Guard(str(getattr(found, "target", "training")), expected, where, node))
    return guards


def explanation(graph: Graph) -> str:
    """What was fixed when a program was captured, and why, in plain words."""
    guards = find_guards(graph)
    if not guards:
        return "Nothing was fixed: the program has no guards."
    lines = [f"The program is right where these {len(guards)} things hold, and raises GuardError where one does not:"]
    lines += [f"  {number}. {guard}" for number, guard in enumerate(guards, 1)]
    return "\n".join(lines)
