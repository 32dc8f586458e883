"""How things are measured: interleaved repetitions, one sample of each arm in turn, and the figures drawn from them.
What is measured is in `core`, and how it is printed in `report`.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Run = Callable[[], Any]
Fresh = Callable[[], Run]
Meter = Callable[[Run], tuple[float, Any]]


@dataclass(frozen=True)
class Arm:
    """One competitor of an experiment.

    `prepare` is called once and returns `fresh`; `fresh` is called before every sample and returns what is measured.
    Neither of the two is measured. A sample is divided by `per` (calls in a loop, nodes in a graph), and `count` looks
    at the result afterwards, so that arms that did different amounts of work do not pass for equal. A `slow` arm takes
    part only in a full run, and is sampled once; a `long` one needs no warming up.
    """

    label: str
    prepare: Callable[[], Fresh]
    per: int = 1
    count: Callable[[Any], int] | None = None
    slow: bool = False
    long: bool = False


@dataclass(frozen=True)
class Row:
    """One line of the table: `ours` against `theirs`, which are labels of arms.

    A row that has `ours_small` is about growth: the cost at one size over the cost at a smaller size, divided by how
    many times larger it is, which must stay below `required`. Every other row must be at least `required` times better
    than `theirs`. With `by_minima` it is the ratio of the minima that is asked: where the two run the same kernels, what differs
    between their medians is what else the machine did.
    """

    name: str
    required: float | None = None
    theirs: str = "torch.fx"
    ours: str = "ours"
    theirs_small: str | None = None
    ours_small: str | None = None
    times_larger: float = 1.0
    by_minima: bool = False

    @property
    def is_growth(self) -> bool:
        return self.ours_small is not None


@dataclass(frozen=True)
class Experiment:
    """Arms that are sampled in turn, and the rows that compare them; `own_meter` measures `meter` in a way of its own."""

    name: str
    arms: tuple[Arm, ...]
    rows: tuple[Row, ...]
    meter: str = "seconds"
    collector: bool = False
    rounds: int | None = None
    own_meter: Meter | None = None


@dataclass
class Samples:
    """What one arm gave."""

    values: list[float] = field(default_factory=list)
    count: int | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def minimum(self) -> float:
        return min(self.values)


@dataclass(frozen=True)
class Plan:
    """How long to go on: `repeat` rounds exactly, or as many as fit in `budget` seconds within the two limits."""

    repeat: int | None = None
    budget: float = 1.0
    fewest: int = 3
    most: int = 25
    full: bool = False
    clock: Callable[[], float] = time.process_time

    def rounds(self, experiment: Experiment) -> Iterator[int]:
        exact = experiment.rounds or self.repeat
        started = time.perf_counter()
        done = 0
        while done < (exact or self.most):
            if exact is None and done >= self.fewest and time.perf_counter() - started > self.budget:
                return
            yield done
            done += 1


def measure(experiment: Experiment, plan: Plan) -> dict[str, Samples]:
    """Sample every arm of the experiment, in an order that rotates from round to round."""
    arms = [(arm, arm.prepare()) for arm in experiment.arms if plan.full or not arm.slow]
    samples = {arm.label: Samples() for arm, _fresh in arms}
    meter = _meter(experiment, plan)
    # The first runs pay for imports, caches and specialisation of bytecode.
    for arm, fresh in arms:
        if not (arm.slow or arm.long or experiment.rounds == 1):
            _warm_up(fresh)
    # What exists by now stays; left out of collections, it makes the one before each sample cost next to nothing. Where
    # the collector is part of what is measured, it sees the whole heap, as it would in any program.
    if experiment.collector:
        gc.unfreeze()
    else:
        gc.freeze()
    for done in plan.rounds(experiment):
        turn = done % len(arms)
        for arm, fresh in arms[turn:] + arms[:turn]:
            if arm.slow and done:
                continue
            value, result = meter(fresh())
            samples[arm.label].values.append(value / arm.per)
            if arm.count is not None:
                samples[arm.label].count = arm.count(result)
            del result
    return samples


def _warm_up(fresh: Fresh, enough: float = 0.05) -> None:
    started = time.perf_counter()
    for _ in range(3):
        fresh()()
        if time.perf_counter() - started > enough:
            return


def _meter(experiment: Experiment, plan: Plan) -> Meter:
    if experiment.own_meter is not None:
        return experiment.own_meter
    if experiment.meter == "bytes":
        return _allocated_bytes

    def seconds(run: Run) -> tuple[float, Any]:
        gc.collect()
        if not experiment.collector:
            gc.disable()
        try:
            started = plan.clock()
            result = run()
            return plan.clock() - started, result
        finally:
            gc.enable()

    return seconds


def _allocated_bytes(run: Run) -> tuple[float, Any]:
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        result = run()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before, result
    finally:
        tracemalloc.stop()


@dataclass(frozen=True)
class Figure:
    """A row with its numbers: medians for the two sides, and the ratio by medians and by minima."""

    row: Row
    meter: str
    theirs: float | None
    ours: float
    ratio: float | None
    ratio_of_minima: float | None
    note: str

    # Two runs of the same code differ by this much on a quiet machine; "no slower" cannot be asked more sharply.
    TOLERANCE = 0.03

    @property
    def verdict(self) -> str:
        ratio = self.ratio_of_minima if self.row.by_minima else self.ratio
        if self.row.required is None or ratio is None:
            return ""
        if self.row.is_growth:
            return "ok" if ratio <= self.row.required else "short"
        required = self.row.required * (1 - self.TOLERANCE) if self.row.required == 1.0 else self.row.required
        return "ok" if ratio >= required else "short"


def figures(experiment: Experiment, samples: dict[str, Samples]) -> list[Figure]:
    """The rows of the experiment, computed from its samples."""
    return [_figure(experiment, row, samples) for row in experiment.rows]


def _figure(experiment: Experiment, row: Row, samples: dict[str, Samples]) -> Figure:
    if row.ours_small is not None:
        theirs = _growth(samples.get(row.theirs), samples.get(row.theirs_small or ""), row.times_larger)
        ours = _growth(samples[row.ours], samples[row.ours_small], row.times_larger)
        assert ours is not None
        return Figure(row, "ratio", theirs[0] if theirs else None, ours[0], *ours, "")
    right, left = samples[row.ours], samples.get(row.theirs)
    if left is None:
        is_left_out = any(arm.label == row.theirs for arm in experiment.arms)
        return Figure(row, experiment.meter, None, right.median, None, None, "needs --full" if is_left_out else "")
    note = ""
    if left.count is not None and right.count is not None and left.count != right.count:
        note = f"work differs: {left.count} against {right.count}"
    ratios = left.median / right.median, left.minimum / right.minimum
    return Figure(row, experiment.meter, left.median, right.median, *ratios, note)


def _growth(large: Samples | None, small: Samples | None, times_larger: float) -> tuple[float, float] | None:
    """By medians and by minima."""
    if large is None or small is None:
        return None
    return large.median / small.median / times_larger, large.minimum / small.minimum / times_larger
