"""What is asked of a trap in each way of capturing: never silently wrong, and mostly right."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.traps.catalogue import GROUPS, TRAPS
from tests.traps.known import KNOWN, LEAST_SHARE_OF_RIGHT
from tests.traps.runner import CRASH, WRONG, judge, share_of_right
from tests.traps.trap import Trap


def cases(*ways: str) -> list[Any]:
    """Every trap in some ways; those that are known to go wrong are expected to."""
    found = []
    for trap in TRAPS:
        for way in ways:
            reason = KNOWN.get((trap.name, way))
            marks: list[Any] = [] if reason is None else [pytest.mark.xfail(strict=True, reason=reason)]
            found.append(pytest.param(trap, way, id=f"{way}: {trap.name}", marks=marks))
    return found


def check_never_silently_wrong(trap: Trap, way: str) -> None:
    verdicts = judge(trap, way)
    bad = [f"{name}: {item.kind}, {item.reason}" for name, item in verdicts.items() if item.kind in (WRONG, CRASH)]
    assert not bad, (
        f"{trap.name}, captured as {way}, goes wrong in {len(bad)} of {len(verdicts)} variations\n" + "\n".join(bad)
    )


def check_mostly_right(group: str, way: str) -> None:
    verdicts = [judge(trap, way) for trap in GROUPS[group]]
    counts = Counter(item.kind for result in verdicts for item in result.values())
    share = share_of_right(verdicts)
    print(f"{group}, {way}: {len(verdicts)} traps, {dict(counts)}, {share:.1%} right")
    least = LEAST_SHARE_OF_RIGHT[group][way]
    assert share >= least, f"{group}, {way}: {share:.4f} of the variations are right; {dict(counts)}"
