"""Which kernels a GPU runs for a probe or a model, by name, with their times, from torch's profiler.
Nothing is fitted to them: they are read when a figure of a machine cannot be explained.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.simulating.gpu_times import tf32_allowed
from benchmarks.simulating.log import Log
from benchmarks.simulating.measured_models import build, free
from benchmarks.simulating.models import CASES, call_of
from torchgraft.analysis.simulate.calibration.probes import Probe
from torchgraft.analysis.simulate.kernels import DTYPES

_AT_ONCE = 150


def profile_probes(log: Log, chosen: list[Probe], end: float) -> None:
    """The kernels of each probe; a spinning kernel stands between probes."""
    left = [probe for probe in chosen if not log.has({"probe": probe.to_dict()})]
    for begin in range(0, len(left), _AT_ONCE):
        if time.perf_counter() > end:
            return
        part = left[begin : begin + _AT_ONCE]
        with torch.no_grad(), profile(activities=[ProfilerActivity.CUDA]) as found:
            for probe in part:
                tensors = probe.tensors("cuda")
                torch.cuda._sleep(100)
                with tf32_allowed(probe.precision == "tf32"):
                    probe.run(tensors)
                    torch.cuda._sleep(100)
                    del tensors
            torch.cuda.synchronize()
        groups: list[list[Any]] = [[]]
        for name, seconds in _kernels(found):
            if "spin" in name:
                groups.append([])
            else:
                groups[-1].append([name, seconds])
        for place, probe in enumerate(part):
            at = 2 * place + 1
            log.add({"probe": probe.to_dict(), "kernels": groups[at] if at < len(groups) else None})


def profile_models(log: Log, end: float) -> None:
    """The kernels of the models that take part in fitting."""
    for case in CASES:
        rows = [
            {"model": case.name, "batch": batch, "precision": precision}
            for batch, precision in (
                (1, "fp32"),
                (16, "fp32"),
                (1, "tf32"),
                (16, "tf32"),
                (1, "fp16"),
                (16, "fp16"),
                (128, "fp16"),
            )
        ]
        todo = [row for row in rows if case.fit and not log.has(row)]
        model = build(case, "cuda") if todo and time.perf_counter() < end else None
        if model is None:
            continue
        model.eval().requires_grad_(False)
        for row in todo:
            dtype = DTYPES[row["precision"]]
            args, kwargs = call_of(case, row["batch"], dtype, "cuda")
            model = model.to(dtype)
            with torch.no_grad(), tf32_allowed(row["precision"] == "tf32"):
                for _ in range(2):
                    model(*args, **kwargs)
                torch.cuda.synchronize()
                with profile(activities=[ProfilerActivity.CUDA]) as found:
                    model(*args, **kwargs)
                    torch.cuda.synchronize()
            log.add(row | {"kernels": _kernels(found)})
        free("cuda")


def _kernels(found: Any) -> list[list[Any]]:
    """Names and microseconds in the order in which they ran."""
    events = [event for event in found.events() if str(event.device_type).endswith("CUDA")]
    events.sort(key=lambda event: event.time_range.start)
    return [[event.name[:120], round(event.time_range.end - event.time_range.start, 2)] for event in events]
