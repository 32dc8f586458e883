"""How long probes take on the machine at hand: on a GPU as replayed CUDA graphs, on a CPU by the clock of the wall.
Each is timed with its inputs in the cache and, where they fit there, with inputs that are not.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchgraft.analysis.simulate.calibration.probes import Probe

_COLD_BYTES = 250e6  # more than any cache, so that what is used in turn is never in it
_COLD_BYTES_OF_CPUS = 96e6
_MOST_SETS = 24


@dataclass(frozen=True)
class Measured:
    """Seconds of one probe with its inputs in the cache, and not; `taken` is the most memory that it took, results included."""

    probe: Probe
    hot: float
    cold: float
    taken: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"probe": self.probe.to_dict(), "hot": self.hot, "cold": self.cold, "taken": self.taken}


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
        sets = min(int(_COLD_BYTES / probe.bytes) + 1, _MOST_SETS)
        others = [first, *[probe.tensors("cuda") for _ in range(sets - 1)]]
        fill = torch.empty(int(_COLD_BYTES) if sets == _MOST_SETS else 0, dtype=torch.uint8, device="cuda")
        calls = [_call(probe, tensors) for tensors in others]
        cold = replay_seconds(calls, fill if fill.numel() else None)
    return Measured(probe, hot, cold, taken)


def _call(probe: Probe, tensors: list[Tensor]) -> Callable[[], Any]:
    return lambda: probe.run(tensors)


def replay_seconds(calls: Sequence[Callable[[], Any]], flush: Tensor | None = None, replays: int = 4) -> float:
    """The least seconds for each of some calls, recorded as one CUDA graph and replayed; `flush` is written before each."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        for call in calls:
            call()
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


def measure_on_cpu(probe: Probe, budget: float = 0.04) -> Measured:
    """The time of a probe on the CPU, Python's call included; it is repeated for about `budget` seconds, twice."""
    with torch.no_grad():
        first = probe.tensors("cpu")
        hot = least_seconds(_call(probe, first), budget)
        if probe.bytes > _COLD_BYTES_OF_CPUS:
            return Measured(probe, hot, hot)
        sets = min(int(_COLD_BYTES_OF_CPUS / probe.bytes) + 2, _MOST_SETS)
        others = [first, *[[tensor.clone() for tensor in first] for _ in range(sets - 1)]]
        flush = torch.empty(int(_COLD_BYTES_OF_CPUS) if sets == _MOST_SETS else 0, dtype=torch.uint8)
        return Measured(probe, hot, _cold_seconds([_call(probe, tensors) for tensors in others], flush, budget))


def least_seconds(call: Callable[[], Any], budget: float) -> float:
    """The least seconds of a call that is repeated; a short one is timed some at a time."""
    start = time.perf_counter()
    call()
    count = 1 if time.perf_counter() - start > 2e-4 else 10
    best, spent = float("inf"), 0.0
    while spent < budget or best == float("inf"):
        start = time.perf_counter()
        for _ in range(count):
            call()
        seconds = time.perf_counter() - start
        spent += seconds
        best = min(best, seconds / count)
    return best


def _cold_seconds(calls: Sequence[Callable[[], Any]], flush: Tensor, budget: float) -> float:
    """The typical call of some in turn, each on memory that was not used for long, by the least of its rounds."""
    best, spent, rounds = [float("inf")] * len(calls), 0.0, 0
    while spent < budget or rounds < 2:
        flush.add_(1)
        for place, call in enumerate(calls):
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            spent += seconds
            best[place] = min(best[place], seconds)
        rounds += 1
        spent += flush.numel() * 1e-10
    return sorted(best)[len(best) // 2]


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
