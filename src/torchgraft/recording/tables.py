"""What a result of this room looks like: one table, as plain text, as a rich table on a terminal, as HTML, JSON or rows.
What is in the table is decided by the result itself; files are written by `files.py`.
"""

from __future__ import annotations

import html
import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, TextIO

from torchgraft.recording.files import write_text

_WIDEST_CELL = 64
_MOST_ROWS = 400


@dataclass(frozen=True)
class Table:
    """Texts in columns; `numbers` are the columns that stand to the right, `marked` the rows to look at first."""

    title: str
    columns: tuple[str, ...]
    cells: list[tuple[str, ...]]
    numbers: frozenset[str] = frozenset()
    marked: frozenset[int] = frozenset()
    footer: str = ""

    def text(self) -> str:
        """Aligned columns without any colour."""
        cells = [tuple(map(_cut, row)) for row in self.cells]
        widths = [max(map(len, column)) for column in zip(self.columns, *cells, strict=True)]
        sides = [str.rjust if name in self.numbers else str.ljust for name in self.columns]
        lines = [
            "  ".join([side(text, width) for side, text, width in zip(sides, row, widths, strict=True)]).rstrip()
            for row in [self.columns, *cells]
        ]
        return "\n".join([*filter(None, [self.title]), *lines, *filter(None, [self.footer])])

    def html(self) -> str:
        """A table without scripts or outside styles; a very long one is cut, and says so."""
        shown = self.cells[:_MOST_ROWS]
        rows = [_html_row(self.columns, "th", self._align, False)]
        rows += [_html_row(row, "td", self._align, index in self.marked) for index, row in enumerate(shown)]
        more = len(self.cells) - len(shown)
        footer = [self.footer, f"… and {more} more rows" if more else ""]
        paragraphs = [f"<p>{html.escape(line)}</p>" for text in footer for line in text.splitlines()]
        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}{''.join(rows)}</table>{''.join(paragraphs)}"

    def _align(self, position: int) -> str:
        return "right" if self.columns[position] in self.numbers else "left"

    def rich(self) -> Any:
        """The same for rich's console."""
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=self.title or None, title_justify="left", header_style="bold")
        for name in self.columns:
            table.add_column(name, justify="right" if name in self.numbers else "left", overflow="fold")
        for index, row in enumerate(self.cells):
            table.add_row(*[Text(_cut(text)) for text in row], style="bold red" if index in self.marked else None)
        return Group(table, Text(self.footer)) if self.footer else table


class Tabular(ABC):
    """A result that can be printed, shown in a notebook, written as JSON and handed to pandas as rows.

    `print(result)` is plain text; `result.show()` and rich's own `print` use colours on a terminal.
    """

    @abstractmethod
    def _table(self) -> Table:
        """The texts to show."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """One dict of plain values for each row: `pandas.DataFrame(result.rows())`."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {"rows": self.rows()}

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """The result as JSON text, also written to `path` where one is given. What JSON has no number for is a string."""
        text = json.dumps(plain(self.to_dict()), indent=1)
        if path is not None:
            write_text(path, text + "\n")
        return text

    def show(self, file: TextIO | None = None) -> None:
        """Print to `file` (standard output): a coloured table on a terminal that rich can draw on, plain text elsewhere."""
        stream = sys.stdout if file is None else file
        if stream.isatty():
            try:
                from rich.console import Console
            except ImportError:
                pass
            else:
                Console(file=stream).print(self)
                return
        stream.write(f"{self}\n")

    def __str__(self) -> str:
        return self._table().text()

    def __rich__(self) -> Any:
        return self._table().rich()

    def _repr_html_(self) -> str:
        return self._table().html()


def plain(value: Any) -> Any:
    """Only what JSON knows: not-a-number and infinities become "nan", "inf" and "-inf", other objects their repr.

    >>> plain({"a": (1, float("inf")), 2: {3}})
    {'a': [1, 'inf'], '2': '{3}'}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or type(value) in (bool, int, float, str) else repr(value)


def number_text(value: float | None) -> str:
    """A number in few characters; nothing for None.

    >>> [number_text(item) for item in (None, 0.0, 12.34567, 1e-9, float("nan"))]
    ['', '0', '12.35', '1e-09', 'nan']
    """
    return "" if value is None else f"{value:.4g}"


def seconds_text(value: float) -> str:
    """A time in the unit that suits it.

    >>> [seconds_text(item) for item in (2.5e-6, 0.0123, 1.5)]
    ['2.5 µs', '12.3 ms', '1.5 s']
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.1f} {unit}"
    return f"{value * 1e6:.1f} µs"


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDEST_CELL else line[: _WIDEST_CELL - 1] + "…"


def _html_row(row: tuple[str, ...], tag: str, align: Any, is_marked: bool) -> str:
    style = ' style="color: #b00020; font-weight: bold"' if is_marked else ""
    cells = [
        f'<{tag} style="text-align: {align(position)}">{html.escape(text)}</{tag}>' for position, text in enumerate(row)
    ]
    return f"<tr{style}>{''.join(cells)}</tr>"


__all__ = ["Table", "Tabular", "number_text", "plain", "seconds_text"]
