"""The answer of a simulation on several devices: the step, its bubble, each device, the timeline; as data, text, HTML, SVG.
How it comes about is in `parallel.py`.
"""

from __future__ import annotations

import html
import json
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any

from torchgraft.analysis.simulate.parallel.links import Bucket
from torchgraft.analysis.simulate.parallel.schedules import Done
from torchgraft.analysis.simulate.plot import picture_svg, rate_text
from torchgraft.analysis.simulate.timeline import named_event, span_event
from torchgraft.results.files import written
from torchgraft.results.shown import Shown
from torchgraft.results.tables import Table, amount, count, seconds_text


@dataclass(frozen=True)
class SimulatedDevice:
    """One device of one copy: `stages` are named by the module that each begins in.

    `bubble` is the share of the pipeline's time in which it has no work; `exposed_seconds` is how long it waits for all-reduces
    after its last backward; `in_flight` counts the micro-batches that one of its stages has begun and not ended, at most.
    """

    number: int
    machine: str
    stages: tuple[str, ...]
    busy_seconds: float
    bubble: float
    reduce_seconds: float
    exposed_seconds: float
    optimizer_seconds: float
    weight_bytes: int
    peak_bytes: int
    memory_bytes: int
    in_flight: int

    @property
    def fits(self) -> bool:
        """Whether the peak of memory is below what the device has."""
        return self.peak_bytes <= self.memory_bytes


@dataclass(frozen=True, repr=False)
class ParallelSimulation(Shown):
    """How long a step takes on several devices. `seconds` is the whole, `pipeline_seconds` without what comes after backward.

    `cuts` are the calls that stages after the first begin with: `split_module(program, None, found.stage_of)` makes them parts.
    `utilization` is the share of the devices' peak arithmetic that the step makes use of.

    >>> import torch, torchgraft
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
    >>> found = torchgraft.simulate(model, torch.empty(8, 512, device="meta"), machines=["h200"] * 2, microbatches=4)
    >>> found.cuts, found.training
    (('_2',), False)
    """

    name: str
    schedule: str
    microbatches: int
    chunks: int
    replicas: int
    links: tuple[str, ...]
    replica_link: str
    precision: str
    mode: str
    training: bool
    batch: int
    seconds: float
    pipeline_seconds: float
    bubble: float
    utilization: float | None
    devices: tuple[SimulatedDevice, ...]
    cuts: tuple[str, ...]
    tasks: tuple[Done, ...] = field(repr=False)
    buckets: tuple[tuple[Bucket, ...], ...] = field(repr=False)

    @property
    def fits(self) -> bool:
        """Whether every device has memory enough."""
        return all(device.fits for device in self.devices)

    @property
    def throughput(self) -> float:
        """Examples a second, of all copies together."""
        return self.batch / self.seconds if self.seconds else 0.0

    @property
    def peak_bytes(self) -> int:
        """The memory of the device that needs most."""
        return max(device.peak_bytes for device in self.devices)

    def stage_of(self, node: Any) -> int:
        """The number of the stage that a node of the program is in, for `split_module`."""
        graph = getattr(node, "graph", None)
        if graph is None:
            raise TypeError(f"expected a node of the program, got {node!r}")
        known = self.__dict__.get("_stages")
        if known is None or known[0] is not graph:
            stage, found = 0, {}
            for entry in graph.nodes:
                stage += entry.name in self.cuts
                found[entry.name] = stage
            known = self.__dict__["_stages"] = graph, found  # asked once for every node of a program
        return int(known[1][node.name])

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each device."""
        return [{**asdict(device), "fits": device.fits} for device in self.devices]

    def to_dict(self) -> dict[str, Any]:
        names = [*_PLAIN, "throughput", "peak_bytes", "fits"]
        return {**{name: getattr(self, name) for name in names}, "devices": self.rows(), "tasks": self._task_rows()}

    def _task_rows(self) -> list[dict[str, Any]]:
        return [
            {**task._asdict(), "device": device, "start": start, "end": end} for task, device, start, end in self.tasks
        ]

    # ---- texts ----

    def headline(self) -> str:
        what = "training step" if self.training else "run"
        place = count(len(self.devices) * self.replicas, "device")
        if self.replicas > 1:
            place = f"{place} ({count(self.replicas, 'copy', 'copies')} on {len(self.devices)} each)"
        return f"{self.name}, one {what} of {count(self.batch, 'example')} on {place}: {seconds_text(self.seconds)}"

    def text(self, color: bool = False) -> str:
        """The step, and a row for each device."""
        joined = [f"links {', '.join(self.links)}"] if self.links else []
        joined += [f"copies over {self.replica_link}"] if self.replica_link else []
        steps = f"{self.schedule}, {count(self.microbatches, 'micro-batch', 'micro-batches')}"
        how = [steps, self.precision, self.mode, *joined]
        rates = [f"bubble {self.bubble:.1%}", f"{rate_text(self.throughput)} examples/s"]
        if self.utilization is not None:
            rates.append(f"{self.utilization:.1%} of peak FLOP/s")
        lines = [self.headline(), "; ".join(how), ", ".join(rates)]
        lines += [] if self.fits else ["does not fit: devices in the table need more memory than they have"]
        return "\n".join([*lines, "", self._table().text(color)])

    def _table(self) -> Table:
        columns = (
            *("device", "machine", "from", "work", "bubble", "all-reduce", "waits", "update"),
            *("weights", "peak", "of", "in flight"),
        )
        rows = [
            (
                *(str(device.number), device.machine, ", ".join(device.stages), seconds_text(device.busy_seconds)),
                *(f"{device.bubble:.1%}", _time(device.reduce_seconds), _time(device.exposed_seconds)),
                *(_time(device.optimizer_seconds), amount(device.weight_bytes, "B"), amount(device.peak_bytes, "B")),
                *(amount(device.memory_bytes, "B"), str(device.in_flight)),
            )
            for device in self.devices
        ]
        marked = frozenset(place for place, device in enumerate(self.devices) if not device.fits)
        return Table("", columns, rows, frozenset(columns) - {"machine", "from"}, marked)

    def _repr_html_(self) -> str:
        lines = self.text().partition("\n\n")[0].splitlines()
        return (
            f"<b>{html.escape(lines[0])}</b><br>{html.escape('; '.join(lines[1:]))}{self._table().html()}{self.svg()}"
        )

    # ---- the timeline ----

    def to_chrome_trace(self, path: str | PathLike[str] | None = None) -> str:
        """The step of one copy as a trace that Perfetto opens, a process for each device; also written to `path`."""
        events: list[dict[str, Any]] = []
        for device in self.devices:
            events.append(named_event("process_name", device.number, f"{device.machine} {device.number}", 0))
            events.append(named_event("thread_name", device.number, "compute", 1))
            events.append(named_event("thread_name", device.number, "all-reduce", 2))
        for task, number, start, end in self.tasks:
            name = f"{'backward' if task.backward else 'forward'} {task.microbatch}"
            args = {"stage": task.stage, "microbatch": task.microbatch}
            events.append(span_event(name, "backward" if task.backward else "forward", number, 1, start, end, args))
        for number, buckets in enumerate(self.buckets):
            events += [
                span_event("all-reduce", "communication", number, 2, b.start, b.end, {"bytes": b.size}) for b in buckets
            ]
        for device in self.devices:
            if device.optimizer_seconds:
                start = max([entry.end for entry in self.tasks if entry.device == device.number], default=0.0)
                start += device.exposed_seconds
                events.append(
                    span_event("update", "optimizer", device.number, 1, start, start + device.optimizer_seconds, {})
                )
        trace = {"schemaVersion": 1, "displayTimeUnit": "ms", "traceName": self.headline(), "traceEvents": events}
        return written(json.dumps(trace), path)

    def svg(self, path: str | PathLike[str] | None = None) -> str:
        """The step of one copy as bars, a line for each device, also written to `path` where one is given."""
        scale = (_WIDTH - _LEFT - 12) / (self.seconds or 1.0)
        parts: list[str] = []

        def bar(device: int, start: float, end: float, colour: str, title: str, inset: int = 0) -> None:
            x, width, y = _LEFT + start * scale, max((end - start) * scale - 0.5, 0.5), 40 + device * _LINE + inset
            tip = f"<title>{html.escape(title)}: {seconds_text(end - start)}</title>"
            height = _LINE - 4 - 2 * inset
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}">{tip}</rect>'
            )

        for device in self.devices:
            y = 40 + device.number * _LINE + 14
            parts.append(
                f'<text x="{_LEFT - 8}" y="{y}" text-anchor="end" fill="#64748b">device {device.number}</text>'
            )
        for task, number, start, end in self.tasks:
            shade = _SHADES[task.backward][task.stage // len(self.devices) % 2]
            bar(number, start, end, shade, f"{'backward' if task.backward else 'forward'} of {task.microbatch}")
        for number, buckets in enumerate(self.buckets):
            for bucket in buckets:
                bar(number, bucket.start, bucket.end, "#d9a441", f"all-reduce of {amount(bucket.size, 'B')}", inset=6)
        height = 40 + len(self.devices) * _LINE + 30
        parts.append(_legend(height - 12))
        return written(picture_svg(self.headline(), _WIDTH, height, parts), path)


_PLAIN = (
    *("name", "schedule", "microbatches", "chunks", "replicas", "links", "replica_link", "precision", "mode"),
    *("training", "batch", "seconds", "pipeline_seconds", "bubble", "utilization", "cuts"),
)
_WIDTH, _LEFT, _LINE = 900, 80, 24
_SHADES = (("#3d6fb4", "#8fb0dc"), ("#4f8f6b", "#9cc7ad"))


def _legend(y: int) -> str:
    found, x = [], _LEFT
    for name, colour in (("forward", _SHADES[0][0]), ("backward", _SHADES[1][0]), ("all-reduce", "#d9a441")):
        found.append(
            f'<rect x="{x}" y="{y - 9}" width="12" height="9" fill="{colour}"/><text x="{x + 18}" y="{y}">{name}</text>'
        )
        x += 110
    return "".join(found)


def _time(seconds: float) -> str:
    return seconds_text(seconds) if seconds else "-"
