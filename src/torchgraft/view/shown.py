"""What every result of this room can do: be text (coloured on a terminal), HTML in a notebook, JSON, and rows for pandas.
What is in them is decided by the result itself.
"""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

from torchgraft.view.graph_files import write_whole

_CODES = {"red": "31", "green": "32", "yellow": "33", "blue": "34", "bold": "1", "dim": "2"}


class Shown(ABC):
    """A result that can be printed, shown in a notebook, written as JSON and handed to pandas as rows.

    `print(result)` is plain text; `result.show()` and rich's own `print` use colours on a terminal.
    """

    @abstractmethod
    def text(self, color: bool = False) -> str:
        """The result as text, with or without colours."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """One dict of plain values for each row: `pandas.DataFrame(result.rows())`."""

    @abstractmethod
    def _repr_html_(self) -> str: ...

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {"rows": self.rows()}

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """The result as JSON text, also written to `path` where one is given."""
        text = json.dumps(self.to_dict(), indent=1)
        if path is not None:
            write_whole(Path(path), f"{text}\n".encode())
        return text

    def show(self, file: TextIO | None = None) -> None:
        """Print to `file` (standard output), with colours if that is a terminal and NO_COLOR is not set."""
        stream = sys.stdout if file is None else file
        stream.write(f"{self.text(color=stream.isatty() and not os.environ.get('NO_COLOR'))}\n")

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return self.text()

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text.from_ansi(self.text(color=True))


def painted(text: str, colour: str, color: bool) -> str:
    """Text in a colour (or "bold", "dim") of the terminal, where `color` is wanted.

    >>> painted("+ x", "green", True), painted("+ x", "green", False)
    ('\\x1b[32m+ x\\x1b[0m', '+ x')
    """
    return f"\033[{_CODES[colour]}m{text}\033[0m" if color and text else text
