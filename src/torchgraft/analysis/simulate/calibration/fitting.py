"""Fits the figures of a machine to measured times: one kind of kernel after the other, so that the typical ratio of simulated to
measured is as near to one as can be. What the figures mean is said in `timing.py`, what is measured in `measuring.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchgraft.analysis.simulate.clocks import cached_share
from torchgraft.analysis.simulate.kernels import Kernel
from torchgraft.analysis.simulate.machine import Machine
from torchgraft.analysis.simulate.timing import time_of
from torchgraft.analysis.simulate.timing_on_cpu import amounts_on_cpu, scratch_bytes, units_of

TERMS = ("rate", "near", "far", "packed", "elements", "rows")
_STEPS = (3.0, 1.7, 1.25, 1.08, 1.03)
# Figures stay what they mean: shares are shares, and the shortest kernel is short.
_BOUNDS = {
    "floor": (2e-7, 1e-5),
    "bandwidth": (0.02, 1.1),
    "rate": (0.005, 1.0),
    "half": (1.0, 400.0),
    "step": (1e-10, 1e-4),
    "unaligned": (0.03, 1.0),
    "split": (1e-6, 5e-5),
    "masked": (1.0, 4.0),
}


@dataclass(frozen=True)
class Sample:
    """The kernels of one probe and its time; `hot` says that its inputs were in the cache."""

    kernels: tuple[Kernel, ...]
    seconds: float
    hot: bool
    in_place: bool = False

    def simulated(self, machine: Machine) -> float:
        """The seconds that the machine's figures give."""
        return sum(
            time_of(kernel, machine, self.cached(kernel, machine), self.fresh(kernel, machine)).seconds
            for kernel in self.kernels
        )

    def cached(self, kernel: Kernel, machine: Machine) -> float:
        """The bytes that are in the cache, or stay there."""
        if self.hot:
            return kernel.bytes * cached_share(kernel.bytes, machine)
        return kernel.written * cached_share(kernel.written, machine)

    def fresh(self, kernel: Kernel, machine: Machine) -> float:
        """The bytes of results that are new memory each time."""
        return float(kernel.written) if 0 < machine.mapped_bytes <= kernel.written and not self.in_place else 0.0


def error_of(samples: Sequence[Sample], machine: Machine) -> float:
    """The mean of how far the simulated times are off, as logarithms of ratios, so that twice and half count the same.

    Long kernels count more than short ones, slowly growing: it is they that make up the time of a model.
    """
    total = whole = 0.0
    for sample in samples:
        weight = sample.seconds**0.25
        whole += weight
        total += weight * abs(math.log(sample.simulated(machine) / sample.seconds))
    return total / max(whole, 1e-30)


def fit(machine: Machine, kind: str, samples: Sequence[Sample], names: Sequence[str] | None = None) -> float:
    """Change the figures of a kind in a machine, in place, to those that fit best; the error that is left."""
    figures: Any = machine.kernels[kind]
    return descend(figures, list(names or figures), lambda: error_of(samples, machine))


# ---- CPUs: sums of terms ----


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


# ---- GPUs: one figure at a time ----


def descend(figures: Any, names: Sequence[str], loss: Callable[[], float]) -> float:
    """Multiply or divide one figure at a time by ever smaller steps, as long as that makes the loss smaller.

    >>> figures = {"a": 1.0, "b": 1.0}
    >>> left = descend(figures, ["a", "b"], lambda: abs(figures["a"] - 5) + abs(figures["b"] - 0.2))
    >>> left < 0.2
    True
    """
    best = loss()
    for step in _STEPS:
        for _ in range(12):
            before = best
            for name in names:
                for factor in (step, 1 / step):
                    kept = figures[name]
                    low, high = _BOUNDS.get(name, (0.0, math.inf))
                    figures[name] = min(max(kept * factor, low), high)
                    found = loss()
                    if found < best - 1e-9:
                        best = found
                        break
                    figures[name] = kept
            if best > before * 0.9995:
                break
    return best
