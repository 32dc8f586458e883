"""A profile that torch.profiler took, lined up with a simulation operator by operator, and where the two part.
How a simulation is written as a trace is in `timeline.py`.
"""

from __future__ import annotations

import gzip
import itertools
import json
import tempfile
import weakref
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchgraft.analysis.simulate.timeline import operator_text
from torchgraft.errors import GraftError
from torchgraft.results.shown import Tabular
from torchgraft.results.tables import Table, count, seconds_text

if TYPE_CHECKING:
    from torchgraft.analysis.simulate.report import Simulation

DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_MAKERS = ("native_", "cudnn_", "mkldnn_", "miopen_", "thnn_", "safe_", "_")
_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention")


@dataclass(frozen=True)
class ComparedNode:
    """The operators of a node in the simulation and in the profile; None where the other has nothing that matches."""

    node: str
    operators: tuple[str, ...]
    simulated: float | None
    measured: float | None

    @property
    def difference(self) -> float:
        """How much longer it took than simulated."""
        return (self.measured or 0.0) - (self.simulated or 0.0)


@dataclass(frozen=True, repr=False)
class ProfileComparison(Tabular):
    """A profile beside a simulation: `nodes` in the order of the run, `matched` of `simulated_operators` found in the profile.

    >>> import torch, torchgraft
    >>> model, x = torch.nn.Linear(8, 8), torch.ones(2, 8)
    >>> with torch.profiler.profile() as profile, torch.no_grad():
    ...     _ = model(x)
    >>> found = torchgraft.simulate(model, x).compare_with_profile(profile)
    >>> found.matched, found.simulated_operators, found.nodes[0].operators
    (1, 1, ('aten::addmm',))
    """

    name: str
    machine: str
    nodes: tuple[ComparedNode, ...]
    matched: int
    simulated_operators: int
    on_device: bool

    @property
    def simulated(self) -> float:
        """The seconds of all operators in the simulation."""
        return sum(node.simulated or 0.0 for node in self.nodes)

    @property
    def measured(self) -> float:
        """The seconds of all operators in the profile."""
        return sum(node.measured or 0.0 for node in self.nodes)

    @property
    def parted(self) -> tuple[ComparedNode, ...]:
        """The nodes by how far the two are apart, the farthest first."""
        return tuple(sorted(self.nodes, key=lambda node: -abs(node.difference)))

    def headline(self) -> str:
        where = "on the device" if self.on_device else "in operators"
        both = f"measured {seconds_text(self.measured)} {where}, simulated {seconds_text(self.simulated)} on {self.machine}"
        return f"{self.name}: {both}; {self.matched} of {count(self.simulated_operators, 'operator')} matched"

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each node, in the order of the run."""
        return [{**asdict(node), "difference": node.difference} for node in self.nodes]

    def to_dict(self) -> dict[str, Any]:
        sums = {"simulated": self.simulated, "measured": self.measured}
        matched = {"matched": self.matched, "simulated_operators": self.simulated_operators}
        return {"name": self.name, "machine": self.machine, **sums, **matched, "rows": self.rows()}

    def _table(self) -> Table:
        columns = ("node", "operators", "simulated", "measured", "times", "share of the difference")
        whole = sum(abs(node.difference) for node in self.nodes) or 1.0
        rows = [
            (
                *(node.node, ", ".join(node.operators), seconds_text(node.simulated), seconds_text(node.measured)),
                f"{node.measured / node.simulated:.2f}" if node.measured and node.simulated else "-",
                f"{abs(node.difference) / whole:.0%}",
            )
            for node in self.parted
        ]
        marked = frozenset(place for place, node in enumerate(self.parted) if None in (node.simulated, node.measured))
        return Table(self.headline(), columns, rows, frozenset(columns[2:]), marked)


def compared_with_profile(simulation: Simulation, trace: Any) -> ProfileComparison:
    """Line up a profile with a simulation of the same run by the order of operators."""
    events = _last_step(events_of(trace))
    planned = _planned(simulation, bool(_kernels(events)))
    known = {call.name for call in planned}
    measured, on_device = _measured(events, known)
    if not measured:
        raise GraftError(
            "the profile has none of the operators that were simulated\n"
            "profile one run of the same model, with ProfilerActivity.CPU among the activities"
        )
    pairs = list(aligned_pairs([call.name for call in planned], [call.name for call in measured]))
    nodes = _by_node(planned, measured, pairs)
    matched = sum(1 for left, right in pairs if left is not None and right is not None)
    return ProfileComparison(simulation.name, simulation.machine.name, nodes, matched, len(planned), on_device)


class Planned(NamedTuple):
    """A call of an operator in a simulation: its name in both lists, its name as profiles have it, its node and its seconds."""

    name: str
    title: str
    node: str
    seconds: float


def _planned(simulation: Simulation, on_device: bool) -> list[Planned]:
    """The calls of a simulation, each with all of its kernels."""
    whole_operator = not on_device and simulation.machine.kind == "cpu"
    found: list[Planned] = []
    for _, group in itertools.groupby(simulation.kernels, key=lambda kernel: kernel.call):
        kernels = list(group)
        first = kernels[0]
        node = first.node or "(between nodes)"
        seconds = sum(kernel.seconds + (kernel.host_seconds if whole_operator else 0.0) for kernel in kernels)
        title = operator_text(first.caller)
        where = node if first.phase == "forward" else f"{node} ({first.phase})"
        found.append(Planned(canonical(title), title, where, seconds))
    return found


def _by_node(
    planned: Sequence[Planned], measured: Sequence[Measured], pairs: Sequence[tuple[int | None, int | None]]
) -> tuple[ComparedNode, ...]:
    """What belongs to one node in one phase as one row; what only the profile has in a row of its own."""
    found: dict[str, list[Any]] = {}
    for left, right in pairs:
        call = None if left is None else planned[left]
        operator = call.title if call is not None else measured[right or 0].title
        entry = found.setdefault("(not simulated)" if call is None else call.node, [[], None, None])
        entry[0].append(operator)
        entry[1] = entry[1] if call is None else (entry[1] or 0.0) + call.seconds
        entry[2] = entry[2] if right is None else (entry[2] or 0.0) + measured[right].seconds
    return tuple(
        ComparedNode(name, tuple(dict.fromkeys(operators)), expected, took)
        for name, (operators, expected, took) in found.items()
    )


# ---- reading profiles ----


class Measured(NamedTuple):
    """An operator of a profile: its name in both lists, its name there, and its seconds."""

    name: str
    title: str
    seconds: float


def events_of(trace: Any) -> list[dict[str, Any]]:
    """The events of a profile: a torch.profiler object, the path of an exported trace (.json or .json.gz), or its content."""
    if hasattr(trace, "export_chrome_trace"):
        results = getattr(trace, "profiler", None) or trace  # another one for each cycle of a schedule
        if results not in _written:  # torch writes a profile once
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                try:
                    trace.export_chrome_trace(str(path))
                except RuntimeError as error:
                    raise GraftError(
                        f"cannot write the profile: {error}\ngive the file that it was written to"
                    ) from error
                _written[results] = events_of(path)
        return _written[results]
    if isinstance(trace, (str, PathLike)):
        try:
            content = Path(trace).read_bytes()
            trace = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
        except OSError as error:
            raise GraftError(f"cannot read the profile '{trace}': {error.strerror or error}") from error
        except ValueError as error:
            raise GraftError(f"the profile '{trace}' is no JSON: {error}\n{_ADVICE}") from None
    events = trace.get("traceEvents") if isinstance(trace, Mapping) else trace
    if not isinstance(events, list) or not all(isinstance(event, Mapping) for event in events):
        raise GraftError(f"this is no profile: it has no list of events\n{_ADVICE}")
    return list(events)


_written: weakref.WeakKeyDictionary[Any, list[dict[str, Any]]] = weakref.WeakKeyDictionary()
_ADVICE = "give a torch.profiler.profile object, or the file that its export_chrome_trace() wrote"


def _last_step(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What happened in the last step that the profiler was told of; all where it was told of none."""
    steps = [event for event in events if str(event.get("name", "")).startswith("ProfilerStep#") and "dur" in event]
    steps = [event for event in steps if event.get("cat") == "user_annotation"] or steps
    if not steps:
        return events
    last = max(steps, key=lambda event: float(event["ts"]))
    start, end = float(last["ts"]), float(last["ts"]) + float(last["dur"])
    # Kernels run after the step that issued them: which are its own is told by what issued them.
    return [event for event in events if event.get("cat") in DEVICE_KINDS or start <= float(event.get("ts", -1)) < end]


def _measured(events: list[dict[str, Any]], known: set[str]) -> tuple[list[Measured], bool]:
    """The operators of a profile that a simulation knows, in order, those inside of others left out; and whether on a device."""
    kernels = _kernels(events)
    found = []
    ends: dict[Any, float] = {}
    operators = [event for event in events if event.get("cat") == "cpu_op" and event.get("ph") == "X"]
    launches = sorted(
        (float(event["ts"]), float(kernels[_correlation(event)]["dur"]))
        for event in events
        if event.get("cat") == "cuda_runtime" and _correlation(event) in kernels
    )
    if kernels and not launches:  # as a simulation writes it: an operator and its kernel have the same number
        return _measured_by_number(operators, kernels, known), True
    for event in sorted(operators, key=lambda event: (float(event["ts"]), -float(event["dur"]))):
        start, end, thread = float(event["ts"]), float(event["ts"]) + float(event["dur"]), event.get("tid")
        name = canonical(str(event["name"]))
        if name not in known or start < ends.get(thread, float("-inf")):
            continue
        ends[thread] = end
        seconds = float(event["dur"])
        if launches:
            inside = launches[bisect_left(launches, (start, 0.0)) : bisect_left(launches, (end, 0.0))]
            seconds = sum(duration for _, duration in inside)
        found.append(Measured(name, str(event["name"]), seconds / 1e6))
    return found, bool(launches)


def _kernels(events: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """What ran on a device, by the number that its launch has too."""
    return {_correlation(event): event for event in events if event.get("cat") in DEVICE_KINDS and "dur" in event}


def _measured_by_number(
    operators: list[dict[str, Any]], kernels: Mapping[Any, dict[str, Any]], known: set[str]
) -> list[Measured]:
    seconds: dict[Any, float] = {}
    for kernel in kernels.values():
        number = _external(kernel)
        seconds[number] = seconds.get(number, 0.0) + float(kernel["dur"]) / 1e6
    named = [(event, canonical(str(event["name"]))) for event in operators]
    return [Measured(name, str(event["name"]), seconds[_external(event)]) for event, name in named if name in known]


def _external(event: Mapping[str, Any]) -> Any:
    return (event.get("args") or {}).get("External id")


def _correlation(event: Mapping[str, Any]) -> Any:
    return (event.get("args") or {}).get("correlation")


def canonical(name: str) -> str:
    """The name of an operator without what differs from device to device.

    >>> [canonical(name) for name in ("aten::_softmax", "aten::native_layer_norm", "aten::cudnn_batch_norm", "aten::relu_")]
    ['softmax', 'layer_norm', 'batch_norm', 'relu']
    """
    short = name.rpartition("::")[2].removesuffix("_")
    backward = "_backward" if "backward" in short else ""
    if "batch_norm" in short:
        return f"batch_norm{backward}"
    if any(word in short for word in _ATTENTION):
        return f"attention{backward}"
    while maker := next((maker for maker in _MAKERS if short.startswith(maker)), None):
        short = short.removeprefix(maker)
    return short.replace("_with_indices", "")


# ---- two lists ----


def aligned_pairs(first: Sequence[str], second: Sequence[str]) -> Iterator[tuple[int | None, int | None]]:
    """Places of two lists that belong together, in order: the longest stretch in which they agree, then those beside it.

    >>> list(aligned_pairs("abcd", "abd"))
    [(0, 0), (1, 1), (2, None), (3, 2)]
    """
    left = right = 0
    for block in SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks():
        yield from ((place, None) for place in range(left, block.a))
        yield from ((None, place) for place in range(right, block.b))
        left, right = block.a + block.size, block.b + block.size
        yield from zip(range(block.a, left), range(block.b, right), strict=True)
