"""Every trap, captured symbolically and by watching it, is right or refused in every variation, and mostly right.
`python -m tests.traps WORD` shows in detail what becomes of a trap; level "function" is in `test_function_traps.py`, "aten" in
`test_aten_traps.py`.
"""

from __future__ import annotations

import pytest

from tests.traps.catalogue import GROUPS, TRAPS
from tests.traps.checks import (
    cases,
    check_detected,
    check_mostly_right,
    check_never_silently_wrong,
    check_no_crash,
    detected_cases,
    outside_cases,
)
from tests.traps.contract import DETECTED, OUTSIDE
from tests.traps.known import KNOWN
from tests.traps.trap import Trap

WAYS = ("symbolic", "module")


@pytest.mark.parametrize(("trap", "way"), cases(*WAYS))
def test_never_silently_wrong(trap: Trap, way: str) -> None:
    check_never_silently_wrong(trap, way)


@pytest.mark.parametrize(("trap", "way"), detected_cases("module", "function"))
def test_other_state_is_detected(trap: Trap, way: str) -> None:
    check_detected(trap, way)


@pytest.mark.parametrize(("trap", "way"), [*outside_cases("module", "function"), *detected_cases("symbolic")])
def test_what_is_not_promised_does_not_crash(trap: Trap, way: str) -> None:
    check_no_crash(trap, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("group", list(GROUPS))
def test_mostly_right(group: str, way: str) -> None:
    check_mostly_right(group, way)


def test_there_are_many_traps_with_names_of_their_own() -> None:
    assert len(TRAPS) >= 80
    assert len({trap.name for trap in TRAPS}) == len(TRAPS)
    unknown = ({name for name, _ in KNOWN} | DETECTED | OUTSIDE) - {trap.name for trap in TRAPS}
    assert not unknown, "known.py or contract.py names traps that do not exist"
