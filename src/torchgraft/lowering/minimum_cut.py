"""The cheapest way to cut a network in two: Dinic's algorithm on whole numbers.
Which network is asked about is the business of `recompute.py`.
"""

from __future__ import annotations

from collections import deque


class Network:
    """Vertices by number, joined by arcs of a capacity. Whole numbers, because rounded ones never come to an end.

    >>> network = Network(4)
    >>> for start, end, capacity in [(0, 1, 3), (0, 2, 2), (1, 3, 1), (2, 3, 5), (1, 2, 1)]:
    ...     network.join(start, end, capacity)
    >>> sorted(network.side_of(0, 3))
    [0, 1]
    """

    def __init__(self, count: int) -> None:
        self._arcs: list[list[int]] = [[] for _ in range(count)]
        self._ends: list[int] = []
        self._left: list[int] = []

    def join(self, start: int, end: int, capacity: int) -> None:
        """Add an arc."""
        for origin, target, amount in ((start, end, capacity), (end, start, 0)):
            self._arcs[origin].append(len(self._ends))
            self._ends.append(target)
            self._left.append(amount)

    def side_of(self, source: int, sink: int) -> set[int]:
        """The vertices on the side of the source in a cut, between it and the sink, of the least capacity."""
        while sink in (levels := self._levels(source)):
            self._fill(source, sink, levels)
        return set(levels)

    def _levels(self, source: int) -> dict[int, int]:
        levels = {source: 0}
        pending = deque([source])
        while pending:
            vertex = pending.popleft()
            for arc in self._arcs[vertex]:
                if self._left[arc] and self._ends[arc] not in levels:
                    levels[self._ends[arc]] = levels[vertex] + 1
                    pending.append(self._ends[arc])
        return levels

    def _fill(self, source: int, sink: int, levels: dict[int, int]) -> None:
        """Send along shortest ways until each has a full arc."""
        next_arc = [0] * len(self._arcs)
        way: list[int] = []
        vertex = source
        while True:
            if vertex == sink:
                amount = min(self._left[arc] for arc in way)
                for place in reversed(range(len(way))):
                    self._left[way[place]] -= amount
                    self._left[way[place] ^ 1] += amount
                full = next(place for place, arc in enumerate(way) if not self._left[arc])
                vertex = self._ends[way[full] ^ 1]
                del way[full:]
                continue
            arcs = self._arcs[vertex]
            while next_arc[vertex] < len(arcs):
                arc = arcs[next_arc[vertex]]
                if self._left[arc] and levels.get(self._ends[arc], -1) == levels[vertex] + 1:
                    break
                next_arc[vertex] += 1
            else:
                if not way:
                    return
                vertex = self._ends[way.pop() ^ 1]
                next_arc[vertex] += 1
                continue
            way.append(arc)
            vertex = self._ends[arc]
