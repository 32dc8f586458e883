"""How a level that is far taller than wide is broken into columns, like a text in a newspaper, and how lines get across.
Which rows there are and where their vertices stand is known before.
"""

from __future__ import annotations

from collections.abc import Sequence

LANE = 7.0  # between lines that run to the next column
MOST_LANES = 4  # that run to the next column; more only where there are many columns
MOST_LANES_OF_MANY = 12
WORTHWHILE = 0.72  # columns are made where the highest is at most this part of the whole


def break_rows(heights: Sequence[float], crossing: Sequence[int], target: float) -> list[int]:
    """The rows with which new columns begin, given each row's height with its gap and the lines that cross the gap below it.

    Columns come out about `target` high; a break goes where few lines cross it.

    >>> break_rows([10] * 12, [1] * 12, 40)
    [4, 8]
    >>> break_rows([10] * 12, [99] * 12, 40)
    []
    """
    total = sum(heights)
    wanted = round(total / target)
    if wanted < 2:
        return []
    most = MOST_LANES if wanted < 5 else MOST_LANES_OF_MANY
    share = total / wanted
    ends = [0.0]  # how far down the level each row begins
    for height in heights:
        ends.append(ends[-1] + height)
    # The cheapest way to break the rows before each row, and where its last column begins; unreachable: no way yet.
    cheapest: list[tuple[float, int]] = [(0.0, 0)] + [(float("inf"), 0)] * len(heights)
    first = 0
    for row in range(1, len(ends)):
        while ends[row] - ends[first] > 2 * share and first < row - 1:
            first += 1
        for start in range(first, row):
            if start and (crossing[start - 1] > most or cheapest[start][0] == float("inf")):
                continue
            uneven = (ends[row] - ends[start]) / share - 1
            cost = cheapest[start][0] + uneven * uneven + (0.08 * crossing[start - 1] if start else 0.0)
            if cost < cheapest[row][0]:
                cheapest[row] = cost, start
    if cheapest[-1][0] == float("inf"):
        return []
    breaks: list[int] = []
    row = cheapest[-1][1]
    while row:
        breaks.append(row)
        row = cheapest[row][1]
    breaks.reverse()
    columns = [ends[end] - ends[start] for start, end in zip([0, *breaks], [*breaks, len(heights)], strict=True)]
    return breaks if max(columns) < WORTHWHILE * total else []


def way_around(
    start: tuple[float, float], end: tuple[float, float], lane: int, lanes: int, gutter: float, low: float, high: float
) -> list[tuple[float, float]]:
    """The corners of a line from the foot of a column to the head of the next.

    `gutter` is where the lanes between the columns begin, `low` and `high` the heights of the first lane below and of
    the last above; lane 0 is that of the line furthest right, so that no two lines cross.
    """
    beside = gutter + lane * LANE
    under = low + lane * LANE
    over = high - (lanes - 1 - lane) * LANE
    return [start, (start[0], under), (beside, under), (beside, over), (end[0], over), end]
