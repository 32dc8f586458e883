"""A progress bar for what takes long, on a terminal only.
Nothing is drawn during the first second, nor where rich is not installed.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

_PATIENCE = 1.0


@contextlib.contextmanager
def progress_bar(total: int, wanted: bool | None = None, text: str = "recording") -> Iterator[Callable[[], None]]:
    """A function to call after each step; `wanted` is False for never, and None or True for a terminal."""
    if wanted is False or not sys.stderr.isatty():
        yield lambda: None
        return
    bar = _Bar(total, text)
    try:
        yield bar.step
    finally:
        bar.stop()


class _Bar:
    def __init__(self, total: int, text: str) -> None:
        self._total = total
        self._text = text
        self._done = 0
        self._due = time.monotonic() + _PATIENCE
        self._shown: Any = None
        self._task: Any = None

    def step(self) -> None:
        """Count one step, and show it if the time has come."""
        self._done += 1
        if self._shown is None and time.monotonic() >= self._due:
            self._start()
        if self._shown is not None:
            self._shown.update(self._task, completed=self._done)

    def _start(self) -> None:
        self._due = float("inf")
        try:
            from rich.console import Console
            from rich.progress import Progress
        except ImportError:
            return
        self._shown = Progress(console=Console(stderr=True), transient=True)
        self._task = self._shown.add_task(self._text, total=self._total)
        self._shown.start()

    def stop(self) -> None:
        """Take the bar away."""
        if self._shown is not None:
            self._shown.stop()


__all__ = ["progress_bar"]
