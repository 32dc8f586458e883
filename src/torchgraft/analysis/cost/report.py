"""The answer to what a program costs: numbers for each node, each module and the whole, as data, text and HTML.
How the numbers are found is in `count.py`.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_PREFIXES = ("", "k", "M", "G", "T", "P")


@dataclass(frozen=True)
class Work:
    """An amount of work. A multiply-add is one MAC and two FLOPs; FLOPs count all other arithmetic as well."""

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


@dataclass(frozen=True)
class Cost:
    """What a program costs. `unknown` names the operators that no formula is known for and the nodes that called them:
    their arithmetic is in no sum.
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
        wanted = getattr(node, "name", node)
        for entry in self.nodes:
            if entry.name == wanted:
                return entry
        raise KeyError(f"no node named {wanted!r} in {self.name}")

    def rows(self, by: str = "node") -> list[dict[str, Any]]:
        """A row of plain values for each "node" or each "module"."""
        if by not in ("node", "module"):
            raise ValueError(f'rows are by "node" or by "module", not {by!r}')
        entries: list[Any] = list(self.nodes if by == "node" else self.modules.values())
        return [_row(entry, by) for entry in entries]

    def to_json(self) -> str:
        """Everything as a JSON text."""
        data = {
            "name": self.name,
            "parameters": self.parameters,
            "forward": asdict(self.forward),
            "backward": asdict(self.backward),
            "unknown": {name: list(nodes) for name, nodes in self.unknown.items()},
            "modules": self.rows("module"),
            "nodes": self.rows("node"),
        }
        return json.dumps(data)

    def text(self, by: str = "module", depth: int = 2) -> str:
        """A table for people: the sums, then a line for each module down to `depth`, or for each node."""
        lines = [f"{self.name}: {len(self.nodes)} nodes, {self.parameters:,} parameters"]
        columns = ("", "FLOPs", "MACs", "read", "written", "FLOPs/byte")
        sums = [("forward", self.forward), ("backward", self.backward), ("total", self.total)]
        lines += table([columns, *[(name, *_work_cells(work)) for name, work in sums]])
        if self.unknown:
            lines += ["", "not counted, because no formula is known (add one with @flop_formula):"]
            lines += [f"  {name}: {len(nodes)} calls, in {_some(nodes)}" for name, nodes in self.unknown.items()]
        return "\n".join([*lines, "", *table(self._detail(by, depth))])

    def _detail(self, by: str, depth: int) -> list[tuple[str, ...]]:
        heading = ("module" if by == "module" else "node", "type" if by == "module" else "target")
        rows: list[tuple[str, ...]] = [(*heading, "parameters", "forward FLOPs", "backward FLOPs", "share")]
        whole = self.total.flops or 1
        entries: list[Any] = [*self.nodes] if by == "node" else list(self.modules.values())
        for entry in entries:
            if by == "module" and entry.path and entry.path.count(".") >= depth:
                continue
            names = (entry.path or "(all)", entry.type) if by == "module" else (entry.name, entry.target)
            work = (amount(entry.forward.flops), amount(entry.backward.flops))
            share = f"{(entry.forward.flops + entry.backward.flops) / whole:.1%}"
            rows.append((*names, f"{entry.parameters:,}", *work, share))
        return rows

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        sums = [("forward", self.forward), ("backward", self.backward), ("total", self.total)]
        parts = [f"<b>{html.escape(self.name)}</b>: {len(self.nodes)} nodes, {self.parameters:,} parameters"]
        head = ("", "FLOPs", "MACs", "read", "written", "FLOPs/byte")
        parts.append(html_table([head, *[(name, *_work_cells(work)) for name, work in sums]]))
        if self.unknown:
            parts.append(f"not counted: {html.escape(', '.join(self.unknown))}")
        parts.append(f"<details><summary>modules</summary>{html_table(self._detail('module', 99))}</details>")
        parts.append(f"<details><summary>nodes</summary>{html_table(self._detail('node', 99))}</details>")
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
    sizes = (amount(work.bytes_read) + "B", amount(work.bytes_written) + "B")
    return (amount(work.flops), amount(work.macs), *sizes, f"{work.intensity:.1f}")


def _some(names: tuple[str, ...], most: int = 3) -> str:
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:most]) + (f" and {len(distinct) - most} more" if len(distinct) > most else "")


def amount(number: float) -> str:
    """A number in three or four digits and a prefix: powers of 1000, for bytes too.

    >>> amount(8_178_000_000), amount(512)
    ('8.18 G', '512 ')
    """
    index = 0
    while abs(number) >= 1000 and index < len(_PREFIXES) - 1:
        number /= 1000
        index += 1
    return f"{number:.3g} {_PREFIXES[index]}" if index else f"{number:g} "


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as lines with aligned columns, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    is_number = [all(row[column][:1].isdigit() for row in rows[1:]) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = zip(row, widths, is_number, strict=True)
        lines.append("  ".join(cell.rjust(w) if right else cell.ljust(w) for cell, w, right in cells).rstrip())
    return lines


def html_table(rows: list[tuple[str, ...]]) -> str:
    """Rows as an HTML table, the first one its heading."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
