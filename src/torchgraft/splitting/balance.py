"""Where to cut a list of weights so that the stretches between the cuts are as even as they can be, within bounds.
What the items are, and what they weigh, is said in `strategies.py`.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def balanced_cuts(
    weights: Sequence[float], count: int, crossing: Sequence[int] | None = None, reach: Sequence[int] | None = None
) -> list[int]:
    """The `count - 1` places to cut a list so that the heaviest stretch is as light as possible and none is empty.

    `crossing[i]`, where given, is what a cut before item i costs; it decides between places that are as good. `reach[i]`, where
    given, is how far a stretch that begins with item i may go at most; there must be a way to keep to that.

    >>> balanced_cuts([1, 1, 1, 5, 1, 1], 3)
    [3, 4]
    >>> balanced_cuts([1, 1, 1, 5, 1, 1], 3, reach=[2, 3, 4, 5, 6, 6])
    [2, 4]
    """
    total = [0.0, *itertools.accumulate(weights)]
    if count == 1:
        return []
    line = _Line(total, list(reach) if reach is not None else [len(weights)] * len(weights))
    bound = line.lightest_bound(count)
    earliest = line.earliest_cuts(count, bound)
    cuts: list[int] = []
    start = 0
    for number in range(1, count):
        latest = line.furthest(start, bound)
        low = max(earliest[number - 1], start + 1)
        high = max(low, min(latest, len(weights) - (count - number)))
        start = high if crossing is None else min(range(low, high + 1), key=lambda place: (crossing[place], -place))
        cuts.append(start)
    return cuts


def reach_within(sizes: Sequence[Mapping[Any, int]], limit: int) -> list[int]:
    """For each item how far a stretch that begins with it may go, so that what its items have takes no more than the limit.

    What several items of a stretch have counts once.

    >>> reach_within([{"a": 2}, {"a": 2, "b": 1}, {"c": 2}], 3)
    [2, 2, 3]
    """
    held: Counter[Any] = Counter()
    taken, end, reach = 0, 0, []
    for start, item in enumerate(sizes):
        while end < len(sizes) and taken + (more := _added(sizes[end], held)) <= limit:
            taken += more
            held.update(dict.fromkeys(sizes[end], 1))
            end += 1
        reach.append(end)
        if end == start:  # too large on its own
            end += 1
            continue
        for key, size in item.items():
            held[key] -= 1
            taken -= 0 if held[key] else size
    return reach


def _added(item: Mapping[Any, int], held: Counter[Any]) -> int:
    return sum(size for key, size in item.items() if not held[key])


class _Line:
    """Weights added up from the left, and how far a stretch from each place may go."""

    def __init__(self, total: list[float], reach: list[int]) -> None:
        self._total, self._reach = total, reach

    def lightest_bound(self, count: int) -> float:
        """The least weight of the heaviest stretch: found by halving, then the weight of a stretch that there is."""
        low, high = 0.0, self._total[-1]
        for _ in range(100):
            middle = (low + high) / 2
            if middle in (low, high):
                break
            if len(self._stretches(middle)) <= count:
                high = middle
            else:
                low = middle
        return max(self._stretches(high))

    def _stretches(self, bound: float) -> list[float]:
        """The weights of stretches as long as the bound allows; an item heavier than it is a stretch alone."""
        start, weights = 0, []
        while start < len(self._reach):
            end = max(self.furthest(start, bound), start + 1)
            weights.append(self._total[end] - self._total[start])
            start = end
        return weights

    def furthest(self, start: int, bound: float) -> int:
        """How far a stretch may go."""
        # Differences are compared and nothing is added to the bound, which would round.
        total = self._total
        return min(bisect.bisect_right(total, bound, key=lambda value: value - total[start]) - 1, self._reach[start])

    def earliest_cuts(self, count: int, bound: float) -> list[int]:
        """For each cut the earliest place from which the rest still fits."""
        places = []
        total, end = self._total, len(self._reach)
        for number in range(count - 1, 0, -1):
            fits = bisect.bisect_left(total, -bound, key=lambda value, end=end: value - total[end])  # type: ignore[misc]
            fits = max(fits, bisect.bisect_left(self._reach, end))
            end = max(min(fits, end - 1), number)
            places.append(end)
        return places[::-1]
