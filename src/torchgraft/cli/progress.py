"""The line on a terminal that says what a command is doing, how far it is and for how long; nothing in pipes and files.
What is being done is said by the library, through `results/progress.py`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from torchgraft.results.progress import Progress, follow_progress

_QUIET_SECONDS = 0.5  # what is done by then needs no line


@contextlib.contextmanager
def progress_line() -> Iterator[None]:
    """Show the progress of the block on standard error, if that is a terminal; the line disappears with the work."""
    if not sys.stderr.isatty():
        yield
        return
    line = _Line()
    try:
        with follow_progress(line.update):
            yield
    finally:
        line.stop()


class _Line:
    """Exists on the screen only while there is work, because results are printed in between."""

    def __init__(self) -> None:
        self._progress = Progress()
        self._started = time.monotonic()
        self._live: Any = None

    def update(self, progress: Progress) -> None:
        if not progress:
            self.stop()
            return
        self._progress = progress
        if self._live is None:
            self._start()

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _start(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(
            self, console=Console(stderr=True), transient=True, refresh_per_second=4,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._live.start()

    def __rich__(self) -> Any:
        from rich.text import Text

        seconds = time.monotonic() - self._started
        if seconds < _QUIET_SECONDS:
            return Text()
        return Text(f"{self._progress}, {seconds:.0f} s", style="dim", no_wrap=True, overflow="ellipsis")
