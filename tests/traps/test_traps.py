"""Every trap, captured in each of the four ways, is right or refused in every variation, and mostly right.
`python -m tests.traps WORD` shows in detail what becomes of a trap.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.traps.catalogue import GROUPS, TRAPS
from tests.traps.known import KNOWN, LEAST_SHARE_OF_RIGHT
from tests.traps.runner import CRASH, WAYS, WRONG, judge, share_of_right
from tests.traps.trap import Trap


def _cases() -> list[Any]:
    cases = []
    for trap in TRAPS:
        for way in WAYS:
            reason = KNOWN.get((trap.name, way))
            marks: list[Any] = [] if reason is None else [pytest.mark.xfail(strict=True, reason=reason)]
            marks += [pytest.mark.slow] if way == "aten" else []
            cases.append(pytest.param(trap, way, id=f"{way}: {trap.name}", marks=marks))
    return cases


@pytest.mark.parametrize(("trap", "way"), _cases())
def test_never_silently_wrong(trap: Trap, way: str) -> None:
    verdicts = judge(trap, way)
    bad = [f"{name}: {item.kind}, {item.reason}" for name, item in verdicts.items() if item.kind in (WRONG, CRASH)]
    assert not bad, (
        f"{trap.name}, captured as {way}, goes wrong in {len(bad)} of {len(verdicts)} variations\n" + "\n".join(bad)
    )


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("group", list(GROUPS))
def test_mostly_right(group: str, way: str) -> None:
    verdicts = [judge(trap, way) for trap in GROUPS[group]]
    counts = Counter(item.kind for result in verdicts for item in result.values())
    share = share_of_right(verdicts)
    print(f"{group}, {way}: {len(verdicts)} traps, {dict(counts)}, {share:.1%} right")
    least = LEAST_SHARE_OF_RIGHT[group][way]
    assert share >= least, f"{group}, {way}: {share:.4f} of the variations are right; {dict(counts)}"


def test_there_are_many_traps_with_names_of_their_own() -> None:
    assert len(TRAPS) >= 80
    assert len({trap.name for trap in TRAPS}) == len(TRAPS)
    unknown = {name for name, _ in KNOWN} - {trap.name for trap in TRAPS}
    assert not unknown, "known.py names traps that do not exist"
