"""Where to cut a chain of units into stages: the slowest stage as quick as it can be, each within the memory of its device.
What a chain knows about its units is in `chain.py`; parts that are to be modules of their own are made in `splitting/`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from torchgraft.analysis.simulate.parallel.chain import Chain, Times
from torchgraft.errors import GraftError

MOST_CUTS = 500  # places that are tried; of a longer chain those where least passes, spread over its time


@dataclass(frozen=True)
class StageLimit:
    """What one stage has: the times of units on its device, the bytes that are free there, and micro-batches under way.

    `bytes_per_weight` counts what comes with a byte of a weight that is trained: its gradient, the state of an optimizer.
    """

    times: Times
    memory: float
    in_flight: int
    bytes_per_weight: float = 0.0
    recompute: bool = False


def best_cuts(chain: Chain, limits: Sequence[StageLimit]) -> list[int] | None:
    """The places at which stages begin, the first at 0, by dynamic programming over the places that can be cut.

    The time of the slowest stage is least, and among equals what passes between stages. None where no cut fits into memory.
    """
    if len(limits) > len(chain.units):
        raise GraftError(
            f"cannot cut {len(chain.units)} calls into {len(limits)} stages\ngive fewer machines, or a larger program"
        )
    places = _places(chain, limits[0].times, len(limits))
    segments = _Segments(chain, places)
    last = len(places) - 1
    best: list[tuple[float, float]] = [(0.0, 0.0), *[(inf, inf)] * last]
    chosen: list[list[int]] = []
    for limit in limits:
        best, source = _one_more(segments, best, limit)
        chosen.append(source)
    if best[last][0] == inf:
        return None
    cuts, place = [], last
    for source in reversed(chosen):
        place = source[place]
        cuts.append(places[place])
    return cuts[::-1]


def _one_more(
    segments: _Segments, before: list[tuple[float, float]], limit: StageLimit
) -> tuple[list[tuple[float, float]], list[int]]:
    """The best ways to cover the chain up to each place with one stage more, and where that stage begins."""
    found, source = [(inf, inf)] * len(before), [0] * len(before)
    for end in range(1, len(before)):
        working = 0
        for start in range(end - 1, -1, -1):
            working = max(working, segments.working[start])
            seconds = segments.seconds(limit, start, end)
            # A longer stage is slower and larger, so nothing before this place can be better.
            if seconds > found[end][0] or segments.held(limit, start, end, working) > limit.memory:
                break
            bottleneck = max(before[start][0], seconds)
            way = bottleneck, before[start][1] + segments.sent[start]
            if way < found[end]:
                found[end], source[end] = way, start
    return found, source


class _Segments:
    """Sums over the units between places, so that a stage is looked at in constant time."""

    def __init__(self, chain: Chain, places: Sequence[int]) -> None:
        self.places = places
        units = chain.units
        self.saved = [0, *itertools.accumulate(unit.saved for unit in units)]
        self.weights = [0, *itertools.accumulate(sum(w.size for w in unit.weights) for unit in units)]
        self.trained = [0, *itertools.accumulate(sum(w.size for w in u.weights if w.trained) for u in units)]
        self.sent = [units[place].sent if place < len(units) else 0 for place in places]
        self.working = [max(unit.working for unit in units[start:end]) for start, end in itertools.pairwise(places)]

    def seconds(self, limit: StageLimit, start: int, end: int) -> float:
        first, last, times = self.places[start], self.places[end], limit.times
        forward = times.forward[last] - times.forward[first]
        return forward * (2 if limit.recompute else 1) + times.backward[last] - times.backward[first]

    def held(self, limit: StageLimit, start: int, end: int, working: int) -> float:
        first, last = self.places[start], self.places[end]
        saved = self.saved[last] - self.saved[first]
        weights = self.weights[last] - self.weights[first]
        trained = (self.trained[last] - self.trained[first]) * limit.bytes_per_weight
        if limit.recompute:
            return weights + trained + saved + limit.in_flight * self.sent[start] + working
        return weights + trained + limit.in_flight * (saved + self.sent[start]) + working


def _places(chain: Chain, times: Times, stages: int) -> list[int]:
    """Where a chain may be cut, with its beginning and its end."""
    total = len(chain.units)
    most = max(MOST_CUTS, 4 * stages)
    if total <= most:
        return list(range(total + 1))
    clock = [one + other for one, other in zip(times.forward, times.backward, strict=True)]
    edges = [bisect_left(clock, clock[-1] * number / most) for number in range(1, most)]
    windows = itertools.pairwise([1, *edges, total])
    found = {min(range(start, end), key=lambda place: chain.units[place].sent) for start, end in windows if start < end}
    return sorted({0, *found, total})
