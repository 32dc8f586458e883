"""How long probes take on the CPU at hand, by the clock of the wall.
Each is timed with its inputs in the cache and, where they fit there, with inputs that are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchgraft.analysis.simulate.calibration.probes import Probe

_COLD_BYTES = 96e6  # more than any cache of a CPU, so that what is used in turn is never in it
MOST_SETS = 24


@dataclass(frozen=True)
class Measured:
    """Seconds of one probe with its inputs in the cache, and not; `taken` is the most memory that it took, results included."""

    probe: Probe
    hot: float
    cold: float
    taken: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"probe": self.probe.to_dict(), "hot": self.hot, "cold": self.cold, "taken": self.taken}


def call_of_probe(probe: Probe, tensors: list[Tensor]) -> Callable[[], Any]:
    """The work of a probe on some tensors, to be called."""
    return lambda: probe.run(tensors)


def measure_on_cpu(probe: Probe, budget: float = 0.04) -> Measured:
    """The time of a probe on the CPU, Python's call included; it is repeated for about `budget` seconds, twice."""
    with torch.no_grad():
        first = probe.tensors("cpu")
        hot = least_seconds(call_of_probe(probe, first), budget)
        if probe.bytes > _COLD_BYTES:
            return Measured(probe, hot, hot)
        enough = int(_COLD_BYTES / probe.bytes) + 2
        sets = min(enough, MOST_SETS, max(int(budget / hot), 2))
        others = [first, *[[tensor.clone() for tensor in first] for _ in range(sets - 1)]]
        flush = _more_than_caches() if sets < enough else None
        return Measured(probe, hot, _cold_seconds([call_of_probe(probe, tensors) for tensors in others], flush, budget))


@cache
def _more_than_caches() -> Tensor:
    """Memory to go through so that nothing else is left in a cache; kept, since new memory would take far longer."""
    return torch.zeros(int(_COLD_BYTES / 4))


def least_seconds(call: Callable[[], Any], budget: float) -> float:
    """The least seconds of a call that is repeated; a short one is timed some at a time."""
    start = time.perf_counter()
    call()
    count = 1 if time.perf_counter() - start > 2e-4 else 10
    best, spent = float("inf"), 0.0
    while spent < budget or best == float("inf"):
        start = time.perf_counter()
        for _ in range(count):
            call()
        seconds = time.perf_counter() - start
        spent += seconds
        best = min(best, seconds / count)
    return best


def _cold_seconds(calls: Sequence[Callable[[], Any]], flush: Tensor | None, budget: float) -> float:
    """The typical call of some in turn, each on memory that was not used for long, by the least of its rounds."""
    best, spent, rounds = [float("inf")] * len(calls), 0.0, 0
    while spent < budget or rounds < 2:
        if flush is not None:
            flush.add_(1.0)
            spent += budget / 4
        for place, call in enumerate(calls):
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            spent += seconds
            best[place] = min(best[place], seconds)
        rounds += 1
    return sorted(best)[(len(best) - 1) // 2]
