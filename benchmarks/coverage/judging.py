"""Running and judging: one run of a model or program, the verdict about it beside another, and an attempt at making a program.
Which programs are made and in which situations they are run is in `examination`.
"""

from __future__ import annotations

import copy
import inspect
import random
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn

import torchgraft
from benchmarks.coverage.cases import Inputs
from benchmarks.coverage.comparison import difference
from benchmarks.coverage.model_snapshot import Snapshot
from benchmarks.coverage.rows import EQUAL, FAILS, REFUSED, UNDEFINED, WRONG, Attempt

# Operators sum in another order than the functions they come from; a gradient that is zero but for rounding, as that of the bias
# of attention's keys, is compared with the largest gradient of the model.
RELATIVE_TO_ALL = 1e-6


def run(function: Callable[..., Any], inputs: Inputs) -> Any:
    """What a run gives: its result, what it did to its inputs, and where it left the random numbers."""
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    given = copy.deepcopy(inputs)
    result = function(*given.args, **given.kwargs)
    return result, given.args, given.kwargs, torch.get_rng_state()


def seeded(make: Callable[[], Inputs], name: str) -> Inputs:
    torch.manual_seed(len(name))
    return make()


def judge(answer: Callable[[], Any], expected: Any, compare: Callable[[Any, Any], str] = difference) -> tuple[str, str]:
    """The verdict about one run of a program, and the reason where it is not "equal"."""
    try:
        found = answer()
    except torchgraft.GuardError as error:
        return (UNDEFINED if isinstance(expected, Exception) else REFUSED), str(error)
    except Exception as error:
        return (UNDEFINED if isinstance(expected, Exception) else FAILS), described(error)
    if isinstance(expected, Exception):
        return WRONG, f"answers, where eager raises {type(expected).__name__}: {expected}"
    text = compare(expected, found)
    return (WRONG, text) if text else (EQUAL, "")


def gradient_difference(expected: dict[str, Any], found: dict[str, Any]) -> str:
    """The first difference of gradients by their names; "" where there is none."""
    largest = max((float(value.abs().max()) for value in expected.values() if value is not None), default=0.0)
    text = difference(expected, found, at_least=RELATIVE_TO_ALL * largest)
    return f"gradient of {text}" if text else ""


def attempted(model: nn.Module, make: Callable[[], Any]) -> tuple[Attempt, Any]:
    """What `make` makes of a model, the time that took, and what it left behind in the model and the random numbers."""
    attempt = Attempt()
    before = Snapshot(model)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    started = time.process_time()
    try:
        made = make()
    except Exception as error:
        attempt.reasons["captured"] = described(error)
        return attempt, None
    attempt.first_seconds = time.process_time() - started
    attempt.captured = True
    changes = before.changes()
    if not torch.equal(state, torch.get_rng_state()):
        changes.append("random state")
    if changes:
        attempt.reasons["untouched"] = ", ".join(changes[:5])
    return attempt, made


def described(error: BaseException) -> str:
    """An exception in one text: kind, message, and the last lines it came through, ours and the model's."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(_OWN)]
    text = f"{type(error).__name__}: {str(error).strip()[:1500]}"
    if users:
        text += f" | model: {_place(users[-1])}"
    if frames and frames[-1] is not (users[-1] if users else None):
        text += f" | raised: {_place(frames[-1])}"
    return text


_OWN = (
    str(inspect.getfile(torch)).removesuffix("__init__.py"),
    str(inspect.getfile(torchgraft)).removesuffix("__init__.py"),
    __file__,
)


def _place(frame: traceback.FrameSummary) -> str:
    name = frame.filename.split("site-packages/")[-1]
    return f"{name}:{frame.lineno} {frame.line}"
