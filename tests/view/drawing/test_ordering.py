"""The order in rows."""

import itertools
import random

from tests.view.drawing.test_layering import level
from torchgraft.view.drawing.layering import assign_rows
from torchgraft.view.drawing.ordering import Rows, _crossings, _fractions, reduce_crossings


def rows_of(*edges: tuple[int, int]) -> Rows:
    it = level(*edges)
    row_of, count = assign_rows(it)
    return Rows(it, row_of, count, {}, {}, set())


def crossings(rows: Rows) -> int:
    return _crossings(rows, _fractions(rows, [1.0] * len(rows.row)))


def counted_by_hand(rows: Rows) -> int:
    lines = [
        (rows.row[vertex], rows.place[vertex], rows.place[end[0]])
        for vertex in range(len(rows.row))
        for end in rows.down[vertex]
    ]
    return sum(a[0] == b[0] and (a[1] - b[1]) * (a[2] - b[2]) < 0 for a, b in itertools.combinations(lines, 2))


def test_long_lines_pass_each_row_and_share_a_trunk():
    rows = rows_of((0, 1), (1, 2), (2, 3), (0, 3), (0, 2))
    passing = [vertex for vertex, element in enumerate(rows.element) if element is None]
    assert sorted(rows.row[vertex] for vertex in passing) == [1, 2]
    assert len(rows.trunks[0]) == 3
    assert sorted(rows.branches[0]) == [(0, rows.vertex[1]), (1, rows.vertex[2]), (2, rows.vertex[3])]


def test_crossings_are_counted_right():
    for seed in range(20):
        chance = random.Random(seed)
        edges = {(chance.randrange(8), 8 + chance.randrange(8)) for _ in range(20)}
        rows = rows_of(*edges)
        for layer in rows.layers:
            chance.shuffle(layer)
        rows._number()
        assert crossings(rows) == counted_by_hand(rows)


def test_crossings_that_need_not_be_are_removed():
    rows = rows_of((0, 5), (1, 4), (2, 3), (3, 6), (4, 7), (5, 8))
    reduce_crossings(rows, [1.0] * len(rows.row))
    assert crossings(rows) == 0


def test_no_sweep_makes_it_worse():
    for seed in range(20):
        chance = random.Random(seed)
        edges = set()
        for user in range(4, 40):
            edges |= {(chance.randrange(max(0, user - 9), user), user) for _ in range(2)}
        rows = rows_of(*edges)
        before = crossings(rows)
        reduce_crossings(rows, [1.0] * len(rows.row))
        assert crossings(rows) <= before
        assert sorted(v for layer in rows.layers for v in layer) == list(range(len(rows.row)))


def test_what_ends_stands_on_both_sides_of_what_goes_on():
    rows = rows_of((0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (5, 6))
    middle = rows.layers[1]
    assert middle.index(rows.vertex[5]) == 2
