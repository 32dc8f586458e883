"""The answer of a simulation: the time of each node and of the whole, what bounds it, memory over time; as data, text and HTML.
How the times are found is in `timing.py` and `clocks.py`.
"""

from __future__ import annotations

import html
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from typing import Any

from torchgraft.analysis.memory.report import Memory
from torchgraft.analysis.simulate.clocks import Ran
from torchgraft.analysis.simulate.machine import Machine
from torchgraft.analysis.simulate.profile import ProfileComparison, compared_with_profile
from torchgraft.analysis.simulate.timeline import chrome_trace
from torchgraft.results.files import written
from torchgraft.results.shown import Shown, entry_of
from torchgraft.results.tables import Table, amount, count, seconds_text

BOUNDS = ("compute", "memory", "launch", "host")


@dataclass(frozen=True)
class SimulatedKernel:
    """One kernel: when it starts (seconds from the start of the run), how long it runs, and what sets that time.

    `compute` and `memory` are the seconds that its arithmetic and its bytes would take alone; `live_bytes` is the memory in use.
    `call` counts the calls of operators, which may be several kernels each; `caller` is the operator that was called.
    """

    operator: str
    kind: str
    variant: str
    type: str
    node: str | None
    phase: str
    start: float
    seconds: float
    bound: str
    compute: float
    memory: float
    flops: int
    bytes: int
    issued: float
    host_seconds: float
    live_bytes: int = 0
    call: int = 0
    caller: str = ""


@dataclass(frozen=True)
class SimulatedNode:
    """One node: `seconds` is its share of the whole, `device_seconds` and `host_seconds` what it takes of each."""

    name: str
    op: str
    target: str
    module: str
    start: float
    seconds: float
    device_seconds: float
    host_seconds: float
    bound: str
    kernels: int
    flops: int
    bytes: int


@dataclass(frozen=True, repr=False)
class Simulation(Shown):
    """How long a program takes on a machine, and how much memory.

    `seconds` is the whole, `device_seconds` how long the device is at work, `host_seconds` how long Python and torch are.
    `joules` is None where the machine's data has no power. `unknown` has the operators that no formula is known for, which are
    bounded by their bytes, with their share of the time of all kernels.

    >>> import torch, torchgraft
    >>> result = torchgraft.simulate(torch.nn.Linear(1024, 1024), torch.empty(8, 1024, device="meta"), machine="h200")
    >>> len(result.kernels), result.kernels[0].kind, result.unknown
    (1, 'matmul', {})
    """

    name: str
    machine: Machine
    precision: str
    mode: str
    training: bool
    seconds: float
    device_seconds: float
    host_seconds: float
    peak_bytes: int
    joules: float | None
    nodes: tuple[SimulatedNode, ...]
    kernels: tuple[SimulatedKernel, ...]
    unknown: Mapping[str, float]
    memory: Memory = field(repr=False)
    workspace_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Whether the peak of memory is below what the machine has."""
        return self.peak_bytes <= self.machine.memory_bytes

    @property
    def bounds(self) -> dict[str, float]:
        """The seconds of all nodes by what bounds them."""
        sums = dict.fromkeys(BOUNDS, 0.0)
        for node in self.nodes:
            sums[node.bound] += node.seconds
        return sums

    @property
    def kinds(self) -> dict[str, float]:
        """The device's seconds by kind of kernel, the longest first."""
        sums: dict[str, float] = defaultdict(float)
        for kernel in self.kernels:
            sums[kernel.kind] += kernel.seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def smaller_by(self, saved: int) -> Simulation:
        """The same with so many bytes less at the peak, as where weights are kept in fewer bits."""
        return replace(self, peak_bytes=self.peak_bytes - saved)

    def __getitem__(self, node: Any) -> SimulatedNode:
        """The times of a node, given itself or by its name."""
        return entry_of(self.nodes, node, self.name)

    def rows(self, by: str = "node") -> list[dict[str, Any]]:
        """A row of plain values for each "node" or each "kernel"."""
        if by not in ("node", "kernel"):
            raise ValueError(f'rows are by "node" or by "kernel", not {by!r}')
        return [asdict(entry) for entry in (self.nodes if by == "node" else self.kernels)]

    def to_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "machine": self.machine.name,
            "bounds": self.bounds,
            "kinds": self.kinds,
            "unknown": dict(self.unknown),
            "nodes": self.rows("node"),
            "kernels": self.rows("kernel"),
            "memory": self.memory.to_dict(),
        }

    def to_chrome_trace(self, path: str | PathLike[str] | None = None) -> str:
        """The timeline as a trace that Perfetto and chrome://tracing open, in torch.profiler's form; also written to `path`."""
        return written(json.dumps(chrome_trace(self)), path)

    def compare_with_profile(self, trace: Any) -> ProfileComparison:
        """A profile of the same run beside this simulation, node by node, and where the two part.

        `trace` is a torch.profiler.profile object, or the path of what its `export_chrome_trace` wrote. Of a profile with
        steps the last one counts.
        """
        return compared_with_profile(self, trace)

    # ---- texts ----

    def headline(self) -> str:
        what = "training step" if self.training else "run"
        place = f"on {self.machine.name}, {self.precision}, {self.mode}"
        return (
            f"{self.name}, one {what} {place}: {seconds_text(self.seconds)}, {amount(self.peak_bytes, 'B')} at the peak"
        )

    def text(self, color: bool = False, most: int = 10) -> str:
        """The whole, what bounds it, the time by kind of kernel, and the nodes that take longest."""
        lines = [self.headline(), self._whole(), *self._remarks()]
        return "\n".join([*lines, "", self._kinds_table().text(color), "", self._nodes_table(most).text(color)])

    def _remarks(self) -> list[str]:
        """What a reader must not overlook."""
        lines = []
        if not self.fits:
            lines.append(f"does not fit: the machine has {amount(self.machine.memory_bytes, 'B')}")
        if self.unknown:
            lines.append("without a formula, bounded by their bytes (add one with @flop_formula):")
            lines += [f"  {name}: {share:.1%} of the device's time" for name, share in self.unknown.items()]
        return lines

    def _whole(self) -> str:
        whole = self.seconds or 1.0
        shares = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in self.bounds.items() if seconds > 0)
        parts = [f"device at work {seconds_text(self.device_seconds)}"]
        if self.host_seconds:
            parts.append(f"host {seconds_text(self.host_seconds)}")
        if self.joules is not None:
            parts.append(f"{self.joules:.3g} J")
        return f"{', '.join(parts)}; bound by {shares or 'nothing'}"

    def _kinds_table(self) -> Table:
        columns = ("kind", "kernels", "time", "share", "FLOP/s", "bytes/s")
        rows = []
        for kind, seconds in self.kinds.items():
            these = [kernel for kernel in self.kernels if kernel.kind == kind]
            rates = [sum(kernel.flops for kernel in these), sum(kernel.bytes for kernel in these)]
            texts = [amount(rate / seconds if seconds else 0.0) for rate in rates]
            share = f"{seconds / (self.device_seconds or 1.0):.1%}"
            rows.append((kind, str(len(these)), seconds_text(seconds), share, *texts))
        return Table("", columns, rows, frozenset(columns[1:]))

    def _nodes_table(self, most: int | None) -> Table:
        columns = ("node", "target", "time", "share", "bound by", "kernels", "FLOPs", "bytes")
        whole = self.seconds or 1.0
        longest = sorted(self.nodes, key=lambda node: -node.seconds)[:most]
        rows = [
            (
                *(node.name, node.target, seconds_text(node.seconds), f"{node.seconds / whole:.1%}", node.bound),
                *(str(node.kernels), amount(node.flops), amount(node.bytes, "B")),
            )
            for node in longest
            if node.seconds > 0
        ]
        return Table("", columns, rows, frozenset(columns) - {"node", "target", "bound by"})

    def _repr_html_(self) -> str:
        nodes = self._nodes_table(None).html()
        return "".join(
            [
                f"<b>{html.escape(self.headline())}</b>",
                *[f"<br>{html.escape(line)}" for line in (self._whole(), *self._remarks())],
                self._kinds_table().html(),
                f"<details><summary>{count(len(self.nodes), 'node')}</summary>{nodes}</details>",
            ]
        )


_PLAIN = (
    *("name", "precision", "mode", "training", "seconds", "device_seconds", "host_seconds"),
    *("peak_bytes", "workspace_bytes", "joules"),
)


# ---- from steps to nodes ----


def simulated_kernels(ran: Sequence[Ran], live: Sequence[int]) -> tuple[SimulatedKernel, ...]:
    """The kernels of a run, with the memory in use at each."""
    found = []
    call, caller = 0, ""
    for entry in ran:
        kernel, timing = entry.step.kernel, entry.timing
        if entry.step.operator:
            call, caller = call + 1, entry.step.operator
        if kernel is None or timing is None:
            continue
        in_use = live[entry.step.moment] if entry.step.moment < len(live) else 0
        found.append(
            SimulatedKernel(
                *(kernel.operator, kernel.kind, kernel.variant, kernel.type, entry.step.node, entry.step.phase),
                *(entry.start, timing.seconds, timing.bound, timing.compute, timing.memory),
                *(kernel.flops, kernel.bytes, entry.issued, entry.host, in_use),
                *(call, caller),
            )
        )
    return tuple(found)


def bound_of(ran: Sequence[Ran], seconds: float) -> str:
    """What takes most of the time of some steps: the device by one of its bounds, or the host that it waits for."""
    sums = dict.fromkeys(BOUNDS, 0.0)
    for entry in ran:
        if entry.timing is not None:
            sums[entry.timing.bound] += entry.timing.seconds
    sums["host"] = max(seconds - sum(sums.values()), 0.0)
    return max(sums, key=sums.__getitem__)
