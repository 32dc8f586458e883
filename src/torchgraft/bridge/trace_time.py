"""A stopwatch for capture beside torch.fx, turn by turn in one run so that a noisy machine disturbs both alike.
It serves the demo; the full measurements are in the project's benchmarks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch.fx
from torch import nn


def time_beside_torch_fx(capture: Callable[[], object], model: nn.Module, rounds: int = 7) -> tuple[float, float]:
    """Median seconds of `capture()`, and of torch.fx capturing `model` and generating its code.

    >>> ours, theirs = time_beside_torch_fx(lambda: None, nn.ReLU(), rounds=3)
    >>> min(ours, theirs) > 0
    True
    """

    def capture_with_torch_fx() -> object:
        return torch.fx.symbolic_trace(model).code

    # Both libraries fill caches on their first capture, which is not what a user waits for.
    capture(), capture_with_torch_fx()
    seconds = [(_seconds(capture), _seconds(capture_with_torch_fx)) for _ in range(rounds)]
    ours, theirs = zip(*seconds, strict=True)
    return median(ours), median(theirs)


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
