"""The examples of docs/analysis.md, run as they stand."""

import doctest
from pathlib import Path

import pytest

from torchgraft.analysis.cost.formulas import FORMULAS

PAGE = Path(__file__).parents[2] / "docs" / "analysis.md"


@pytest.mark.zoo
def test_the_examples_of_the_page_are_right() -> None:
    before = dict(FORMULAS)
    try:
        found = doctest.testfile(
            str(PAGE), module_relative=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        )
    finally:
        FORMULAS.clear()
        FORMULAS.update(before)
    assert found.attempted > 15 and found.failed == 0
