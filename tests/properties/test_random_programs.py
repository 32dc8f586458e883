"""Random programs: whatever way a captured program is copied, cleaned, rewritten or run, it does what the model did in eager.
The programs are drawn in `strategies.py`; the ways and the comparison are in `ways.py`.
"""

from __future__ import annotations

import copy
import os
import re

import pytest
from hypothesis import given, settings

import torchgraft
from tests.properties.strategies import Program, programs
from tests.properties.ways import capture, check


@given(programs(is_function=False))
@settings(max_examples=120)
def test_models(program: Program) -> None:
    check(program)


@given(programs(is_function=True))
@settings(max_examples=80)
def test_functions(program: Program) -> None:
    check(program)


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("HYPOTHESIS_PROFILE") != "thorough", reason="minutes; HYPOTHESIS_PROFILE=thorough runs it"
)
@given(programs())
@settings(max_examples=600)
def test_many_programs_in_every_way(program: Program) -> None:
    check(program, all_ways=True)


@given(programs())
@settings(max_examples=50)
def test_two_captures_are_the_same(program: Program) -> None:
    try:
        first, second = capture(program)[0], capture(program)[0]
    except torchgraft.TraceError:
        return
    assert _without_number(first.code) == _without_number(second.code)
    assert _without_number(str(first.graph)) == _without_number(str(second.graph))
    assert [node.name for node in first.graph.nodes] == [node.name for node in copy.deepcopy(first).graph.nodes]


def _without_number(code: str) -> str:
    """Guards name the user's file, and every random program is a file of its own."""
    return re.sub(r"<random program \d+>", "<random program>", code)
