"""What a call may do, as passes are told (`Effects`) and while it is being found out (`Findings`).
Which calls do what is found by `operators.py`, `python_functions.py` and `trials.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

# Memory that an effect can touch: an input node (its number while an answer is kept for all calls that are alike), a path of
# module state ("bn.running_mean"), or anything else in the world.
OUTSIDE: Final = "<outside>"
Places = frozenset[Any]
NO_PLACES: Final[Places] = frozenset()


@dataclass(frozen=True)
class Effects:
    """What a node may do beyond returning a value.

    `writes` holds the input nodes whose memory may change, the paths of module state that may change
    (`"bn.running_mean"`), and `"<outside>"` for anything else in the world. `shares` holds what the result may share
    memory with, in the same terms. `unknown` means that the node may do anything; `reasons` says why, for people.
    """

    writes: Places = NO_PLACES
    random: bool = False
    unknown: bool = False
    shares: Places = NO_PLACES
    reasons: tuple[str, ...] = field(default=(), compare=False)

    def __bool__(self) -> bool:
        return bool(self.writes) or self.random or self.unknown


class Findings:
    """The effects of one call so far."""

    def __init__(self) -> None:
        self.writes: set[Any] = set()
        self.shares: set[Any] = set()
        self.random = False
        self.unknown = False
        self.reasons: dict[str, None] = {}

    def write(self, places: Iterable[Any], reason: str) -> None:
        """Memory at these places may change."""
        places = set(places)
        if places:
            self.writes |= places
            self.reasons[reason] = None

    def write_outside(self, reason: str) -> None:
        """Something beyond the call changes."""
        self.write((OUTSIDE,), reason)

    def draw(self, reason: str) -> None:
        """Random numbers are drawn."""
        self.random = True
        self.reasons[reason] = None

    def give_up(self, reason: str, places: Iterable[Any] = ()) -> None:
        """Anything may happen, to anything that can be reached."""
        self.unknown = True
        self.shares |= {*places, OUTSIDE}
        self.reasons[reason] = None

    def effects(self) -> Effects:
        """What was found."""
        return Effects(frozenset(self.writes), self.random, self.unknown, frozenset(self.shares), tuple(self.reasons))


def joined(found: list[Effects]) -> Effects:
    """The effects of a call that may do any of these."""
    return Effects(
        frozenset().union(*[effects.writes for effects in found]),
        any(effects.random for effects in found),
        any(effects.unknown for effects in found),
        frozenset().union(*[effects.shares for effects in found]),
        tuple(dict.fromkeys(reason for effects in found for reason in effects.reasons)),
    )
