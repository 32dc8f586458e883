"""How long a kernel runs on a machine, and what sets that time: arithmetic, memory, or the mere start of a kernel.
What a kernel has to do is said in `kernels.py`; when it can start is decided in `clocks.py`.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from torchgraft.analysis.simulate.kernels import Kernel
from torchgraft.analysis.simulate.machine import Machine


class Timing(NamedTuple):
    """Seconds on the device, split into what they are made of; the larger of `compute` and `memory` counts, besides `floor`."""

    seconds: float
    bound: str
    compute: float
    memory: float
    floor: float


def time_of(kernel: Kernel, machine: Machine, cached: float = 0.0) -> Timing:
    """The time of a kernel of which `cached` bytes are in the machine's cache.

    >>> kernel = Kernel("aten.add.Tensor", "elementwise", "fp32", 10**9, 8 * 10**9, 4 * 10**9)
    >>> timing = time_of(kernel, Machine.named("h200"))
    >>> timing.bound, 0.0025 < timing.seconds < 0.0040
    ('memory', True)
    """
    figures = machine.kernels.get(kernel.kind) or machine.kernels["elementwise"]
    floor = figures["floor"]
    share = figures.get("bandwidth", 1.0)
    memory = (kernel.bytes - cached) / (machine.bandwidth * share) + cached / (machine.cache_bandwidth * share)
    compute = _compute(kernel, machine, figures)
    bound = "compute" if compute > memory else "memory"
    if max(compute, memory) < floor:
        bound = "launch"
    return Timing(floor + max(compute, memory), bound, compute, memory, floor)


def _compute(kernel: Kernel, machine: Machine, figures: dict[str, float]) -> float:  # type: ignore[type-arg]
    peak = machine.peak.get(kernel.type) or machine.peak["fp32"]
    if not kernel.sizes:
        return kernel.flops / machine.peak.get("fp32", peak)
    rate = figures.get(f"rate_{kernel.type}", figures.get("rate", 0.5))
    return kernel.flops / (peak * rate * _filling(kernel.sizes, machine))


def _filling(sizes: tuple[int, ...], machine: Machine, tile: int = 128) -> float:
    """The share of the machine's units that tiles of a product keep busy: whole tiles, in whole waves."""
    count, rows, columns, _ = sizes
    tiles = count * ceil(rows / tile) * ceil(columns / tile)
    padding = (rows / (ceil(rows / tile) * tile)) * (columns / (ceil(columns / tile) * tile))
    waves = ceil(tiles / machine.units)
    return max(tiles / (waves * machine.units) * padding, 1e-3)
