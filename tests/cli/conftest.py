"""What every test of the command line leaves behind is taken away: a model from a file puts the file's folder on Python's path."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def path_is_put_back() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before
