"""What every result can do: be text (coloured on a terminal), HTML in a notebook, JSON, and rows for pandas.
What is in it is decided by the result itself; a result that is one table says only that, and is a `Tabular`.
"""

from __future__ import annotations

import html
import json
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any, TextIO

from torchgraft.results.files import written
from torchgraft.results.tables import Table, aligned, count


class Shown(ABC):
    """A result that can be printed, shown in a notebook, written as JSON and handed to pandas as rows.

    `print(result)` is plain text, its repr one line; `result.show()` and rich's own `print` use colours on a terminal.
    A dataclass that is one needs `repr=False`.
    """

    @abstractmethod
    def text(self, color: bool = False) -> str:
        """The result as text, with or without colours."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """One dict of plain values for each row: `pandas.DataFrame(result.rows())`."""

    def headline(self) -> str:
        """The result in one short line, which is its repr."""
        return self.text().partition("\n")[0]

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text())}</pre>"

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {"rows": self.rows()}

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """The result as JSON text, also written to `path` where one is given. What JSON has no number for is a string."""
        return written(json.dumps(plain(self.to_dict()), indent=1), path)

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """The result as a page of its own, also written to `path` where one is given."""
        title = html.escape(self.headline())
        return written(f'<!DOCTYPE html>\n<meta charset="utf-8">\n<title>{title}</title>\n{self._repr_html_()}', path)

    def show(self, file: TextIO | None = None) -> None:
        """Print to `file` (standard output), with colours if that is a terminal and NO_COLOR is not set."""
        stream = sys.stdout if file is None else file
        stream.write(f"{self.text(color=stream.isatty() and not os.environ.get('NO_COLOR'))}\n")

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.headline()}>"

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text.from_ansi(self.text(color=True))


class Tabular(Shown):
    """A result that is one table; on a terminal rich draws it."""

    @abstractmethod
    def _table(self) -> Table:
        """The texts to show."""

    def text(self, color: bool = False) -> str:
        """The table in aligned columns, the rows to look at first in red where colours are wanted."""
        return self._table().text(color)

    def show(self, file: TextIO | None = None) -> None:
        """Print to `file` (standard output): a table in the width of the terminal, plain text where there is none."""
        stream = sys.stdout if file is None else file
        if not stream.isatty():
            stream.write(f"{self}\n")
            return
        from rich.console import Console

        Console(file=stream).print(self)

    def __rich__(self) -> Any:
        return self._table().rich()

    def _repr_html_(self) -> str:
        return self._table().html()


class NamedTexts(Tabular, dict[Any, Any]):
    """A dict from nodes or their names to what is known of each, shown as a table of two columns."""

    def headline(self) -> str:
        return count(len(self), "node")

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each node."""
        return [{"node": name, "value": value} for name, value in self._cells()]

    def text(self, color: bool = False) -> str:
        """One line for each node, and the notes."""
        return "\n".join([*aligned(self._cells()), *self._notes()])

    def _cells(self) -> list[tuple[str, str]]:
        return [(str(name), self._text_of(value)) for name, value in self.items()]

    def _text_of(self, value: Any) -> str:
        return str(value)

    def _notes(self) -> list[str]:
        return []

    def _table(self) -> Table:
        return Table("", ("node", "value"), self._cells(), footer="\n".join(self._notes()))


def entry_of(entries: Iterable[Any], node: Any, where: str) -> Any:
    """What is known of a node, given itself or by its name."""
    wanted = getattr(node, "name", node)
    for entry in entries:
        if entry.name == wanted:
            return entry
    raise KeyError(f"no node named {wanted!r} in {where}")


def plain(value: Any, text_of: Callable[[Any], str] = repr) -> Any:
    """Only what JSON knows: not-a-number and infinities become "nan", "inf" and "-inf", other objects their repr or another text.

    >>> plain({"a": (1, float("inf")), 2: {3}})
    {'a': [1, 'inf'], '2': '{3}'}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item, text_of) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, text_of) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or type(value) in (bool, int, float, str) else text_of(value)
