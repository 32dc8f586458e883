"""The answer to what a program costs: numbers for each node, each module and the whole, as data, text and HTML.
How the numbers are found is in `count.py`.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchgraft.results.shown import Shown, entry_of
from torchgraft.results.tables import Table, amount, count, listed


@dataclass(frozen=True)
class Work:
    """An amount of work. A multiply-add is one MAC and two FLOPs; FLOPs count all other arithmetic as well.

    >>> work = Work(flops=200, macs=100, bytes_read=30, bytes_written=10)
    >>> work.intensity
    5.0
    """

    flops: int = 0
    macs: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.macs + other.macs,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
        )

    @property
    def intensity(self) -> float:
        """FLOPs for each byte moved: low means that memory, not arithmetic, sets the time."""
        moved = self.bytes_read + self.bytes_written
        return self.flops / moved if moved else 0.0


@dataclass(frozen=True)
class NodeCost:
    """What one node costs; `operators` holds the work of each operator that ran for it, forward and backward."""

    name: str
    op: str
    target: str
    module: str
    shape: Any
    parameters: int
    forward: Work
    backward: Work
    operators: Mapping[str, tuple[Work, Work]] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModuleCost:
    """What everything under one module path costs; the whole program has the path ""."""

    path: str
    type: str
    parameters: int
    forward: Work
    backward: Work
    nodes: int


@dataclass(frozen=True, repr=False)
class Cost(Shown):
    """What a program costs. `unknown` names the operators that no formula is known for and the nodes that called them:
    their arithmetic is in no sum.

    >>> import torch, torchgraft
    >>> cost = torchgraft.cost(torch.nn.Linear(4, 2), torch.empty(3, 4, device="meta"))
    >>> cost.forward.macs, cost.total.flops, cost.unknown
    (24, 102, {})
    """

    name: str
    nodes: tuple[NodeCost, ...]
    modules: Mapping[str, ModuleCost]
    parameters: int
    forward: Work
    backward: Work
    unknown: Mapping[str, tuple[str, ...]]

    @property
    def total(self) -> Work:
        """Forward and backward together."""
        return self.forward + self.backward

    @property
    def operators(self) -> dict[str, tuple[Work, Work]]:
        """The work of each operator of torch, forward and backward."""
        result: dict[str, tuple[Work, Work]] = {}
        for node in self.nodes:
            for name, (forward, backward) in node.operators.items():
                before = result.get(name, (Work(), Work()))
                result[name] = before[0] + forward, before[1] + backward
        return result

    def __getitem__(self, node: Any) -> NodeCost:
        """The cost of a node, given itself or by its name."""
        return entry_of(self.nodes, node, self.name)

    def rows(self, by: str = "node") -> list[dict[str, Any]]:
        """A row of plain values for each "node" or each "module"."""
        if by not in ("node", "module"):
            raise ValueError(f'rows are by "node" or by "module", not {by!r}')
        entries: list[Any] = list(self.nodes if by == "node" else self.modules.values())
        return [_row(entry, by) for entry in entries]

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "parameters": self.parameters,
            "forward": asdict(self.forward),
            "backward": asdict(self.backward),
            "unknown": {name: list(nodes) for name, nodes in self.unknown.items()},
            "modules": self.rows("module"),
            "nodes": self.rows("node"),
        }

    def headline(self) -> str:
        sums = f"{amount(self.forward.flops, 'FLOPs')} forward, {amount(self.backward.flops, 'FLOPs')} backward"
        return f"{self.name}, {count(len(self.nodes), 'node')}, {count(self.parameters, 'parameter')}, {sums}"

    def text(self, color: bool = False, by: str = "module", depth: int = 2) -> str:
        """A table for people: the sums, then a line for each module down to `depth`, or for each node."""
        lines = [f"{self.name}: {count(len(self.nodes), 'node')}, {count(self.parameters, 'parameter')}"]
        lines.append(self._sums().text(color))
        if self.unknown:
            lines += ["", "not counted, because no formula is known (add one with @flop_formula):"]
            lines += [
                f"  {name}: {count(len(nodes), 'call')}, in {listed(list(dict.fromkeys(nodes)), 3)}"
                for name, nodes in self.unknown.items()
            ]
        return "\n".join([*lines, "", self._detail(by, depth).text(color)])

    def _sums(self) -> Table:
        sums = [("forward", self.forward), ("backward", self.backward), ("total", self.total)]
        columns = ("FLOPs", "MACs", "read", "written", "FLOPs/byte")
        return Table("", ("", *columns), [(name, *_work_cells(work)) for name, work in sums], frozenset(columns))

    def _detail(self, by: str, depth: int) -> Table:
        heading = ("module", "type") if by == "module" else ("node", "target")
        columns = ("parameters", "forward FLOPs", "backward FLOPs", "share")
        rows: list[tuple[str, ...]] = []
        whole = self.total.flops or 1
        entries: list[Any] = [*self.nodes] if by == "node" else list(self.modules.values())
        for entry in entries:
            if by == "module" and entry.path and entry.path.count(".") >= depth:
                continue
            names = (entry.path or "(all)", entry.type) if by == "module" else (entry.name, entry.target)
            work = (amount(entry.forward.flops), amount(entry.backward.flops))
            share = f"{(entry.forward.flops + entry.backward.flops) / whole:.1%}"
            rows.append((*names, f"{entry.parameters:,}", *work, share))
        return Table("", (*heading, *columns), rows, frozenset(columns))

    def _repr_html_(self) -> str:
        parts = [
            f"<b>{html.escape(self.name)}</b>: {count(len(self.nodes), 'node')}, {count(self.parameters, 'parameter')}"
        ]
        parts.append(self._sums().html())
        if self.unknown:
            parts.append(f"not counted: {html.escape(', '.join(self.unknown))}")
        parts.append(f"<details><summary>modules</summary>{self._detail('module', 99).html()}</details>")
        parts.append(f"<details><summary>nodes</summary>{self._detail('node', 99).html()}</details>")
        return "<br>".join(parts)


def _row(entry: Any, by: str) -> dict[str, Any]:
    row: dict[str, Any] = {"path": entry.path, "type": entry.type, "nodes": entry.nodes} if by == "module" else {}
    if by == "node":
        row = {"name": entry.name, "op": entry.op, "target": entry.target, "module": entry.module}
        row |= {"shape": entry.shape, "unknown": list(entry.unknown)}
    row["parameters"] = entry.parameters
    for phase, work in (("forward", entry.forward), ("backward", entry.backward)):
        row |= {f"{phase}_{name}": value for name, value in asdict(work).items()}
    return row


def _work_cells(work: Work) -> tuple[str, ...]:
    sizes = (amount(work.bytes_read, "B"), amount(work.bytes_written, "B"))
    return (amount(work.flops), amount(work.macs), *sizes, f"{work.intensity:.1f}")
