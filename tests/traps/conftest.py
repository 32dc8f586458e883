"""Leaves torch as the other tests expect it, whatever a wrong program has switched.
How a trap is judged is in `runner.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.traps.observation import reset_switches


@pytest.fixture(autouse=True)
def switches_as_they_were() -> Iterator[None]:
    yield
    reset_switches()
