"""Tests of the command line leave nothing behind: a model from a file puts the folder of the file on the path of Python."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def path_is_put_back() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before
