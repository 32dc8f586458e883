"""Rows of JSON, written as they come, that a later run goes on with: what is there is not measured again.
What is measured is decided in `measure_gpu.py`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

MOST_BYTES = 2**21  # of one file: all that are written in one run can be carried around, and kept
NOW = ".now"  # the ending of a file that says what is measured now

Row = dict[str, Any]


class Log:
    """The rows of one file. `names` are the entries that say what was measured; a row with an error counts as measured.

    `known` are rows of earlier runs: what is among them counts as measured too, and is not written again.
    """

    def __init__(self, path: Path, *names: str, known: Iterable[Row] = ()) -> None:
        self.path, self.names = path, names
        self.rows = rows_of(path) if path.exists() else []
        self.done = {self._key(row) for row in [*self.rows, *known]}
        self.size = path.stat().st_size if path.exists() else 0
        self._now = path.with_suffix(NOW)
        if self.size and not path.read_bytes().endswith(b"\n"):  # a process ended while it wrote
            self._write("\n")
        if self._now.exists():
            text = self._now.read_text()
            row = _row(text) or {}
            self.add(row | {"error": "the process ended or hung while this was measured"})

    def _key(self, row: Row) -> str:
        return json.dumps([row.get(name) for name in self.names], sort_keys=True)

    def has(self, row: Row) -> bool:
        """Whether this was measured, or the file is full."""
        return self._key(row) in self.done or self.size > MOST_BYTES

    def begin(self, row: Row) -> None:
        """Say what is measured now: should this process end or hang, the next one leaves it out."""
        self._now.write_text(json.dumps(row))

    def add(self, row: Row) -> None:
        """Write a row."""
        self._write(json.dumps(row) + "\n")
        self.done.add(self._key(row))
        self.rows.append(row)
        self._now.unlink(missing_ok=True)

    def _write(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)
        self.size += len(text)


# ---- reading, and keeping ----


def files_of(paths: Iterable[Path]) -> list[Path]:
    """Files as they are, and all files of rows of folders."""
    found: list[Path] = []
    for path in paths:
        found += sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")]) if path.is_dir() else [path]
    return found


def rows_of(path: Path) -> list[Row]:
    """The rows of a file, which may be compressed; a line that was not written to its end is left out."""
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    return [row for line in text.splitlines() if (row := _row(line)) is not None]


def all_rows(paths: Iterable[Path]) -> list[Row]:
    """The rows of files and folders, each once."""
    found = {json.dumps(row): row for path in files_of(paths) for row in rows_of(path)}
    return list(found.values())


def keep(rows: Sequence[Row], path: Path) -> None:
    """Write rows to one compressed file, whole or not at all; the same rows make the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".part")
    whole.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), mtime=0))
    whole.replace(path)


def _row(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
