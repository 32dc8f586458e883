"""Guards: calls in a program that raise when it runs in a situation it was not captured for.
Which reads become guards is decided while capturing.
"""

from __future__ import annotations

from typing import Any

from torchgraft.errors import GuardError


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
