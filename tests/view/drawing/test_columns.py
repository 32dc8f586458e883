"""Where a level is broken into columns."""

from hypothesis import given
from hypothesis import strategies as st

from torchgraft.view.drawing.columns import LANE, MOST_LANES, break_rows, way_around


def test_columns_are_even():
    assert break_rows([10.0] * 30, [1] * 30, 100) == [10, 20]


def test_breaks_go_where_few_lines_cross():
    crossing = [3] * 20
    crossing[8] = 1
    assert break_rows([10.0] * 20, crossing, 100) == [9]


def test_what_is_low_or_crowded_stays():
    assert break_rows([10.0] * 10, [1] * 10, 100) == []
    assert break_rows([10.0] * 30, [MOST_LANES + 1] * 30, 100) == []
    assert break_rows([], [], 100) == []


def test_a_level_that_is_one_high_element_stays():
    assert break_rows([20.0, 1000.0, 20.0], [1, 1, 1], 300) == []


@given(st.lists(st.floats(1, 200), min_size=1, max_size=80), st.data())
def test_breaks_rise_and_columns_are_lower_than_the_whole(heights, data):
    crossing = data.draw(st.lists(st.integers(0, 6), min_size=len(heights), max_size=len(heights)))
    breaks = break_rows(heights, crossing, 300)
    assert breaks == sorted(set(breaks))
    assert all(0 < row < len(heights) for row in breaks)


def test_lanes_do_not_cross():
    right = way_around((50, 0), (200, 0), 0, 2, 100, 500, -10)
    left = way_around((20, 0), (170, 0), 1, 2, 100, 500, -10)
    assert right[1][1] < left[1][1]  # below the column the left line passes under the right one
    assert left[2][0] - right[2][0] == LANE
    assert right[3][1] < left[3][1]  # above the next column the right one passes over the left one
