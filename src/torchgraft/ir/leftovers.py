"""What every run of a model leaves in its attributes, kept with a program so that its runs leave that too.
What a watched run has left, and whether the next one leaves the same, is found out while capturing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

MISSING = object()
_BY_VALUE = frozenset({int, float, bool, str, bytes, complex, tuple, type(None)})


def is_plain(value: Any) -> bool:
    """Whether a value is a number or a text, or a tuple of such.

    >>> is_plain((1, "a")), is_plain([1])
    (True, False)
    """
    return all(map(is_plain, value)) if type(value) is tuple else type(value) in _BY_VALUE


class Entry(NamedTuple):
    """One entry of a dict (the attributes of a module or an object, its hooks) that a run has changed."""

    table: dict[Any, Any]
    key: Any
    before: Any
    after: Any

    def is_before(self) -> bool:
        """Whether the entry is as it was."""
        now = self.table.get(self.key, MISSING)
        if now is self.before:
            return True
        return type(now) is type(self.before) and type(now) in _BY_VALUE and now == self.before

    def put(self) -> None:
        """Make the entry what the run made of it."""
        self.table[self.key] = self.after

    def take_back(self) -> None:
        """Make the entry what it was."""
        if self.before is MISSING:
            self.table.pop(self.key, None)
        else:
            self.table[self.key] = self.before


class Leftovers:
    """Groups of entries. Of each group all are put where all are as they were, and else none: a flag says that something was
    done, and both come together.

    >>> kept = {"ready": False}
    >>> leave(Leftovers([[Entry(kept, "ready", False, True), Entry(kept, "steps", MISSING, 3)]]))
    >>> kept
    {'ready': True, 'steps': 3}
    """

    def __init__(self, groups: Iterable[list[Entry]] = ()) -> None:
        self.groups = list(groups)

    def __reduce__(self) -> Any:
        return (Leftovers, ())  # a copy of a program shares nothing with the model

    def __repr__(self) -> str:
        return f"Leftovers({', '.join(str(entry.key) for group in self.groups for entry in group)})"


def leave(leftovers: Leftovers) -> None:
    """Leave in the model what its own run would have left there."""
    for group in leftovers.groups:
        if all(entry.is_before() for entry in group):
            for entry in group:
                entry.put()


# Read by analysis/effects: what is written into the model is never dead.
leave.__torchgraft_effect__ = True  # type: ignore[attr-defined]
