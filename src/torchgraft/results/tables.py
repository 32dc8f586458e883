"""Texts in columns, as aligned text, as HTML and for rich's console; and numbers as short texts for their cells.
What can be done with a result that holds a table is in `shown.py`.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

_WIDEST_CELL = 64
_MOST_ROWS = 400
_PREFIXES = ("", "k", "M", "G", "T", "P")
_CODES = {"red": "31", "green": "32", "yellow": "33", "blue": "34", "bold": "1", "dim": "2"}


@dataclass(frozen=True)
class Table:
    """Texts in columns; `numbers` are the columns that stand to the right, `marked` the rows to look at first."""

    title: str
    columns: tuple[str, ...]
    cells: Sequence[tuple[str, ...]]
    numbers: frozenset[str] = frozenset()
    marked: frozenset[int] = frozenset()
    footer: str = ""

    def text(self, color: bool = False) -> str:
        """Aligned columns; in colours the heading is bold and marked rows are red."""
        cells = [tuple(map(_cut, row)) for row in self.cells]
        numbers = [position for position, name in enumerate(self.columns) if name in self.numbers]
        head, *lines = aligned([self.columns, *cells], numbers)
        lines = [painted(line, "red", color and index in self.marked) for index, line in enumerate(lines)]
        title, footer = [[text] if text else [] for text in (self.title, self.footer)]
        return "\n".join([*title, painted(head, "bold", color), *lines, *footer])

    def html(self) -> str:
        """A table without scripts or outside styles; a very long one is cut, and says so."""
        shown = self.cells[:_MOST_ROWS]
        rows = [_html_row(self.columns, "th", self._align, False)]
        rows += [_html_row(row, "td", self._align, index in self.marked) for index, row in enumerate(shown)]
        more = len(self.cells) - len(shown)
        footer = [self.footer, f"… and {count(more, 'more row')}" if more else ""]
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


def aligned(rows: Sequence[Sequence[str]], numbers: Collection[int] = ()) -> list[str]:
    """Rows as lines with aligned columns; `numbers` are the positions of the columns that stand to the right.

    >>> aligned([("node", "n"), ("relu_1", "12")], [1])
    ['node     n', 'relu_1  12']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.rjust if position in numbers else str.ljust for position in range(len(widths))]
    return [
        "  ".join([side(text, width) for side, text, width in zip(sides, row, widths, strict=True)]).rstrip()
        for row in rows
    ]


def painted(text: str, colour: str, color: bool) -> str:
    """Text in a colour (or "bold", "dim") of the terminal, where `color` is wanted.

    >>> painted("+ x", "green", True), painted("+ x", "green", False)
    ('\\x1b[32m+ x\\x1b[0m', '+ x')
    """
    return f"\033[{_CODES[colour]}m{text}\033[0m" if color and text else text


def number_text(value: float | None) -> str:
    """A number in few characters; nothing for None.

    >>> [number_text(item) for item in (None, 0.0, 12.34567, 1e-9, float("nan"))]
    ['', '0', '12.35', '1e-09', 'nan']
    """
    return "" if value is None else f"{value:.4g}"


def amount(number: float | None, unit: str = "") -> str:
    """A number in three digits and a prefix, in powers of 1000 for bytes too; a dash for what is not known.

    >>> amount(8_178_000_000), amount(512), amount(512, "B"), amount(999_950, "B"), amount(None)
    ('8.18 G', '512', '512 B', '1 MB', '-')
    """
    if number is None:
        return "-"
    index = 0
    while abs(number) >= 999.5 and index < len(_PREFIXES) - 1:
        number, index = number / 1000, index + 1
    digits = f"{number:.3g}" if index else f"{number:g}"
    return f"{digits} {_PREFIXES[index]}{unit}".rstrip()


def count(number: int, one: str, several: str | None = None) -> str:
    """So many of something, in the singular where there is one.

    >>> count(1, "node"), count(2500, "node"), count(0, "pass", "passes")
    ('1 node', '2,500 nodes', '0 passes')
    """
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def listed(names: Sequence[str], most: int) -> str:
    """The first of many names, and how many more there are.

    >>> listed(["a", "b", "c", "d"], 2), listed(["a", "b"], 2)
    ('a, b and 2 more', 'a, b')
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def seconds_text(value: float | None) -> str:
    """A time in the unit that suits it; a dash for what is not known.

    >>> [seconds_text(item) for item in (2.5e-6, 0.0123, 1.5)]
    ['2.5 µs', '12.3 ms', '1.5 s']
    """
    if value is None:
        return "-"
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.1f} {unit}"
    return f"{value * 1e6:.1f} µs"


def shortened(text: str, longest: int) -> str:
    """A text that is not longer than this; one that was says so at its end.

    >>> shortened("a long text", 7)
    'a long…'
    """
    return text if len(text) <= longest else text[: longest - 1].rstrip() + "…"


def _cut(text: str) -> str:
    return shortened(" ".join(text.split()), _WIDEST_CELL)


def _html_row(row: tuple[str, ...], tag: str, align: Any, is_marked: bool) -> str:
    style = ' style="color: #b00020; font-weight: bold"' if is_marked else ""
    cells = [
        f'<{tag} style="text-align: {align(position)}">{html.escape(text)}</{tag}>' for position, text in enumerate(row)
    ]
    return f"<tr{style}>{''.join(cells)}</tr>"
