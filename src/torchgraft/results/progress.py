"""Where a long piece of work is: library code says what it is about to do with `stage`, and whoever wants to know follows.
Nothing is printed here, and without a follower nothing is done; the line on a terminal is in `cli/progress.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple


class Stage(NamedTuple):
    """One thing that is being done; `number` of `total` where it is one of several.

    >>> print(Stage("verifying on fresh values", 2, 7))
    verifying on fresh values (2 of 7)
    """

    what: str
    number: int = 0
    total: int = 0

    def __str__(self) -> str:
        return f"{self.what} ({self.number} of {self.total})" if self.total else self.what


class Progress(tuple[Stage, ...]):
    """The stages that work is in, the outermost first, each with `what`, `number` and `total`; empty when it is done.

    >>> print(Progress([Stage("verifying", 3, 4), Stage("fresh values", 2, 7)]))
    verifying (3 of 4): fresh values (2 of 7)
    """

    __slots__ = ()

    def __str__(self) -> str:
        return ": ".join(map(str, self))


Follower = Callable[[Progress], object]
_DONE = Progress()
_follower: ContextVar[Follower | None] = ContextVar("follower", default=None)
_stages: ContextVar[Progress] = ContextVar("stages", default=_DONE)


@contextlib.contextmanager
def follow_progress(follower: Follower) -> Iterator[None]:
    """Call `follower` with the `Progress` of what torchgraft does in the block, whenever a stage begins or ends.

    Capturing, lowering, verifying, comparing, recording, passes, drawings and reports say what they are doing.

    >>> import torch, torchgraft
    >>> model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    >>> program = torchgraft.capture(model, x)
    >>> seen = []
    >>> with torchgraft.follow_progress(lambda progress: seen.append(str(progress))):
    ...     _ = program.verify(model, x, other_values=False, other_sizes=1)
    >>> seen
    ['verifying on example (1 of 2)', '', 'verifying on batch 1 -> 2 (2 of 2)', '']
    """
    token = _follower.set(follower)
    try:
        yield
    finally:
        _follower.reset(token)


@contextlib.contextmanager
def stage(what: str, number: int = 0, total: int = 0) -> Iterator[None]:
    """Say that the block does this, inside of whatever is being done around it."""
    follower = _follower.get()
    if follower is None:
        yield
        return
    outer = _stages.get()
    inner = Progress([*outer, Stage(what, number, total)])
    token = _stages.set(inner)
    try:
        follower(inner)
        yield
    finally:
        _stages.reset(token)
        follower(outer)
