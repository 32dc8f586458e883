"""Rows."""

from torchgraft.view.drawing.layering import WIDEST_ROW, assign_rows
from torchgraft.view.drawing.levels import Level


def level(*edges: tuple[int, int]) -> Level:
    result = Level(sorted({end for edge in edges for end in edge}))
    for source, target in edges:
        result.source[source] = source
        result.targets.setdefault(source, {})[target] = None
    return result


def test_users_are_below():
    rows, count = assign_rows(level((0, 1), (1, 2), (0, 2)))
    assert (rows, count) == ({0: 0, 1: 1, 2: 2}, 3)


def test_what_is_used_late_stands_late():
    rows, _ = assign_rows(level((0, 1), (1, 2), (2, 3), (4, 3)))
    assert rows[4] == 2


def test_a_chain_from_a_parameter_moves_as_one():
    it = level((0, 1), (1, 2), (2, 5), (3, 4), (4, 5))
    rows, _ = assign_rows(it)
    assert (rows[3], rows[4], rows[5]) == (1, 2, 3)


def test_very_wide_rows_are_broken():
    it = level(*[(0, number) for number in range(1, 101)])
    rows, count = assign_rows(it)
    sizes = [list(rows.values()).count(row) for row in range(count)]
    assert max(sizes) <= max(WIDEST_ROW, 20) + 1
    assert sum(sizes) == 101
    assert all(rows[0] < rows[number] for number in range(1, 101))


def test_an_empty_level():
    assert assign_rows(Level()) == ({}, 0)
