"""Which row of its level an element stands in: below everything it takes values from, and close to it.
Rows of values that pass by are added in `ordering.py`.
"""

from __future__ import annotations

from torchgraft.view.drawing.levels import Element, Level

WIDEST_ROW = 16


def assign_rows(level: Level) -> tuple[dict[Element, int], int]:
    """The row of every element, from 0, and the number of rows."""
    elements = level.elements
    below: dict[Element, list[Element]] = {element: [] for element in elements}
    above: dict[Element, list[Element]] = {element: [] for element in elements}
    outside: dict[Element, int] = dict.fromkeys(elements, 0)  # values from the port at the top
    leaving: dict[Element, int] = dict.fromkeys(elements, 0)
    for value, targets in level.targets.items():
        source = level.source.get(value)
        for target in targets:
            if source is None:
                outside[target] += 1
            elif source != target:
                below[source].append(target)
                above[target].append(source)
        if source is not None and value in level.leaves:
            leaving[source] += 1
    forced: dict[Element, list[Element]] = {}
    for upper, lower in level.constraints:
        forced.setdefault(lower, []).append(upper)
    rows: dict[Element, int] = {}
    for element in elements:
        before = [*above[element], *forced.get(element, ())]
        rows[element] = max([rows[other] + 1 for other in before if other in rows], default=0)
    _sink(elements, rows, above, below, outside, leaving)
    if _split_wide_rows(elements, rows):
        sources = [element for element in elements if not above[element] and not outside[element]]
        _sink(sources, rows, above, below, outside, leaving)
    return rows, max(rows.values(), default=-1) + 1


def _split_wide_rows(elements: list[Element], rows: dict[Element, int]) -> bool:
    """Break rows of very many elements into several, one below the other: a drawing a mile wide shows nothing."""
    most = max(WIDEST_ROW, round(2 * len(elements) ** 0.5))
    members: list[list[Element]] = [[] for _ in range(max(rows.values(), default=-1) + 1)]
    for element in elements:
        members[rows[element]].append(element)
    if all(len(row) <= most for row in members):
        return False
    reached = 0
    for row in members:
        parts = max(1, -(-len(row) // most))
        for place, element in enumerate(row):
            rows[element] = reached + place * parts // len(row)
        reached += parts
    return True


def _sink(
    elements: list[Element],
    rows: dict[Element, int],
    above: dict[Element, list[Element]],
    below: dict[Element, list[Element]],
    outside: dict[Element, int],
    leaving: dict[Element, int],
) -> None:
    """Move elements down towards those that use them, where that makes lines shorter or leaves their length as it is."""
    for element in reversed(elements):
        users = below[element]
        if users and not leaving[element]:
            room = min(rows[user] for user in users) - 1
            if room > rows[element] and len(above[element]) + outside[element] <= len(users):
                rows[element] = room
