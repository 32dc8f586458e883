"""The command `python -m benchmarks.simulating.fit OUT -o h200.toml`: the file of a GPU, from what `measure_gpu.py` measured.

Figures of kernels are fitted to probes, one table after the other, beginning with those of --machine; what the host takes are the
times of single calls, times one factor, which the eager times of the models that are marked `fit` ask for. Peak rates,
bandwidths, sizes and links are those of --machine: they are from datasheets.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.simulating.comparing import measured_rows
from benchmarks.simulating.log import all_rows
from benchmarks.simulating.measured_models import build
from benchmarks.simulating.models import CASES, call_of
from torchgraft.analysis.simulate.calibration.fitting import Sample
from torchgraft.analysis.simulate.calibration.probes import Probe
from torchgraft.analysis.simulate.kernels import Kernel
from torchgraft.analysis.simulate.machine import Machine, machine_text
from torchgraft.analysis.simulate.simulate import recorded

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
MOST_SAMPLES = 400  # for one table
FEWEST_SAMPLES = 6  # below which a table stays as it is
# For each figure of [host] the calls whose median it is; of modules what calling them takes is taken off.
HOST = {
    "operator": ("function add", "function mul_scalar", "function relu", "function add_"),
    "view": ("function view", "function transpose", "function unsqueeze", "function slice", "function permute"),
    "matmul": ("function linear", "function bmm", "module linear", "module linear_no_bias"),
    "convolution": ("module conv", "module depthwise"),
    "norm": ("module layer_norm", "module batch_norm", "module group_norm", "function softmax"),
    "attention": ("function sdpa",),
    "pooling": ("module max_pool", "function interpolate"),
    "copy": ("function contiguous", "function cat", "function to_half"),
    "gather": ("function index", "module embedding"),
    "reduction": ("function mean", "function std"),
    "recurrent": ("module lstm",),
    "sort": ("function topk",),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, say how well, and write the file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulating.fit", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("measured", nargs="+", type=Path, help="files or folders of measure_gpu.py")
    parser.add_argument("--machine", default="h200", help="what to begin with: a name or a .toml file (default: h200)")
    parser.add_argument("--rounds", type=int, default=2, help="how often to go over all tables (default: 2)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the .toml file to write")
    options = parser.parse_args(arguments)
    if missing := [str(path) for path in options.measured if not path.exists()]:
        parser.error(
            f"{', '.join(missing)} is not there; python -m benchmarks.simulating.measure_gpu OUT writes such files"
        )
    rows = all_rows(options.measured)
    machine = copy.deepcopy(Machine.named(options.machine))
    samples = samples_of([row for row in rows if "hot" in row], machine)
    notes = []
    if samples:
        print(f"{len(samples)} times of probes; before: off by {_percent(error_of(samples, machine))}", flush=True)
        fit_kernels(machine, samples, options.rounds)
        print(f"after: off by {_percent(error_of(samples, machine))}", flush=True)
        notes.append(
            f"Kernels: fitted to {len(samples) // 2} probes (python -m benchmarks.simulating.fit){_where(rows)}."
        )
    calls = {row["host"]: row["seconds"] for row in rows if "host" in row and "seconds" in row}
    if calls:
        machine = replace(machine, host={**machine.host, **host_of(calls)})
        machine, factor, names = host_fitted(machine, measured_rows(options.measured))
        notes.append(
            f"Host: seconds of calls of one operator each, times {factor:.3g}, which {', '.join(names) or 'nothing'} asks for."
        )
    if not notes:
        parser.error("there are neither probes nor calls of the host among what was measured")
    options.output.write_text(machine_text(machine, "\n".join(notes)))
    print(f"written: {options.output}")


def _where(rows: Sequence[dict[str, Any]]) -> str:
    about = next((row for row in rows if "device" in row and "torch" in row), None)
    return "" if about is None else f" on {about['device']}, torch {about['torch']}, cuDNN {about.get('cudnn')}"


def _percent(error: float) -> str:
    """A mean of logarithms of ratios, as how much too long or too short that is."""
    return f"{math.expm1(error):.1%}"


# ---- kernels ----


class _Work(nn.Module):
    """A probe as a model."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self.probe = probe

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.probe.run(list(tensors))


def samples_of(rows: Sequence[dict[str, Any]], machine: Machine) -> list[Sample]:
    """Two samples for each measured probe: with its inputs in the cache, and not."""
    found = []
    for row in rows:
        values = row["probe"]
        shapes = tuple(tuple(shape) for shape in values["shapes"])
        probe = Probe(values["work"], shapes, values["precision"], values["options"])
        kernels = kernels_of_probe(probe, machine)
        if kernels and min(row["hot"], row["cold"]) > 0:
            found += [Sample(kernels, row["hot"], True), Sample(kernels, row["cold"], False)]
    return found


def kernels_of_probe(probe: Probe, machine: Machine) -> tuple[Kernel, ...]:
    """The kernels that a simulation sees in a probe."""
    tensors = tuple(probe.tensors("meta"))
    run = recorded(_Work(probe), tensors, {}, machine, probe.precision, False)
    return tuple(step.kernel for step in run.steps if step.kernel is not None)


class _Asked(dict[str, Any]):
    """Tables of figures that write down which of them were asked for."""

    def __init__(self, tables: Mapping[str, Any]) -> None:
        super().__init__(tables)
        self.names: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        self.names[name] = None
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401


def tables_of(sample: Sample, machine: Machine) -> list[str]:
    """The tables of a machine that the time of a sample depends on."""
    asked = _Asked(machine.kernels)
    sample.simulated(replace(machine, kernels=asked))
    return list(asked.names)


def fit_kernels(machine: Machine, samples: Sequence[Sample], rounds: int) -> None:
    """Change the figures of all tables, in place: those first that most samples depend on."""
    using: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        for name in tables_of(sample, machine):
            using[name].append(sample)
    for _ in range(rounds):
        for name, own in sorted(using.items(), key=lambda item: -len(item[1])):
            every = -(-len(own) // MOST_SAMPLES)
            if len(own) >= FEWEST_SAMPLES:
                left = fit(machine, name, own[::every])
                print(f"  {name}: {len(own)} times, off by {_percent(left)}", flush=True)


# ---- the host ----


def host_of(calls: Mapping[str, float]) -> dict[str, float]:
    """The figures of [host] from the times of single calls; figures whose calls are missing are left out."""
    found: dict[str, float] = {}
    module = calls.get("module identity", 0.0)
    if module:
        found["module"] = module
    for figure, names in HOST.items():
        times = [calls[name] - (module if name.startswith("module") else 0.0) for name in names if name in calls]
        if times:
            found[figure] = median(times)
    if "module conv" in calls and "module conv_bias" in calls:
        found["launch"] = max(calls["module conv_bias"] - calls["module conv"], 1e-7)
    return found


def host_fitted(machine: Machine, rows: Sequence[dict[str, Any]]) -> tuple[Machine, float, list[str]]:
    """The machine with its host's figures times the factor at which eager times of the models marked `fit` are met best."""
    pairs = list(_eager(machine, rows))

    def scaled(factor: float) -> Machine:
        return replace(machine, host={name: seconds * factor for name, seconds in machine.host.items()})

    def loss(factor: float) -> float:
        other, total = scaled(factor), 0.0
        for _, seconds, run in pairs:
            run.machine = other
            total += abs(math.log(run.simulation("eager", False).seconds / seconds))
        return total

    factor = min((1.02**power for power in range(-20, 46)), key=loss) if pairs else 1.0
    return scaled(factor), factor, list(dict.fromkeys(name for name, _, _ in pairs))


def _eager(machine: Machine, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, float, Any]]:
    """The models marked `fit`, their eager seconds where the host is what is waited for (batch 1), and their runs."""
    for row in rows:
        case = next((case for case in CASES if case.name == row.get("model") and case.fit), None)
        if case is None or row["batch"] != 1 or not row.get("eager"):
            continue
        model = build(case, "meta")
        if model is not None:
            args, kwargs = call_of(case, 1, torch.float32, "meta")
            yield case.name, row["eager"], recorded(model.eval(), args, kwargs, machine, row["precision"], False)


# ---- one figure at a time ----


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


if __name__ == "__main__":
    main()
