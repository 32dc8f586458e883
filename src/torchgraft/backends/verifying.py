"""Whether a lowered module computes what its model computes: on the example, and on other values.
How far results may lie apart is said in `parts.py`, where parts are checked one by one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchgraft.analysis.comparison import frozen_leaves
from torchgraft.analysis.surroundings import modules_behind
from torchgraft.backends.backend import Options
from torchgraft.backends.parts import differences, within
from torchgraft.capturing.state.model_state import kept_state
from torchgraft.errors import GuardError
from torchgraft.recording.situations import Situation, situations


def first_wrong(
    model: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> tuple[Situation, str] | None:
    """The first situation in which `run` differs from the model, and how; None where it never does."""
    planned = situations(args, kwargs, 0, True, False, False)
    if options.precision in ("fp16", "bf16"):
        # Beyond the range of the example, 16 bits may say nothing about a model: its own roundings decide.
        planned = [item for item in planned if item.name != "other values"]
    for item in planned:
        situation = item.make()
        try:
            expected = _leaves_after(model, model, situation)
        except Exception:  # other values may go another way, and a model may refuse them
            if item is planned[0]:
                raise
            continue
        try:
            found = _leaves_after(_limited(run, options.time_limit), model, situation)
        except GuardError:  # other values may go another way
            continue
        wrong = differences(expected, found, options.precision, "lowered module")
        if wrong:
            return situation, str(wrong[0])
    return None


def _limited(run: Callable[..., Any], seconds: float | None) -> Callable[..., Any]:
    return lambda *args, **kwargs: within(seconds, functools.partial(run, *args, **kwargs))


def _leaves_after(function: Callable[..., Any], model: Any, situation: Situation) -> dict[str, Any]:
    """What a call returns and leaves in its inputs; what it does to the model and to random states is put back."""
    values, keywords = situation.copied()
    with left_as_it_was(model), torch.no_grad():
        result = function(*values, **keywords)
        return frozen_leaves(result, "output") | frozen_leaves((values, keywords), "inputs afterwards")


@contextlib.contextmanager
def left_as_it_was(model: Any) -> Iterator[None]:
    """What runs change of a model, or of the modules that a function uses, and of random states is put back."""
    with contextlib.ExitStack() as kept:
        for _, root in modules_behind(model) or [("", torch.nn.Module())]:  # random states are put back anyway
            kept.enter_context(kept_state(root))
        yield
