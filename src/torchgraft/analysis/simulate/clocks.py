"""Two clocks: the host issues kernels, the device runs them in order; when each starts, and how long the whole takes.
How long a kernel runs alone is in `timing.py`; what of its memory is in the cache is worked out here, from what ran before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchgraft.analysis.simulate.kernels import Kernel
from torchgraft.analysis.simulate.machine import Machine
from torchgraft.analysis.simulate.timing import Timing, is_persistent, time_of

_MOST_OF_A_CALL = 0.8  # the share of a floor that Python's call can be


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of a run: its kernel, if any, the memory that it goes through, and for which node and in which phase it ran.

    `calls` counts calls of modules that Python made on the way to it, `moment` its place in the timeline of memory. An operator
    that is several kernels has its name on the first. An `inner` one was called by another operator, not by Python; one that is
    `gone` has become part of another one.
    """

    operator: str
    kernel: Kernel | None
    touched: tuple[tuple[int, int, bool], ...]
    node: str | None
    phase: str
    calls: int = 0
    moment: int = 0
    inner: bool = False
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Ran:
    """A step when it ran: seconds from the start of the run, on the host and on the device."""

    step: Step
    issued: float
    start: float
    end: float
    host: float
    timing: Timing | None


def cached_share(since: float, machine: Machine) -> float:
    """How much of what was gone through `since` bytes ago is still in the cache: lines are not replaced in strict order."""
    return min(max(1.5 - since / machine.cache_bytes, 0.0), 1.0)


class Cache:
    """What of a machine's cache still holds, by how many bytes were gone through since."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.now = machine, 0.0
        self.last: dict[int, float] = {}

    def pass_over(self, touched: Sequence[tuple[int, int, bool]]) -> float:
        """Go through memory; how many of the bytes were in the cache, or stay there."""
        found = 0.0
        for memory, size, made in touched:
            since = 0.0 if made else self.now - self.last.get(memory, float("-inf"))
            found += size * cached_share(since + size, self.machine)
        for memory, size, _ in touched:
            self.now += size
            self.last[memory] = self.now
        return found


def run_clocks(steps: Sequence[Step], machine: Machine, mode: str, fresh: Mapping[int, int] | None = None) -> list[Ran]:
    """When each step starts and ends, in the steady state: the cache holds what the same run left there.

    `fresh` says at which moments how many bytes of new memory come from the system (on a CPU).
    """
    cache = Cache(machine)
    for step in steps:
        cache.pass_over(step.touched)
    host = machine.host
    gap = host.get("gap", 0.0)
    on_cpu, eager = machine.kind == "cpu", mode == "eager"
    issued = free = 0.0
    new = dict(fresh or {})
    found: list[Ran] = []
    for step in steps:
        cost = host_seconds(step, machine) if eager or on_cpu else 0.0
        issued += cost
        cached = cache.pass_over(step.touched)
        if step.kernel is None:
            found.append(Ran(step, issued, max(issued, free), max(issued, free), cost, None))
            continue
        if step.kernel.kind == "wait":
            issued = max(issued, free) + host.get("wait", 1e-5)
        timing = time_of(step.kernel, machine, min(cached, step.kernel.bytes), new.pop(step.moment, 0))
        if on_cpu and step.inner:
            timing = without_call(timing, machine)
        start = issued if on_cpu else max(issued, free + gap)
        free = start + timing.seconds
        if on_cpu:
            issued = free
        found.append(Ran(step, issued, start, free, cost, timing))
    return found


def without_call(timing: Timing, machine: Machine) -> Timing:
    """The time of a kernel on a CPU whose operator another one called: its floor has Python's call in it."""
    less = min(machine.host.get("call", 0.0), _MOST_OF_A_CALL * timing.floor)
    return timing._replace(seconds=timing.seconds - less, floor=timing.floor - less)


def host_seconds(step: Step, machine: Machine) -> float:
    """What Python and torch take to issue a step; on a CPU `operator` is what one takes longer among others than alone."""
    host = machine.host
    seconds = step.calls * host.get("module", 0.0)
    if step.gone:
        return seconds
    if step.kernel is None:
        view = host.get("view", 0.0)
        inner = step.inner and machine.kind == "cpu"
        return seconds + view - (min(host.get("call", 0.0), _MOST_OF_A_CALL * view) if inner else 0.0)
    kernel = step.kernel
    if step.inner and machine.kind == "cpu":
        return seconds
    if kernel.kind == "recurrent" and kernel.sizes and not is_persistent(kernel, machine):
        seconds += kernel.sizes[0] * kernel.images * host.get("step", 0.0)
    if not step.operator:
        return seconds + host.get("launch", 0.0)
    return seconds + host.get(kernel.kind, host.get("operator", 0.0))
