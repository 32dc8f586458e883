"""Fits the figures of a CPU to measured times, so that the typical ratio of simulated to measured is as near to one as can be.
What the figures mean is said in `timing_on_cpu.py`, what is measured in `measuring.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchgraft.analysis.simulate.clocks import cached_share, without_call
from torchgraft.analysis.simulate.kernels import Kernel
from torchgraft.analysis.simulate.machine import Machine
from torchgraft.analysis.simulate.timing import time_of
from torchgraft.analysis.simulate.timing_on_cpu import amounts_on_cpu, scratch_bytes, units_of

TERMS = ("rate", "near", "far", "packed", "elements", "rows")


@dataclass(frozen=True)
class Sample:
    """The kernels of one probe and its time; `hot` says that its inputs were in the cache."""

    kernels: tuple[Kernel, ...]
    seconds: float
    hot: bool
    in_place: bool = False

    def simulated(self, machine: Machine) -> float:
        """The seconds that the machine's figures give; Python calls the first of several kernels."""
        timings = [
            time_of(kernel, machine, self.cached(kernel, machine), self.fresh(kernel, machine))
            for kernel in self.kernels
        ]
        if machine.kind == "cpu":
            timings[1:] = [without_call(timing, machine) for timing in timings[1:]]
        return sum(timing.seconds for timing in timings)

    def cached(self, kernel: Kernel, machine: Machine) -> float:
        """The bytes that are in the cache, or stay there."""
        if self.hot:
            return kernel.bytes * cached_share(kernel.bytes, machine)
        return kernel.written * cached_share(kernel.written, machine)

    def fresh(self, kernel: Kernel, machine: Machine) -> float:
        """The bytes of results that are new memory each time."""
        return float(kernel.written) if 0 < machine.mapped_bytes <= kernel.written and not self.in_place else 0.0


def fit_terms(machine: Machine, samples: Sequence[Sample], most_rounds: int = 15) -> dict[str, float]:
    """The figures of one kind of kernel on a CPU, from samples of one such kernel each.

    The time is linear in one over each figure, none of which is negative. Relative errors count as they are, not squared: so
    samples that another job on the machine disturbed count for little.
    """
    rows, targets = [], []
    for sample in samples:
        (kernel,) = sample.kernels
        amounts = amounts_on_cpu(kernel, machine, sample.cached(kernel, machine))
        units = units_of(kernel, machine)
        known = 0.0
        if machine.fresh_bandwidth:
            known = (sample.fresh(kernel, machine) + scratch_bytes(kernel, machine)) / machine.fresh_bandwidth
        rows.append([float(kernel.passes)] + [amounts.get(name, 0.0) / units[name] for name in TERMS])
        targets.append(max(sample.seconds - known, 0.1 * sample.seconds))
    scales = [sample.seconds for sample in samples]
    matrix = [[value / scale for value in row] for row, scale in zip(rows, scales, strict=True)]
    wanted = [target / scale for target, scale in zip(targets, scales, strict=True)]
    weights = [1.0] * len(samples)
    solved: list[float] = []
    for _ in range(most_rounds):
        solved = _not_negative(matrix, wanted, weights)
        misses = [
            abs(sum(a * x for a, x in zip(row, solved, strict=True)) - target)
            for row, target in zip(matrix, wanted, strict=True)
        ]
        if weights == (weights := [1.0 / max(miss, 0.02) for miss in misses]):
            break
    figures = {"floor": max(solved[0], 2e-7)}
    return figures | {name: 1.0 / value for name, value in zip(TERMS, solved[1:], strict=True) if value > 0}


def _not_negative(matrix: list[list[float]], wanted: list[float], weights: list[float]) -> list[float]:
    """The weighted least squares of which no part is negative, one unknown at a time."""
    count = len(matrix[0])
    sizes = [max(abs(row[place]) for row in matrix) or 1.0 for place in range(count)]
    scaled = [[value / size for value, size in zip(row, sizes, strict=True)] for row in matrix]
    gram = [
        [sum(w * row[a] * row[b] for row, w in zip(scaled, weights, strict=True)) for b in range(count)]
        for a in range(count)
    ]
    side = [sum(w * row[a] * y for row, y, w in zip(scaled, wanted, weights, strict=True)) for a in range(count)]
    found = [0.0] * count
    for _ in range(600):
        change = 0.0
        for a in range(count):
            if gram[a][a] <= 0:
                continue
            rest = side[a] - sum(gram[a][b] * found[b] for b in range(count) if b != a)
            value = max(rest / gram[a][a], 0.0)
            change, found[a] = max(change, abs(value - found[a])), value
        if change < 1e-7:
            break
    return [value / size for value, size in zip(found, sizes, strict=True)]
