"""Where vertices stand from left to right once their order in the rows is known: long lines straight, users below sources.
The method is that of Brandes and Köpf, with widths and with lines that meet a vertex beside its middle: the mean of four
extreme arrangements, each of which lines vertices up in straight columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from torchgraft.view.drawing.ordering import End, Rows

MOST_DRIFT = 120.0

Gap = Callable[[int, int], float]


def place_across(
    rows: Rows, left: list[float], right: list[float], gap: Gap, breaks: Sequence[int] = ()
) -> list[float]:
    """The middle of every vertex; `left` and `right` say how far it reaches to both sides.

    Lines that come into one of the rows in `breaks` pull at nobody: a new column begins there.
    """
    if not rows.row:
        return []
    conflicts = _conflicts(rows)
    arrangements = []
    for upwards in (False, True):
        layers = rows.layers[::-1] if upwards else rows.layers
        lines = rows.down if upwards else rows.up
        for mirrored in (False, True):
            run = _Arrangement(rows, layers, lines, conflicts, mirrored)
            run.align({row - upwards for row in breaks})
            arrangements.append(run.compact(left, right, gap))
    result = _middle(arrangements, left, right)
    widest = max(sum(left[v] + right[v] + 16 for v in layer) for layer in rows.layers)
    # In a thicket of lines straight columns push each other far apart; there closeness matters more than straightness.
    if max(place + width for place, width in zip(result, right, strict=True)) > 2.2 * widest + 400:
        return place_close(rows, left, right, gap)
    return result


def _conflicts(rows: Rows) -> set[tuple[int, int]]:
    """Lines that cross a passing line; those give way, so that what passes by is straight."""
    place, passing = rows.place, [element is None for element in rows.element]
    result: set[tuple[int, int]] = set()
    for upper, lower in pairwise(rows.layers):
        begin, scanned = -1, 0
        for position, vertex in enumerate(lower):
            inner = -1
            if passing[vertex]:
                inner = next((place[other] for other, _, _, _ in rows.up[vertex] if passing[other]), -1)
            if inner < 0 and position < len(lower) - 1:
                continue
            end = inner if inner >= 0 else len(upper)
            for scan in lower[scanned : position + 1]:
                for other, _, _, _ in rows.up[scan]:
                    if (place[other] < begin or place[other] > end) and not (passing[other] and passing[scan]):
                        result.add((other, scan))
            scanned = position + 1
            begin = end if inner >= 0 else begin
    return result


class _Arrangement:
    """One of the four: vertices are joined into blocks from one side, then blocks are pushed together."""

    def __init__(
        self,
        rows: Rows,
        layers: list[list[int]],
        lines: list[list[End]],
        conflicts: set[tuple[int, int]],
        mirrored: bool,
    ) -> None:
        self.rows = rows
        self.layers = [layer[::-1] for layer in layers] if mirrored else layers
        self.lines = lines
        self.conflicts = conflicts
        self.mirrored = mirrored
        self.place = [0] * len(rows.row)
        for layer in self.layers:
            for position, vertex in enumerate(layer):
                self.place[vertex] = position
        self.root = list(range(len(rows.row)))
        self.shift = [0.0] * len(rows.row)

    def align(self, breaks: set[int]) -> None:
        """Put each vertex in line with the middle one of its neighbours in the row before, where that crosses nothing."""
        place, root, shift, weak = self.place, self.root, self.shift, self.rows.weak
        sign = -1.0 if self.mirrored else 1.0
        for layer in self.layers[1:]:
            if layer and self.rows.row[layer[0]] in breaks:
                continue
            taken = -1
            for vertex in layer:
                ends = self.lines[vertex]
                if weak[vertex] and ends and self._has_strong(ends[0][0]):
                    continue
                if len(ends) > 1:
                    strong = [end for end in ends if not weak[end[0]]]
                    ends = sorted(strong or ends, key=lambda end: (place[end[0]], sign * end[1]))
                count = len(ends)
                for middle in ((count - 1) // 2, count // 2) if count else ():
                    other, there, here, _ = ends[middle]
                    pair = (other, vertex) if self.lines is self.rows.up else (vertex, other)
                    if place[other] > taken and pair not in self.conflicts:
                        root[vertex] = root[other]
                        shift[vertex] = shift[other] + sign * (there - here)
                        if here and abs(shift[vertex]) > MOST_DRIFT and abs(shift[other]) > MOST_DRIFT / 2:
                            shift[vertex] = 0.0  # straight lines from frame to frame would lead off to the side
                        taken = place[other]
                        break

    def _has_strong(self, other: int) -> bool:
        """Whether a vertex has a neighbour on this side that is not weak; then the column is that one's."""
        back = self.rows.up if self.lines is self.rows.down else self.rows.down
        return any(not self.rows.weak[end[0]] for end in back[other])

    def compact(self, left: list[float], right: list[float], gap: Gap) -> list[float]:
        """The blocks as far to the left as they go, then each as close to its neighbours on the right as they let it."""
        root, shift = self.root, self.shift
        if self.mirrored:
            left, right = right, left
        after: dict[int, list[tuple[int, float]]] = {}
        waiting: dict[int, int] = {}
        for layer in self.layers:
            for one, two in pairwise(layer):
                room = shift[one] + right[one] + gap(one, two) + left[two] - shift[two]
                after.setdefault(root[one], []).append((root[two], room))
                waiting[root[two]] = waiting.get(root[two], 0) + 1
        position: dict[int, float] = {}
        ready = [vertex for vertex in range(len(root)) if root[vertex] == vertex and vertex not in waiting]
        order: list[int] = []
        while ready:
            block = ready.pop()
            order.append(block)
            here = position.setdefault(block, 0.0)
            for other, room in after.get(block, ()):
                if here + room > position.get(other, float("-inf")):
                    position[other] = here + room
                waiting[other] -= 1
                if waiting[other] == 0:
                    ready.append(other)
        for block in reversed(order):
            following = after.get(block)
            if following:
                position[block] = max(position[block], min(position[other] - room for other, room in following))
        sign = -1.0 if self.mirrored else 1.0
        return [sign * (position[root[vertex]] + shift[vertex]) for vertex in range(len(root))]


def _middle(arrangements: list[list[float]], left: list[float], right: list[float]) -> list[float]:
    """Slide the four over the narrowest and take, for each vertex, the mean of the two in the middle.

    Where one vertex is right of another by a distance in all four, it is so in the result: what does not overlap stays apart.
    """
    spans = []
    for places in arrangements:
        low = min(place - width for place, width in zip(places, left, strict=True))
        high = max(place + width for place, width in zip(places, right, strict=True))
        spans.append((low, high))
    narrowest = min(spans, key=lambda span: span[1] - span[0])
    slid = []
    for number, (places, (low, high)) in enumerate(zip(arrangements, spans, strict=True)):
        slide = narrowest[0] - low if number % 2 == 0 else narrowest[1] - high
        slid.append([place + slide for place in places])
    result = []
    for four in zip(*slid, strict=True):
        _, second, third, _ = sorted(four)
        result.append((second + third) / 2)
    start = min(place - width for place, width in zip(result, left, strict=True))
    return [round(place - start, 2) for place in result]


def place_close(rows: Rows, left: list[float], right: list[float], gap: Gap) -> list[float]:
    """Each vertex as near to the mean of its neighbours as the others in its row let it, by several sweeps."""
    place = [0.0] * len(rows.row)
    offsets: list[list[float]] = []  # for each row where its vertices stand when they are pushed together
    for layer in rows.layers:
        reached, offset = 0.0, []
        for number, vertex in enumerate(layer):
            if number:
                reached += right[layer[number - 1]] + gap(layer[number - 1], vertex) + left[vertex]
            offset.append(reached)
        offsets.append(offset)
        for vertex, where in zip(layer, offset, strict=True):
            place[vertex] = where - reached / 2
    for sweep in range(8):
        down = sweep % 2 == 0
        lines = rows.up if down else rows.down
        order = range(rows.count) if down else reversed(range(rows.count))
        for row in order:
            layer = rows.layers[row]
            wanted = []
            for vertex, where in zip(layer, offsets[row], strict=True):
                ends = lines[vertex]
                mean = (
                    sum(place[other] + there - here for other, there, here, _ in ends) / len(ends)
                    if ends
                    else place[vertex]
                )
                wanted.append(mean - where)
            for vertex, slot, where in zip(layer, _rising(wanted), offsets[row], strict=True):
                place[vertex] = slot + where
    start = min(where - width for where, width in zip(place, left, strict=True))
    return [round(where - start, 2) for where in place]


def _rising(values: list[float]) -> list[float]:
    """The nearest list, by squares, that never falls: neighbours that fall are pooled at their mean.

    >>> _rising([1.0, 5.0, 3.0, 9.0])
    [1.0, 4.0, 4.0, 9.0]
    """
    pools: list[tuple[float, int]] = []  # mean and size
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean = (before * count + mean * size) / (count + size)
            size += count
        pools.append((mean, size))
    return [mean for mean, size in pools for _ in range(size)]
