"""The rows of a level as lists of vertices, with a vertex in every row that a line passes, ordered so that few lines cross.
A vertex is a number; where its element stands is found in `coordinates.py`.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping

from torchgraft.view.drawing.levels import Element, Level

# A line between neighbouring rows, seen from one end: the vertex at the other end, and where the line meets the two, from
# the middle of each, and what it carries: (other, offset there, offset here, value).
End = tuple[int, float, float, int]


class Rows:
    """The layered form of a level. Lines of one value share a trunk and branch off where they must."""

    def __init__(
        self,
        level: Level,
        row_of: Mapping[Element, int],
        row_count: int,
        in_offsets: Mapping[Element, Mapping[int, float]],
        out_offsets: Mapping[Element, Mapping[int, float]],
        weak: frozenset[Element] | set[Element],
    ) -> None:
        self.element: list[Element | None] = []
        self.value: list[int] = []  # which value a passing line or a port carries; -1 for elements
        self.row: list[int] = []
        self.up: list[list[End]] = []
        self.down: list[list[End]] = []
        self.weak: list[bool] = []  # parameters and the like: lines from them need not be straight
        enters = level.enters
        first = 1 if enters else 0
        self.count = row_count + first + (1 if level.leaves else 0)
        self.vertex = {
            element: self._add(row_of[element] + first, element, -1, element in weak) for element in level.elements
        }
        self.in_ports = {value: self._add(0, None, value) for value in enters}
        self.out_ports = {value: self._add(self.count - 1, None, value) for value in level.leaves}
        # Of every value the vertices of its trunk, and those that branch off with the place in the trunk where they do.
        self.trunks: dict[int, list[int]] = {}
        self.branches: dict[int, list[tuple[int, int]]] = {}
        for value, targets in level.targets.items():
            self._route(value, level.source.get(value), targets, in_offsets, out_offsets)
        self.layers = self._initial_order()
        self.place = [0] * len(self.row)
        self._number()
        self._flank()

    def _add(self, row: int, element: Element | None, value: int, weak: bool = False) -> int:
        self.element.append(element)
        self.value.append(value)
        self.row.append(row)
        self.up.append([])
        self.down.append([])
        self.weak.append(weak)
        return len(self.row) - 1

    def _route(
        self,
        value: int,
        source: Element | None,
        targets: Mapping[Element, None],
        in_offsets: Mapping[Element, Mapping[int, float]],
        out_offsets: Mapping[Element, Mapping[int, float]],
    ) -> None:
        start = self.in_ports[value] if source is None else self.vertex[source]
        start_offset = 0.0 if source is None else out_offsets.get(source, {}).get(value, 0.0)
        ends = [
            (self.vertex[target], in_offsets.get(target, {}).get(value, 0.0)) for target in targets if target != source
        ]
        if value in self.out_ports:
            ends.append((self.out_ports[value], 0.0))
        if not ends:
            return
        top = self.row[start]
        lowest = max(self.row[end] for end, _ in ends)
        weak = self.weak[start]
        trunk = [start]
        for row in range(top + 1, lowest):
            vertex = self._add(row, None, value, weak)
            self._join(trunk[-1], vertex, start_offset if len(trunk) == 1 else 0.0, 0.0, value)
            trunk.append(vertex)
        branches = []
        for end, offset in ends:
            above = trunk[self.row[end] - top - 1]
            self._join(above, end, start_offset if above == start else 0.0, offset, value)
            branches.append((self.row[end] - top - 1, end))
        self.trunks[value] = trunk
        self.branches[value] = branches

    def _join(self, upper: int, lower: int, upper_offset: float, lower_offset: float, value: int) -> None:
        self.down[upper].append((lower, lower_offset, upper_offset, value))
        self.up[lower].append((upper, upper_offset, lower_offset, value))

    def _initial_order(self) -> list[list[int]]:
        """Depth first from the top, so that what hangs together stands together."""
        layers: list[list[int]] = [[] for _ in range(self.count)]
        seen = [False] * len(self.row)
        starts = sorted(range(len(self.row)), key=lambda vertex: (self.row[vertex], vertex))
        for start in starts:
            stack = [start]
            while stack:
                vertex = stack.pop()
                if seen[vertex]:
                    continue
                seen[vertex] = True
                layers[self.row[vertex]].append(vertex)
                stack.extend(end[0] for end in reversed(self.down[vertex]))
        return layers

    def _flank(self) -> None:
        """Put parameters, and what ends beside a line that goes on, on both sides of it, so that it goes through the middle."""
        key: dict[int, tuple[int, int, int]] = {}
        for lines, back in ((self.up, self.down), (self.down, self.up)):
            for vertex in range(len(self.row)):
                if len(lines[vertex]) < 3:
                    continue
                others = [end[0] for end in lines[vertex]]
                aside = [v for v in others if self.element[v] is not None and len(back[v]) == 1 and not lines[v]]
                if len(aside) < 2 or len(aside) == len(others):
                    continue
                kept = set(aside)
                through = [v for v in others if v not in kept]
                middle = self.place[through[len(through) // 2]]
                for number, other in enumerate(aside):
                    key[other] = (middle, -1 if number < len(aside) // 2 else 1, number)
        if key:
            for layer in self.layers:
                layer.sort(key=lambda vertex: key.get(vertex, (self.place[vertex], 0, 0)))
            self._number()

    def _number(self) -> None:
        for layer in self.layers:
            for place, vertex in enumerate(layer):
                self.place[vertex] = place


def reduce_crossings(rows: Rows, extents: list[float]) -> None:
    """Sweep down and up, each row sorted by where its lines come from, and keep the best order seen.

    `extents` is half the width of each vertex, to tell how far to the side of its middle a line meets it.
    """
    size = len(rows.row)
    if rows.count < 2 or size <= 2:
        return
    fractions = _fractions(rows, extents)
    best = [list(layer) for layer in rows.layers]
    fewest = _crossings(rows, fractions)
    rounds = 24 if size < 500 else 12 if size < 5000 else 6
    idle = 0
    for turn in range(rounds):
        if fewest == 0 or idle >= 4:
            break
        _sweep(rows, fractions, downwards=turn % 2 == 0)
        found = _crossings(rows, fractions)
        idle += 1
        if found < fewest:
            fewest, idle = found, 0
            best = [list(layer) for layer in rows.layers]
    rows.layers = best
    rows._number()
    if fewest > 0 and size < 1500:
        _exchange_neighbours(rows, fractions)


Fractions = tuple[list[list[tuple[int, float, float]]], list[list[tuple[int, float, float]]]]


def _fractions(rows: Rows, extents: list[float]) -> Fractions:
    """The lines up and down with offsets as parts of a place, so that two ports of one group come one after the other."""

    def scaled(vertex: int, offset: float) -> float:
        return 0.45 * offset / extents[vertex] if offset and extents[vertex] else 0.0

    result = []
    for lines in (rows.up, rows.down):
        result.append(
            [
                [(other, scaled(other, there), scaled(vertex, here)) for other, there, here, _ in ends]
                for vertex, ends in enumerate(lines)
            ]
        )
    return result[0], result[1]


def _sweep(rows: Rows, fractions: Fractions, downwards: bool) -> None:
    place = rows.place
    lines = fractions[0] if downwards else fractions[1]
    layers = rows.layers if downwards else rows.layers[::-1]
    for layer in layers[1:]:
        wanted = {}
        for vertex in layer:
            ends = lines[vertex]
            if ends:
                wanted[vertex] = sum(place[other] + there - here for other, there, here in ends) / len(ends)
        if len(wanted) < 2:
            continue
        # What has no line in this direction keeps its place; the others share the places that are left, sorted.
        moving = sorted(wanted, key=lambda vertex: (wanted[vertex], place[vertex]))
        following = iter(moving)
        layer[:] = [next(following) if vertex in wanted else vertex for vertex in layer]
        for position, vertex in enumerate(layer):
            place[vertex] = position


def _crossings(rows: Rows, fractions: Fractions) -> int:
    place, down = rows.place, fractions[1]
    total = 0
    for layer in rows.layers[:-1]:
        lines = []
        for vertex in layer:
            position = place[vertex]
            for other, there, here in down[vertex]:
                lines.append((position + here, place[other] + there))
        if len(lines) < 2:
            continue
        lines.sort()
        seen: list[float] = []
        for _, end in lines:
            total += len(seen) - bisect_right(seen, end)
            insort(seen, end)
    return total


def _exchange_neighbours(rows: Rows, fractions: Fractions) -> None:
    """Exchange neighbours in a row where that takes away crossings, until nothing changes."""
    place = rows.place
    up, down = fractions
    for _ in range(8):
        changed = False
        for layer in rows.layers:
            for position in range(len(layer) - 1):
                left, right = layer[position], layer[position + 1]
                gain = _between(place, up, left, right) + _between(place, down, left, right)
                if gain > 0:
                    layer[position], layer[position + 1] = right, left
                    place[left], place[right] = position + 1, position
                    changed = True
        if not changed:
            return


def _between(place: list[int], lines: list[list[tuple[int, float, float]]], left: int, right: int) -> int:
    """How many crossings fewer the lines of two neighbours have after they change places."""
    mine = [place[other] + there for other, there, _ in lines[left]]
    theirs = [place[other] + there for other, there, _ in lines[right]]
    gain = 0
    for one in mine:
        for two in theirs:
            if one > two:
                gain += 1
            elif one < two:
                gain -= 1
    return gain
