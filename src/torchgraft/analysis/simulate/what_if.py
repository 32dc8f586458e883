"""`what_if`: a program simulated at several batches, precisions and machines, as it is and with something changed, as one table.
What can be changed is in `changes.py`; one simulation is `simulate.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchgraft.analysis.memory.peak import MakeOptimizer
from torchgraft.analysis.simulate.changes import AS_IT_IS, Change, changes_of, quantized_steps
from torchgraft.analysis.simulate.machine import Machine
from torchgraft.analysis.simulate.plot import Panel, panels_svg, rate_text
from torchgraft.analysis.simulate.report import Simulation
from torchgraft.analysis.simulate.simulate import Recorder, dtype_of, known_mode, recorded
from torchgraft.codegen.calling import batch_of, example_inputs, of_batch
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError
from torchgraft.results.files import written
from torchgraft.results.progress import stage
from torchgraft.results.shown import Tabular
from torchgraft.results.tables import Table, amount, count, seconds_text

if TYPE_CHECKING:
    from torchgraft.quantize.schemes import Scheme

AnyMachine = str | PathLike[str] | Machine
Prices = float | Mapping[str, float]


@dataclass(frozen=True)
class WhatIfRow:
    """One simulation: `throughput` is examples a second, `times` how much quicker than the same as it is, `cost` the price of
    a million examples. Without a time, `note` says why there is none.
    """

    machine: str
    batch: int
    precision: str
    mode: str
    change: str
    seconds: float | None = None
    throughput: float | None = None
    times: float | None = None
    peak_bytes: int | None = None
    fits: bool = True
    bound: str = ""
    joules: float | None = None
    cost: float | None = None
    note: str = ""


@dataclass(frozen=True, repr=False)
class WhatIf(Tabular):
    """What `what_if` found: `results` has a row for each machine, batch, precision, mode and change.

    >>> import torch, torchgraft
    >>> found = torchgraft.what_if(torch.nn.Linear(64, 64), torch.empty(1, 64, device="meta"), batch=[1, 8], bandwidth=2)
    >>> [(row.batch, row.change) for row in found.results]
    [(1, 'as it is'), (1, 'bandwidth × 2'), (8, 'as it is'), (8, 'bandwidth × 2')]
    """

    name: str
    training: bool
    results: tuple[WhatIfRow, ...]

    def headline(self) -> str:
        return f"{self.name}, {'one training step' if self.training else 'one run'}: {count(len(self.results), 'case')}"

    @property
    def best(self) -> WhatIfRow:
        """The case with the highest throughput among those that fit into memory, or the cheapest where there is a price."""
        known = [row for row in self.results if row.seconds is not None]
        fitting = [row for row in known if row.fits] or known
        return max(fitting, key=lambda row: (-(row.cost or 0.0), row.throughput or 0.0))

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each case."""
        return [asdict(row) for row in self.results]

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "training": self.training, "rows": self.rows()}

    def _table(self) -> Table:
        columns = _shown_columns(self.results)
        cells = [tuple(_COLUMNS[name](row) for name in columns) for row in self.results]
        words = {"machine", "precision", "mode", "change", "bound by", "note"}
        marked = frozenset(number for number, row in enumerate(self.results) if row.note or not row.fits)
        return Table(self.headline(), columns, cells, frozenset(columns) - words, marked)

    def svg(self, path: str | PathLike[str] | None = None) -> str:
        """Latency, throughput, memory and cost over batches as an SVG, also written to `path` where one is given."""
        known = [row for row in self.results if row.seconds is not None]
        axes = [
            name for name in ("machine", "precision", "mode", "change") if len({getattr(r, name) for r in known}) > 1
        ]

        def series(name_of_value: str) -> dict[str, list[tuple[float, float]]]:
            found: dict[str, list[tuple[float, float]]] = {}
            for row in known:
                value = getattr(row, name_of_value)
                name = ", ".join(getattr(row, axis) for axis in axes or ["machine"])
                if value is not None:
                    found.setdefault(name, []).append((float(row.batch), float(value)))
            return {name: sorted(points) for name, points in found.items()}

        panels = [
            Panel("latency", series("seconds"), seconds_text),
            Panel("throughput, examples a second", series("throughput"), rate_text),
            Panel("memory at the peak", series("peak_bytes"), lambda value: amount(value, "B")),
        ]
        if any(row.cost is not None for row in known):
            panels.append(Panel("cost of a million examples", series("cost"), amount))
        return written(panels_svg(self.headline(), "batch", panels), path)

    def _repr_html_(self) -> str:
        return f"{self._table().html()}{self.svg()}"


def what_if(
    program: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    machine: AnyMachine | Sequence[AnyMachine] = "h200",
    batch: int | Sequence[int] | None = None,
    precision: str | Sequence[str] | None = None,
    mode: str | Sequence[str] = "eager",
    training: bool = False,
    optimizer: MakeOptimizer | None = None,
    bandwidth: float | None = None,
    compute: float | None = None,
    host: float | None = None,
    passes: Any = None,
    quantize: str | Scheme | None = None,
    price_per_hour: Prices | None = None,
) -> WhatIf:
    """A program simulated in many cases: machines, batches, precisions and modes, each as it is and with something changed.

    `machine`, `batch`, `precision` and `mode` take one or several. `bandwidth`, `compute` and `host` multiply how fast the
    machine's memory, arithmetic and host are; `passes` are run on the program; `quantize` is the name of a scheme ("static-int8",
    "weight-int4"), whose layers are taken to compute with integers. Of several changes each is tried alone, and then all
    together. `price_per_hour` is a number, or one for each machine by the name that was given.

    >>> import torch, torchgraft
    >>> found = what_if(torch.nn.ReLU(), torch.empty(1, 2**24, device="meta"), batch=[1, 16], mode="graph", bandwidth=2)
    >>> [(row.batch, row.bound, row.times > 1.5) for row in found.results if row.change != "as it is"]
    [(1, 'memory', True), (16, 'memory', True)]
    """
    values, keywords = example_inputs(args, kwargs)
    machines = {_machine_text(item): Machine.named(item) for item in _several(machine)}
    modes = [known_mode(item) for item in _several(mode)]
    changes = changes_of({"bandwidth": bandwidth, "compute": compute, "host": host}, passes, quantize)
    prices = _prices(price_per_hour, machines)
    cases = Cases(program, values, keywords, training or optimizer is not None, optimizer)
    sizes, precisions = _batches(batch, values, keywords), list(_several(precision))
    found: list[WhatIfRow] = []
    errors: list[GraftError] = []
    total = len(sizes) * len(precisions)
    for number, (size, chosen) in enumerate(itertools.product(sizes, precisions), 1):
        with stage(f"batch {size}, {chosen or 'as it is'}", number, total):
            for (name, where), how in itertools.product(machines.items(), modes):
                found += cases.rows(size, chosen, name, where, how, changes, prices.get(name), errors)
    if errors and all(row.seconds is None for row in found):
        raise errors[0]
    order = {name: place for place, name in enumerate(machines)}
    found.sort(key=lambda row: (order[row.machine], modes.index(row.mode)))
    title = getattr(program, "__name__", type(program).__name__)
    return WhatIf(title, cases.training, tuple(found))


@dataclass
class Cases:
    """The runs of one program: each batch, precision and change is run without data once, for all machines and modes."""

    program: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: bool
    optimizer: MakeOptimizer | None
    _runs: dict[Any, Recorder] = field(default_factory=dict)

    def rows(
        self,
        size: int,
        precision: str | None,
        name: str,
        machine: Machine,
        mode: str,
        changes: list[Change],
        price: float | None,
        errors: list[GraftError],
    ) -> list[WhatIfRow]:
        """One row for each change; a case that this machine cannot do has a note instead of a time, and is in `errors`."""
        found: list[WhatIfRow] = []
        before: float | None = None
        for change in changes:
            try:
                result = self.simulation(size, precision, machine, mode, change)
            except _Impossible as error:
                errors.append(error)
                reason = str(error).partition("\n")[0]
                found.append(WhatIfRow(name, size, precision or "", mode, change.name, note=reason))
                continue
            if change.name == AS_IT_IS:
                before = result.seconds
            found.append(_row(result, name, size, change, before, price))
        return found

    def simulation(self, size: int, precision: str | None, machine: Machine, mode: str, change: Change) -> Simulation:
        """One case."""
        try:
            dtype_of(precision, machine)
        except GraftError as error:
            raise _Impossible(str(error)) from error
        run = self._run(size, precision, machine, change)
        run.machine = change.on_machine(machine)
        if change.quantize is None:
            return run.simulation(mode, self.training)
        plain = run.steps
        try:
            run.steps, saved = quantized_steps(plain, change.quantize, machine)
            return run.simulation(mode, self.training).smaller_by(saved)
        except GraftError as error:
            raise _Impossible(str(error)) from error
        finally:
            run.steps = plain

    def _run(self, size: int, precision: str | None, machine: Machine, change: Change) -> Recorder:
        key = size, precision, machine.kind, None if change.passes is None else str(change.passes)
        if key not in self._runs:
            args, kwargs = self.args, self.kwargs
            if size != batch_of(args, kwargs):
                args, kwargs = of_batch(args, kwargs, size)
            options = (self.training, self.optimizer)

            def edited(captured: GraphModule) -> GraphModule:
                return change.on_program(captured, args, is_ours=captured is not self.program)

            self._runs[key] = recorded(self.program, args, kwargs, machine, precision, *options, edit=edited)
        return self._runs[key]


class _Impossible(GraftError):
    """A case that a machine cannot do, which is a note in the table."""


def _row(
    result: Simulation, name: str, size: int, change: Change, before: float | None, price: float | None
) -> WhatIfRow:
    bounds, seconds = result.bounds, result.seconds
    return WhatIfRow(
        machine=name,
        batch=size,
        precision=result.precision,
        mode=result.mode,
        change=change.name,
        seconds=seconds,
        throughput=size / seconds if seconds else None,
        times=before / seconds if before and seconds else None,
        peak_bytes=result.peak_bytes,
        fits=result.fits,
        bound=max(bounds, key=bounds.__getitem__),
        joules=result.joules,
        cost=None if price is None else price / 3600 * seconds / max(size, 1) * 1e6,
        note="" if result.fits else f"does not fit into {amount(result.machine.memory_bytes, 'B')}",
    )


# ---- what was asked for ----


def _several(value: Any) -> Iterable[Any]:
    several = list(value) if isinstance(value, (list, tuple, range, set)) else [value]
    if not several:
        raise GraftError(
            "there is nothing to simulate: one of machine, batch, precision and mode is empty\ngive at least one of each"
        )
    return several


def _machine_text(machine: AnyMachine) -> str:
    if isinstance(machine, Machine):
        return machine.name
    text = str(machine)
    return Path(text).stem if text.endswith(".toml") else text


def _batches(batch: int | Sequence[int] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    own = batch_of(args, kwargs)
    if batch is None:
        return [own or 1]
    if own is None:
        raise GraftError("the inputs have no batch to change: none is a tensor with a first dimension\nleave batch out")
    for size in _several(batch):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise GraftError(f"a batch is a whole number, 1 or more, not {size!r}")
    return list(_several(batch))


def _prices(given: Prices | None, machines: Mapping[str, Machine]) -> dict[str, float]:
    if given is None:
        return {}
    prices = dict(given) if isinstance(given, Mapping) else dict.fromkeys(machines, given)
    for name, price in prices.items():
        if name not in machines:
            raise GraftError(
                f"there is a price for {name!r}, which is not simulated\nname one of {', '.join(machines)}"
            )
        if isinstance(price, bool) or not isinstance(price, (int, float)) or not price >= 0:
            raise GraftError(f"the price of {name} is {price!r}\na price an hour is a number that is not negative")
    return prices


# ---- the table ----

_COLUMNS: dict[str, Any] = {
    "machine": lambda row: row.machine,
    "batch": lambda row: str(row.batch),
    "precision": lambda row: row.precision,
    "mode": lambda row: row.mode,
    "change": lambda row: row.change,
    "latency": lambda row: seconds_text(row.seconds),
    "times": lambda row: "-" if row.times is None else f"{row.times:.2f}",
    "examples/s": lambda row: "-" if row.throughput is None else rate_text(row.throughput),
    "memory": lambda row: amount(row.peak_bytes, "B"),
    "bound by": lambda row: row.bound,
    "energy": lambda row: "-" if row.joules is None else f"{row.joules:.3g} J",
    "cost of 1 M": lambda row: "-" if row.cost is None else f"{row.cost:.3g}",
    "note": lambda row: row.note,
}


def _shown_columns(rows: Sequence[WhatIfRow]) -> tuple[str, ...]:
    """All columns but those that say nothing here."""
    without = {
        "times": all(row.change == AS_IT_IS for row in rows),
        "change": all(row.change == AS_IT_IS for row in rows),
        "mode": len({row.mode for row in rows}) == 1,
        "energy": all(row.joules is None for row in rows),
        "cost of 1 M": all(row.cost is None for row in rows),
        "note": not any(row.note for row in rows),
    }
    return tuple(name for name in _COLUMNS if not without.get(name))
