"""The states of shared random numbers: the same object as long as nothing is drawn, and never an old one."""

import random

import numpy
import pytest

from torchgraft.capturing.number_states import SharedState, numpy_numbers, python_numbers, same_numpy

DRAWS = {
    "python": (random.random, lambda: random.gauss(0, 1), lambda: random.getrandbits(5), lambda: random.seed(3)),
    "numpy": (numpy.random.rand, numpy.random.randn, lambda: numpy.random.seed(3), lambda: numpy.random.normal(size=3)),
}


def settle() -> None:
    random.seed(0)
    numpy.random.seed(0)
    for _ in range(3):  # the first look does not know yet whether a normal number is kept
        python_numbers.now(), numpy_numbers.now()


def test_nothing_is_read_again_while_nothing_is_drawn() -> None:
    settle()
    assert python_numbers.now() is python_numbers.now()
    assert numpy_numbers.now() is numpy_numbers.now()
    assert python_numbers.now() == random.getstate()
    assert same_numpy(numpy_numbers.now(), numpy.random.get_state(legacy=False))


@pytest.mark.parametrize("draw", DRAWS["python"])
def test_each_draw_of_pythons_shows(draw) -> None:
    settle()
    for _ in range(5):
        before = python_numbers.now()
        draw()
        assert python_numbers.now() == random.getstate()
        assert (before == python_numbers.now()) == (before == random.getstate())


@pytest.mark.parametrize("draw", DRAWS["numpy"])
def test_each_draw_of_numpys_shows(draw) -> None:
    """Every second normal number is one that was kept, and changes none of the words."""
    settle()
    for _ in range(5):
        before = numpy_numbers.now()
        draw()
        now = numpy.random.get_state(legacy=False)
        assert same_numpy(numpy_numbers.now(), now)
        assert same_numpy(before, numpy_numbers.now()) == same_numpy(before, now)


def test_a_look_that_cannot_be_had_is_no_reason_to_trust_what_is_known() -> None:
    values = iter(range(10))
    state = SharedState(lambda: next(values), lambda: None)
    assert [state.now(), state.now(), state.now()] == [0, 1, 2]
