"""Measured files beside simulations of the same cases: a pair for each figure.
The files are written by `measure_gpu.py`, what is made of the pairs is in `errors.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.simulating.errors import Pair
from benchmarks.simulating.log import all_rows
from benchmarks.simulating.measured_models import build
from benchmarks.simulating.models import CASES, Case, call_of
from torchgraft.analysis.simulate import Machine, simulate, what_if
from torchgraft.errors import GraftError


def measured_rows(files: Iterable[Path]) -> list[dict[str, Any]]:
    """The rows of some files, and of all files of some folders, about models."""
    return [row for row in all_rows(files) if ("model" in row or "training" in row) and "kernels" not in row]


def pairs_of(rows: Sequence[dict[str, Any]], machine: Machine, names: Sequence[str] | None = None) -> Iterator[Pair]:
    """A pair for each figure that was measured; a case that cannot be simulated here is said and left out."""
    for case in CASES:
        own = [row for row in rows if case.name in (row.get("model"), row.get("training")) and "error" not in row]
        if not own or (names is not None and case.name not in names):
            continue
        model = build(case, "meta")
        if model is None:
            continue
        try:
            yield from _of_runs(case, model.eval(), [row for row in own if "model" in row], machine)
            yield from _of_training(case, model.train(), [row for row in own if "training" in row], machine)
        except GraftError as error:
            print(f"{case.name}: {error}", flush=True)


def _of_runs(case: Case, model: nn.Module, rows: Sequence[dict[str, Any]], machine: Machine) -> Iterator[Pair]:
    if not rows:
        return
    args, kwargs = call_of(case, rows[0]["batch"], torch.float32, "meta")
    modes = ["eager", "graph"] if machine.kind == "gpu" else ["eager"]
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    found = what_if(model, args, kwargs, machine=machine, batch=batches, precision=precisions, mode=modes)
    simulated = {(one.batch, one.precision, one.mode): one for one in found.results}
    for row in rows:
        for what, name, mode in (
            ("device", "graph", "graph"),
            ("eager", "eager", "eager"),
            ("memory", "peak_bytes", "eager"),
        ):
            one = simulated.get((row["batch"], row["precision"], mode))
            value = None if one is None else one.peak_bytes if what == "memory" else one.seconds
            if row.get(name) and value is not None:
                yield _pair(case, row, what, row[name], value)


def _of_training(case: Case, model: nn.Module, rows: Sequence[dict[str, Any]], machine: Machine) -> Iterator[Pair]:
    for row in rows:
        args, kwargs = call_of(case, row["batch"], torch.float32, "meta")
        one = simulate(model, args, kwargs, machine=machine, precision=row["precision"], optimizer=torch.optim.AdamW)
        yield _pair(case, row, "training", row["eager"], one.seconds)
        if row.get("peak_bytes"):
            yield _pair(case, row, "training memory", row["peak_bytes"], one.peak_bytes)


def _pair(case: Case, row: dict[str, Any], what: str, measured: float, simulated: float) -> Pair:
    return Pair(case.name, case.kind, case.fit, row["batch"], row["precision"], what, float(measured), float(simulated))
