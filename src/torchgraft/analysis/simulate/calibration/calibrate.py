"""`calibrate_machine`: measures kernels on the CPU at hand, fits the figures of a machine to them, and says how well they fit.
Which kernels are tried is in `probes.py`, how they are timed in `measuring.py`, how figures are fitted in `fitting.py`.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch

from torchgraft.analysis.simulate.calibration.at_hand import cpu_at_hand
from torchgraft.analysis.simulate.calibration.fitting import Sample, fit_terms, kernels_of_probe
from torchgraft.analysis.simulate.calibration.measuring import measure_on_cpu
from torchgraft.analysis.simulate.calibration.probes import Probe, probes
from torchgraft.analysis.simulate.kernels import Kernel
from torchgraft.analysis.simulate.machine import Machine, machine_text
from torchgraft.analysis.simulate.timing_on_cpu import class_on_cpu
from torchgraft.errors import GraftError
from torchgraft.results.files import refuse_unwritable, write_text
from torchgraft.results.progress import stage
from torchgraft.results.shown import Tabular
from torchgraft.results.tables import Table

COUNTS = {
    "linear": 60, "vector": 30, "small": 70, "bmm": 30, "convolution": 140, "grouped": 60, "other_convolution": 45,
    "attention": 30, "recurrent": 18, "elementwise": 50, "norm": 60, "memory": 160,
}  # fmt: skip
BATCHES = (1, 2, 4, 8, 16, 16)
MOST_FLOPS, MOST_BYTES = 1.2e10, 1.5e8
SHORTEST = 5  # seconds
ESSENTIAL = ("linear", "convolution", "relu", "add", "attention", "copy", "layer_norm", "mean_spatial")
_FEWEST = 4  # samples of a class, below which it has the figures of its kind
_EACH = 0.015  # seconds for which a probe is repeated, with its inputs in the cache and without
_FIT_SHARE = 0.06  # of the time, for fitting
Pair = tuple[Sample, Sample]  # one kernel with its inputs in the cache, and not


@dataclass(frozen=True, repr=False)
class Calibration(Tabular):
    """A machine that was measured. `errors` has for each kind of kernel how many were measured and by how much the figures
    miss those of them that took no part in a first fit, as a mean of absolute shares.

    >>> found = Calibration(Machine.named("h200"), {"matmul": (10, 0.1), "copy": (30, 0.2)}, planned=50)
    >>> found.measured, round(found.error, 3)
    (40, 0.175)
    """

    machine: Machine
    errors: Mapping[str, tuple[int, float]]
    planned: int

    @property
    def measured(self) -> int:
        """How many kernels were measured."""
        return sum(count for count, _ in self.errors.values())

    @property
    def error(self) -> float:
        """The mean over all kernels."""
        return sum(count * error for count, error in self.errors.values()) / max(self.measured, 1)

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each kind of kernel."""
        return [{"kind": kind, "measured": count, "error": error} for kind, (count, error) in self.errors.items()]

    def to_dict(self) -> dict[str, Any]:
        return {
            "machine": self.machine.name,
            "measured": self.measured,
            "planned": self.planned,
            "error": self.error,
            **super().to_dict(),
        }

    def _table(self) -> Table:
        name, share = self.machine.name, f"{self.error:.0%}"
        columns = ("kind of kernel", "measured", "mean error")
        cells = [(kind, str(count), f"{error:.0%}") for kind, (count, error) in self.errors.items()]
        title = f"{name}: {self.measured} kernels, off by {share} where they took no part in fitting"
        late = f"the time was up after {self.measured} of {self.planned} kernels; more seconds measure more"
        return Table(title, columns, cells, frozenset(columns[1:]), footer=late if self.measured < self.planned else "")

    def machine_text(self) -> str:
        """The machine as the text of a TOML file."""
        note = f"Kernels: fitted to {self.measured} probes by graft calibrate, mean error {self.error:.0%} on those held out."
        return machine_text(
            self.machine, f"{note}\nWhat the figures mean is said in timing_on_cpu.py. Host: seconds of one call each."
        )


def calibrate_machine(
    path: str | PathLike[str] | None = None,
    *,
    seconds: float = 170.0,
    threads: int | None = None,
    name: str | None = None,
    seed: int = 0,
) -> Calibration:
    """Measure kernels on the CPU at hand for at most `seconds`, and fit the figures of a machine that `simulate` takes.

    It is this CPU with as many `threads` as torch has now, or as are given. With `path` the machine is written there, whole
    or not at all. Nothing else should run meanwhile; models take no part.

    >>> found = calibrate_machine(seconds=5, threads=1)
    >>> found.machine.kind, found.machine.units, found.machine.precisions[0]
    ('cpu', 1, 'fp32')
    """
    if not seconds >= SHORTEST:
        raise GraftError(
            f"{seconds:g} seconds are too few to measure a machine\ngive at least {SHORTEST}; the default is 170"
        )
    if threads is not None and threads < 1:
        raise GraftError(f"a machine has 1 thread or more, not {threads}")
    if path is not None:
        refuse_unwritable(path)
    end = time.monotonic() + seconds * (1 - _FIT_SHARE)
    with _threads(threads):
        count = torch.get_num_threads()
        with stage("measuring memory and arithmetic"):
            machine = cpu_at_hand(name, count)
        planned = list(probes(COUNTS, ("fp32",), seed, BATCHES, MOST_FLOPS * min(count, 4), MOST_BYTES))
        samples, left = _measure(_mixed(planned, seed), end)
    with stage("fitting"):
        tried = fitted(machine, [pair for place, pair in enumerate(samples) if place % 5])
        errors = errors_of(tried, samples[::5], samples)
        machine = fitted(machine, samples)
    source = f"measured by graft calibrate with torch {torch.__version__}"
    result = Calibration(replace(machine, source=source), errors, len(samples) + left)
    if path is not None:
        write_text(path, result.machine_text())
    return result


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _mixed(planned: Sequence[Probe], seed: int) -> list[Probe]:
    """All kinds soon: some of each kind first, then the rest in any order."""
    first: dict[str, list[Probe]] = defaultdict(list)
    for probe in planned:
        if probe.work in ESSENTIAL and len(first[probe.work]) < _FEWEST:
            first[probe.work].append(probe)
    begin = [probe for found in first.values() for probe in found]
    rest = [probe for probe in planned if not any(probe is one for one in begin)]
    random.Random(seed).shuffle(rest)
    return [*begin, *rest]


def _measure(planned: Sequence[Probe], end: float) -> tuple[list[Pair], int]:
    """The probes until the time is up; those that no machine can do without in any case. And how many were not tried.

    Time that is left is for measuring them again: the least counts, since what else ran on the machine only ever adds to a time.
    """
    found: list[tuple[Probe, Pair]] = []
    essential = len(ESSENTIAL) * _FEWEST
    for number, probe in enumerate(planned, 1):
        if time.monotonic() > end and number > essential:
            return [pair for _, pair in found], len(planned) - number + 1
        with stage(f"measuring kernels: {probe.work}", number, len(planned)):
            if kernels := kernels_of_probe(probe, gpu=False):
                found.append((probe, _measured(probe, kernels)))
    for place, (probe, before) in enumerate(found):
        if time.monotonic() > end:
            break
        with stage(f"measuring kernels again: {probe.work}", place + 1, len(found)):
            again = _measured(probe, before[0].kernels)
        hot, cold = (min(pair, key=lambda sample: sample.seconds) for pair in zip(before, again, strict=True))
        found[place] = probe, (hot, cold)
    return [pair for _, pair in found], 0


def _measured(probe: Probe, kernels: tuple[Kernel, ...]) -> Pair:
    measured, in_place = measure_on_cpu(probe, _EACH), probe.work.endswith("_")
    return Sample(kernels, measured.hot, True, in_place), Sample(kernels, measured.cold, False, in_place)


# ---- figures by class of kernel ----


def fitted(machine: Machine, pairs: Sequence[Pair]) -> Machine:
    """The machine with figures for each class of kernel that was measured often enough.

    Kinds that are several kernels, such as recurrent layers with copies around them, come last: the others are known by then.
    """
    groups: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    several: list[Sample] = []
    for sample in [sample for pair in pairs for sample in pair]:
        if len(sample.kernels) == 1:
            (kernel,) = sample.kernels
            groups[kernel.kind, class_on_cpu(kernel, machine)].append(sample)
        else:
            several.append(sample)
    kernels: dict[str, Mapping[str, float]] = {}
    for (kind, variant), samples in sorted(groups.items(), key=lambda item: -len(item[1])):
        if kind in kernels and len(samples) < 2 * _FEWEST:
            continue
        figures = fit_terms(machine, samples)
        kernels.setdefault(kind, figures)
        if variant:
            kernels[f"{kind}.{variant}"] = figures
        elif kind == "elementwise":
            kernels[kind] = figures
    result = replace(machine, kernels=kernels)
    alone = [one for sample in several if (one := _recurrent_alone(sample, result)) is not None]
    if len(alone) >= _FEWEST:
        kernels["recurrent"] = fit_terms(machine, alone)
    return replace(machine, kernels=kernels)


def _recurrent_alone(sample: Sample, machine: Machine) -> Sample | None:
    """The recurrent layers of a sample, several alike taken for one, without what the kernels around them take."""
    layers = tuple(kernel for kernel in sample.kernels if kernel.kind == "recurrent")
    if not layers or any(layer.sizes != layers[0].sizes or layer.window != layers[0].window for layer in layers):
        return None
    others = replace(sample, kernels=tuple(kernel for kernel in sample.kernels if kernel.kind != "recurrent"))
    seconds = (sample.seconds - others.simulated(machine)) / len(layers)
    return replace(sample, kernels=layers[:1], seconds=max(seconds, 0.5 * sample.seconds / len(layers)))


def errors_of(machine: Machine, held: Sequence[Pair], pairs: Sequence[Pair]) -> dict[str, tuple[int, float]]:
    """For each kind how many probes there are, and how far those are off on average that were held out."""
    counts: dict[str, int] = defaultdict(int)
    misses: dict[str, list[float]] = defaultdict(list)
    for pair in pairs:
        counts[_kind(pair)] += 1
    for pair in held:
        misses[_kind(pair)] += [abs(sample.simulated(machine) / sample.seconds - 1) for sample in pair]
    every = [miss for found in misses.values() for miss in found]
    whole = sum(every) / max(len(every), 1)
    return {
        kind: (count, sum(misses[kind]) / len(misses[kind]) if misses[kind] else whole)
        for kind, count in sorted(counts.items())
    }


def _kind(pair: Pair) -> str:
    kinds = [kernel.kind for kernel in pair[0].kernels]
    return kinds[0] if len(kinds) == 1 else "recurrent"
