"""Places from left to right."""

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.view.drawing.test_ordering import rows_of
from torchgraft.view.drawing.coordinates import _rising, place_across, place_close
from torchgraft.view.drawing.ordering import reduce_crossings


def placed(rows, method=place_across, width=20.0):
    half = [3.0 if element is None else width for element in rows.element]
    reduce_crossings(rows, half)
    return method(rows, half, half, lambda one, two: 10.0), half


def overlaps(rows, x, half):
    for layer in rows.layers:
        for one, two in pairwise(layer):
            if x[one] + half[one] + 10.0 > x[two] - half[two] + 0.05:
                yield one, two


def test_a_chain_is_straight():
    rows = rows_of(*[(number, number + 1) for number in range(10)])
    x, _ = placed(rows)
    assert len(set(x)) == 1


def test_long_lines_are_straight():
    rows = rows_of((0, 1), (1, 2), (2, 3), (3, 4), (0, 4))
    x, _ = placed(rows)
    passing = [x[vertex] for vertex, element in enumerate(rows.element) if element is None]
    assert len(passing) == 3 and len(set(passing)) == 1


def test_a_user_stands_in_the_middle_of_two():
    rows = rows_of((0, 2), (1, 2))
    x, _ = placed(rows)
    assert abs(x[2] - (x[0] + x[1]) / 2) < 0.01


def test_nothing_overlaps_in_random_rows():
    for method in (place_across, place_close):
        for seed in range(25):
            chance = random.Random(seed)
            edges = set()
            for user in range(3, 60):
                edges |= {(chance.randrange(max(0, user - 14), user), user) for _ in range(chance.choice((1, 2, 3)))}
            rows = rows_of(*edges)
            x, half = placed(rows, method)
            assert list(overlaps(rows, x, half)) == []
            assert min(place - width for place, width in zip(x, half, strict=True)) >= -0.01


@given(st.lists(st.floats(-1000, 1000), max_size=30))
def test_the_nearest_rising_list(values):
    result = _rising(values)
    assert len(result) == len(values)
    assert all(one <= two + 1e-9 for one, two in pairwise(result))
    assert abs(sum(result) - sum(values)) < 1e-6
