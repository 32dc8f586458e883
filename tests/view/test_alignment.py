"""Lining two sequences up: every match is one and in order, one insertion is one insertion, and long programs are quick."""

from __future__ import annotations

import time
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from torchgraft.view.alignment import matching

letters = st.lists(st.sampled_from("abcdef"), max_size=30)


@given(letters, letters)
def test_matches_are_equal_and_rise(old, new) -> None:
    found = matching(old, new)
    assert all(old[i] == new[j] for i, j in found)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(found))


@given(letters)
def test_a_sequence_matches_itself(items) -> None:
    assert matching(items, items) == [(index, index) for index in range(len(items))]


@given(st.lists(st.integers(), unique=True, min_size=1), st.data())
def test_one_insertion_is_one_insertion(items, data) -> None:
    place = data.draw(st.integers(0, len(items)))
    assert len(matching(items, [*items[:place], "new", *items[place:]])) == len(items)
    assert len(matching([*items[:place], "new", *items[place:]], items)) == len(items)


def test_long_periodic_programs() -> None:
    old = [
        ("call", letter, f"layer{layer}") for layer in range(2000) for letter in "norm attn add norm mlp add".split()
    ]
    new = [item for item in old if item[1] != "attn"]
    start = time.perf_counter()
    assert len(matching(old, new)) == len(new)
    assert time.perf_counter() - start < 20  # no limit of speed: quadratic time would take hours


def test_nothing_in_common() -> None:
    assert matching("abc", "xyz") == [] and matching("", "a") == [] and matching([], []) == []
