"""Recording: what `record` gives back, the value of each recorded node by node or by name, and the forms it can be shown in.
How values come into it is in `record.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchgraft.ir.node import Node
from torchgraft.ir.structures import put_together
from torchgraft.recording.call_watch import TensorBrief, brief
from torchgraft.recording.selection import unknown_node
from torchgraft.recording.snapshots import Slot
from torchgraft.recording.statistics import Statistics
from torchgraft.recording.tensor_file import read_tensor
from torchgraft.results.shown import Tabular
from torchgraft.results.tables import Table, count, number_text


@dataclass(frozen=True)
class Stored:
    """A tensor in a file; `note` says what is different about it there."""

    path: Path
    key: str
    note: str

    def read(self) -> Any:
        return read_tensor(self.path, self.key)


class Entry(NamedTuple):
    """One value: its structure with slots where tensors were, what is kept of each tensor, and what each was."""

    template: Any
    parts: list[Any]
    keys: list[str]
    briefs: list[TensorBrief]

    @property
    def value(self) -> Any:
        """The value put together again; from a file, it is read now."""
        if not self.parts:  # a program may itself handle templates with slots, which are not ours to fill
            return self.template
        return put_together(self.template, *[_content(part) for part in self.parts])


def _content(part: Any) -> Any:
    return part.tensor if isinstance(part, Slot) else part.read() if isinstance(part, Stored) else part


class Values(Mapping[str, Any]):
    """Values by node or by name; `missing` says what happened to those that were asked for and are missing."""

    def __init__(self, nodes: dict[str, Node], missing: str) -> None:
        self.nodes = nodes
        self.missing = missing
        self.entries: dict[str, Entry] = {}

    def __getitem__(self, key: str | Node) -> Any:
        name = key.name if isinstance(key, Node) else key
        is_other = isinstance(key, Node) and self.nodes.get(name) not in (key, None)
        if name in self.entries and not is_other:
            return self.entries[name].value
        if name in self.nodes and not is_other:
            error = unknown_node(name, [])
            error.args = (f"there is no value for '{name}': {self.missing} this node",)
            raise error
        raise unknown_node(str(name), self.entries, "recorded were")

    def __contains__(self, key: object) -> bool:
        name = key.name if isinstance(key, Node) else key
        return name in self.entries and (not isinstance(key, Node) or self.nodes.get(key.name) is key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class Recording(Tabular, Values):
    """The values of the recorded nodes, by node or by name, in the order in which the program computed them.

    Tensors are detached, and stay what they were when the node had run. With `reduce` there are statistics in their place; with
    `to` they are read from `path` when asked for. `gradients` holds the gradients at the nodes in the same way, `result` is what
    the program returned, and None if it was stopped after the last node asked for (`complete` is False then).
    """

    def __init__(self, program: Any, nodes: list[Node], path: Path | None = None) -> None:
        super().__init__({node.name: node for node in nodes}, "the program stopped before")
        self.program = program
        self.path = path
        self.result: Any = None
        self.complete = False
        self.gradients = Values(self.nodes, "no gradient reached")

    def node(self, name: str) -> Node:
        """The recorded node of that name."""
        return self.nodes[name]

    def headline(self) -> str:
        where = f", in {self.path}" if self.path else ""
        return f"{count(len(self), 'node')} recorded{where}" + (
            "" if self.complete else ", the program was not run to its end"
        )

    # ---- other forms ----

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each recorded tensor, and for each node without one."""
        return [
            row
            for values in (self, self.gradients)
            for name, entry in values.entries.items()
            for row in _rows(self.node(name), entry, values is not self)
        ]

    def to_dict(self) -> dict[str, Any]:
        return {"file": None if self.path is None else str(self.path), "complete": self.complete, "nodes": self.rows()}

    def _table(self) -> Table:
        rows = self.rows()
        known = ("key", "node", "gradient", "op", "target", "shape", "dtype", "value", "note")
        measures = list(dict.fromkeys([name for row in rows for name in row if name not in known]))
        notes = ["note"] if any(row["note"] for row in rows) else []
        cells = [
            (
                f"gradient of {row['key']}" if row["gradient"] else row["key"],
                row["op"],
                row["target"],
                f"{row['dtype']}{row['shape']}" if row["dtype"] else row["value"],
                *[_cell(row.get(name)) for name in measures],
                *[row[name] for name in notes],
            )
            for row in rows
        ]
        columns = ("node", "op", "target", "value", *measures, *notes)
        return Table("", columns, cells, frozenset(measures), footer=self.headline())


def _rows(node: Node, entry: Entry, is_gradient: bool) -> Iterator[dict[str, Any]]:
    common = {
        "node": node.name,
        "op": node.op,
        "target": node._pretty_print_target(node.target),
        "gradient": is_gradient,
    }
    if not entry.parts:
        value = str(brief(entry.template))
        yield {"key": node.name, **common, "shape": None, "dtype": None, "value": value, "note": ""}
    for key, part, described in zip(entry.keys, entry.parts, entry.briefs, strict=True):
        measures: dict[str, Any] = {}
        if isinstance(part, Statistics):
            measures = {name: value for name, value in part.items() if name not in ("shape", "dtype")}
        elif not isinstance(part, (Slot, Stored)):
            measures = {"reduced": part}
        yield {
            "key": key,
            **common,
            "shape": None if described.shape is None else list(described.shape),
            "dtype": str(described.dtype).removeprefix("torch."),
            "value": str(described),
            "note": part.note if isinstance(part, Stored) else "",
            **measures,
        }


def _cell(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{len(value[0])} bins" if value and isinstance(value[0], list) else str(value)
    return number_text(value) if isinstance(value, (int, float)) or value is None else str(value)
