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
    places = _places_for_breaks(crossing, most, len(heights) // wanted // 40)
    # The cheapest way to break the rows before each place, and the place where its last column begins.
    cheapest: list[tuple[float, int]] = [(0.0, 0)] + [(float("inf"), 0)] * (len(places) - 1)
    first = 0
    for place in range(1, len(places)):
        end = ends[places[place]]
        while end - ends[places[first]] > 2 * share and first < place - 1:
            first += 1
        for start in range(first, place):
            row = places[start]
            uneven = (end - ends[row]) / share - 1
            cost = cheapest[start][0] + uneven * uneven + (0.08 * crossing[row - 1] if row else 0.0)
            if cost < cheapest[place][0]:
                cheapest[place] = cost, start
    breaks: list[int] = []
    place = cheapest[-1][1]
    while place:
        breaks.append(places[place])
        place = cheapest[place][1]
    breaks.reverse()
    columns = [ends[end] - ends[start] for start, end in zip([0, *breaks], [*breaks, len(heights)], strict=True)]
    return breaks if max(columns) < WORTHWHILE * total else []


def _places_for_breaks(crossing: Sequence[int], most: int, window: int) -> list[int]:
    """The rows before which a column may begin, the first row and the end; of long levels the best of every few rows."""
    rows = [row for row in range(1, len(crossing)) if crossing[row - 1] <= most]
    if window > 1:
        rows = [min(rows[at : at + window], key=lambda row: crossing[row - 1]) for at in range(0, len(rows), window)]
    return [0, *rows, len(crossing)]


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
