"""What probes give a machine to do, and the figures of a CPU fitted to their times, so that the typical ratio of simulated to
measured is as near to one as can be.
What the figures mean is said in `timing_on_cpu.py`, what is measured in `measuring.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchgraft.analysis.dry_run import WatchedOperators
from torchgraft.analysis.simulate.calibration.probes import Probe
from torchgraft.analysis.simulate.clocks import cached_share, without_call
from torchgraft.analysis.simulate.composites import kernels_of
from torchgraft.analysis.simulate.kernels import Kernel
from torchgraft.analysis.simulate.machine import Machine
from torchgraft.analysis.simulate.timing import time_of
from torchgraft.analysis.simulate.timing_on_cpu import amounts_on_cpu, scratch_bytes, units_of
from torchgraft.analysis.simulate.whole_calls import WholeCalls

TERMS = ("rate", "near", "far", "packed", "elements", "rows")


def kernels_of_probe(probe: Probe, gpu: bool = True) -> tuple[Kernel, ...]:
    """The kernels of a probe, on a GPU or on a CPU, which takes every operator as one; from a run on tensors without data.

    >>> [kernel.kind for kernel in kernels_of_probe(Probe("linear", ((8, 16), (32, 16), (32,))))]
    ['matmul']
    """
    found: list[Kernel] = []
    tf32 = probe.precision == "tf32"
    watched = WatchedOperators(
        lambda op, args, kwargs, made: found.extend(kernels_of(op, args, kwargs, made, tf32, gpu))
    )
    whole = WholeCalls(lambda name, read, made, kernels: found.extend(kernels), tf32)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        tensors = probe.tensors("cpu")
        with whole if gpu else contextlib.nullcontext(), watched:
            probe.run(tensors)
    return tuple(found)


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
    scales = torch.tensor([sample.seconds for sample in samples], dtype=torch.float64)
    matrix = torch.tensor(rows, dtype=torch.float64) / scales[:, None]
    wanted = torch.tensor(targets, dtype=torch.float64) / scales
    weights = torch.ones_like(scales)
    for _ in range(most_rounds):
        solved = _not_negative(matrix, wanted, weights)
        before, weights = weights, 1.0 / (matrix @ solved - wanted).abs().clamp_min(0.02)
        if torch.equal(before, weights):
            break
    floor, *terms = solved.tolist()
    return {"floor": max(floor, 2e-7)} | {name: 1.0 / term for name, term in zip(TERMS, terms, strict=True) if term > 0}


def _not_negative(matrix: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    """The weighted least squares of which no part is negative, one unknown at a time."""
    sizes = matrix.abs().amax(0)
    sizes[sizes == 0] = 1.0
    weighted = (matrix / sizes).T * weights
    gram, side = (weighted @ (matrix / sizes)).tolist(), (weighted @ wanted).tolist()
    found = [0.0] * len(side)
    for _ in range(600):
        change = 0.0
        for a, row in enumerate(gram):
            if row[a] <= 0:
                continue
            rest = side[a] - sum(row[b] * found[b] for b in range(len(side)) if b != a)
            value = max(rest / row[a], 0.0)
            change, found[a] = max(change, abs(value - found[a])), value
        if change < 1e-7:
            break
    return torch.tensor(found, dtype=torch.float64) / sizes
