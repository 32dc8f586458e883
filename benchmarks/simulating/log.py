"""Rows of JSON, written as they come, that a later run goes on with: what is there is not measured again.
What is measured is decided in `measure_gpu.py`.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

MOST_BYTES = 15 * 2**20  # of one file, so that it can be carried around
MOST_SECONDS = 120.0  # for one row: what takes longer hangs
HUNG = 3  # the exit code of a process that hung


class Log:
    """The rows of one file. `names` are the entries that say what was measured; a row with an error counts as measured."""

    def __init__(self, path: Path, *names: str) -> None:
        self.path, self.names = path, names
        self.rows = rows_of(path) if path.exists() else []
        self.done = {self._key(row) for row in self.rows}
        self.size = path.stat().st_size if path.exists() else 0
        self._now = path.with_suffix(".now")
        self._watch: threading.Timer | None = None
        if self.size and not path.read_bytes().endswith(b"\n"):  # a process ended while it wrote
            self._write("\n")
        if self._now.exists():
            self.add(json.loads(self._now.read_text()) | {"error": "the process ended or hung while this was measured"})

    def _key(self, row: dict[str, Any]) -> str:
        return json.dumps([row.get(name) for name in self.names], sort_keys=True)

    def has(self, row: dict[str, Any]) -> bool:
        """Whether this was measured, or the file is full."""
        return self._key(row) in self.done or self.size > MOST_BYTES

    def begin(self, row: dict[str, Any]) -> None:
        """Say what is measured now: should this process end or hang, the next one leaves it out."""
        self._now.write_text(json.dumps(row))
        self._watch = threading.Timer(MOST_SECONDS, os._exit, [HUNG])
        self._watch.daemon = True
        self._watch.start()

    def add(self, row: dict[str, Any]) -> None:
        """Write a row."""
        if self._watch is not None:
            self._watch.cancel()
        self._write(json.dumps(row) + "\n")
        self.done.add(self._key(row))
        self.rows.append(row)
        self._now.unlink(missing_ok=True)

    def _write(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)
        self.size += len(text)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a line that was not written to its end is left out."""
    found = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            found.append(row)
    return found
