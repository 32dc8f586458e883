"""What ends a watched run before its time, so that another can be made that asks less of the model, or is better prepared.
What follows from each is decided in `program.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchgraft.ir.origin import at, current_source_line


class KeepWhole(BaseException):
    """A module does something that cannot be written down; capture is tried again with it as one call.

    No Exception, because a model may catch those.
    """

    def __init__(self, module: torch.nn.Module | None, reason: str) -> None:
        super().__init__(reason)
        self.module = module
        self.reason = reason


class RunAgain(BaseException):
    """The run is better made once more, after something was prepared for it. No Exception, because a model may catch those."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        super().__init__()
        self.prepare = prepare


def at_line() -> str:
    """The user's line that is running, for the end of a sentence."""
    return at(current_source_line())
