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

    def simulated(self, machine: Machine) -> float:
        """The seconds that the machine's figures give."""
        return sum(time_of(kernel, machine, self._cached(kernel, machine)).seconds for kernel in self.kernels)

    def _cached(self, kernel: Kernel, machine: Machine) -> float:
        if self.hot:
            return kernel.bytes * cached_share(kernel.bytes, machine)
        return kernel.written * cached_share(kernel.written, machine)


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
