"""Every trap, captured at level "function", is right or refused in every variation."""

from __future__ import annotations

import pytest

from tests.traps.catalogue import GROUPS
from tests.traps.checks import cases, check_mostly_right, check_never_silently_wrong
from tests.traps.trap import Trap

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("trap", "way"), cases("function"))
def test_never_silently_wrong(trap: Trap, way: str) -> None:
    check_never_silently_wrong(trap, way)


@pytest.mark.parametrize("group", list(GROUPS))
def test_mostly_right(group: str) -> None:
    check_mostly_right(group, "function")
