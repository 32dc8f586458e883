"""What is asked of a trap in each way of capturing: never silently wrong, and mostly right."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.traps.catalogue import DETECTED_TRAPS, GROUPS, OUTSIDE_TRAPS, PROMISED_TRAPS
from tests.traps.known import KNOWN, LEAST_SHARE_OF_RIGHT
from tests.traps.runner import CRASH, WRONG, captured_and_run, judge, share_of_right
from tests.traps.trap import Trap


def cases(*ways: str) -> list[Any]:
    """Every trap in some ways."""
    return [pytest.param(trap, way, id=f"{way}: {trap.name}") for trap in PROMISED_TRAPS for way in ways]


def check_never_silently_wrong(trap: Trap, way: str) -> None:
    verdicts, known = judge(trap, way), KNOWN.get((trap.name, way), {})
    # What is excused raises; nothing that is wrong without a word is.
    failed = {name: item for name, item in verdicts.items() if item.kind in (WRONG, CRASH)}
    bad = [
        f"{name}: {item.kind}, {item.reason}"
        for name, item in failed.items()
        if item.kind == WRONG or name not in known
    ]
    assert not bad, (
        f"{trap.name}, captured as {way}, goes wrong in {len(bad)} of {len(verdicts)} variations\n" + "\n".join(bad)
    )
    fixed = known.keys() - failed.keys()
    assert not fixed, f"{trap.name}, captured as {way}: take {', '.join(sorted(fixed))} out of known.py"


def check_detected(trap: Trap, way: str) -> None:
    """A program that depends on other state runs the original Python, or is refused."""
    outcome = captured_and_run(trap, way)
    if not isinstance(outcome, Exception):
        assert outcome.meta["kept_whole"], f"{trap.name}, captured as {way}, is not kept whole"


def check_no_crash(trap: Trap, way: str) -> None:
    """What is not promised still gives a program that runs on its example, or a refusal."""
    captured_and_run(trap, way)


def outside_cases(*ways: str) -> list[Any]:
    return [pytest.param(trap, way, id=f"{way}: {trap.name}") for trap in OUTSIDE_TRAPS for way in ways]


def detected_cases(*ways: str) -> list[Any]:
    return [pytest.param(trap, way, id=f"{way}: {trap.name}") for trap in DETECTED_TRAPS for way in ways]


def check_mostly_right(group: str, way: str) -> None:
    verdicts = [judge(trap, way) for trap in GROUPS[group]]
    counts = Counter(item.kind for result in verdicts for item in result.values())
    share = share_of_right(verdicts)
    print(f"{group}, {way}: {len(verdicts)} traps, {dict(counts)}, {share:.1%} right")
    least = LEAST_SHARE_OF_RIGHT[group][way]
    assert share >= least, f"{group}, {way}: {share:.4f} of the variations are right; {dict(counts)}"
