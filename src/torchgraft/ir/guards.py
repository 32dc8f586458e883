"""Guards: calls in a program that raise when it runs in a situation it was not captured for.
Which reads become guards is decided while capturing.
"""

from __future__ import annotations

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
