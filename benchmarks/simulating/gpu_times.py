"""How long probes and calls take on a GPU: as replayed CUDA graphs, and for the host alone. On a CPU probes are timed in
`torchgraft/analysis/simulate/calibration/measuring.py`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgraft.analysis.simulate.calibration.measuring import MOST_SETS, Measured, call_of_probe
from torchgraft.analysis.simulate.calibration.probes import Probe
from torchgraft.backends.graph_recording import record_graph

_COLD_BYTES = 250e6  # more than any cache, so that what is used in turn is never in it


@contextlib.contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Whether products of fp32 may be made in tf32, for a block."""
    settings: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    before = [setting.allow_tf32 for setting in settings]
    for setting in settings:
        setting.allow_tf32 = allowed
    try:
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.allow_tf32 = value


def measure_on_gpu(probe: Probe) -> Measured:
    """The time of a probe on the GPU, without the host."""
    with torch.no_grad(), tf32_allowed(probe.precision == "tf32"):
        first = probe.tensors("cuda")
        probe.run(first)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = probe.run(first)
        taken = torch.cuda.max_memory_allocated() - before
        del result
        once = replay_seconds([lambda: probe.run(first)] * 2)
        count = min(max(int(4e-4 / max(once, 1e-6)), 2), 40)
        hot = replay_seconds([lambda: probe.run(first)] * count)
        if probe.bytes > _COLD_BYTES:
            return Measured(probe, hot, hot, taken)
        sets = min(int(_COLD_BYTES / probe.bytes) + 1, MOST_SETS)
        others = [first, *[probe.tensors("cuda") for _ in range(sets - 1)]]
        fill = torch.empty(int(_COLD_BYTES) if sets == MOST_SETS else 0, dtype=torch.uint8, device="cuda")
        calls = [call_of_probe(probe, tensors) for tensors in others]
        cold = replay_seconds(calls, fill if fill.numel() else None)
    return Measured(probe, hot, cold, taken)


def replay_seconds(calls: Sequence[Callable[[], Any]], flush: Tensor | None = None, replays: int = 4) -> float:
    """The least seconds for each of some calls, recorded as one CUDA graph and replayed; `flush` is written before each."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)

    def record() -> None:
        for call in calls:
            call()

    graph, _ = record_graph(record)  # where that fails, what is measured next is not the worse for it
    best = float("inf")
    for _ in range(replays):
        if flush is not None:
            flush.fill_(1)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best / len(calls)


def host_seconds(call: Callable[[], Any], count: int = 100) -> float:
    """What the host takes to issue a call whose kernels are short; the least of several rounds."""
    best = float("inf")
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - start) / count)
        torch.cuda.synchronize()
    return best
