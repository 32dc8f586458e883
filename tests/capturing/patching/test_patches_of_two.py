"""Two threads that capture at once, at whatever level: afterwards torch is as it was before, whoever began or ended first."""

from __future__ import annotations

import math
import queue
import random
import threading
from typing import Any

import pytest
import torch
from torch import nn

import torchgraft

# By the number of a model: what says that its forward has begun, and what tells it to go on. Queues, because a capture puts back
# what can be put back, and events can.
SIGNALS: list[tuple[queue.SimpleQueue, queue.SimpleQueue]] = []


class Meeting(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        meet(self.number)
        return x * 2


def meet(number: int) -> None:
    give(SIGNALS[number][0])
    SIGNALS[number][1].get(timeout=120)


def give(signal: queue.SimpleQueue) -> None:
    for _ in range(20):  # a capture may run a model several times
        signal.put(True)


def run(level: str, number: int) -> None:
    if level == "symbolic":
        torchgraft.symbolic_trace(Meeting(number))
    else:
        torchgraft.capture(Meeting(number), (torch.ones(2),), level=level)


def patched() -> list[Any]:
    return [
        torch.manual_seed, torch.random.manual_seed, torch.is_grad_enabled, random.random, random.seed, math.sqrt,
        threading.Thread.start, torch.nn.Module.__call__.__code__, torch.Tensor.__dict__.get("view"),
        torch.no_grad.__enter__, torch.autograd.Function.__dict__["apply"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("function", "aten"),
        ("aten", "function"),
        ("symbolic", "aten"),
        ("symbolic", "function"),
        ("function", "symbolic"),
    ],
)
def test_torch_is_as_before(first: str, second: str) -> None:
    before = patched()
    first_begins, second_begins, first_has_ended = [queue.SimpleQueue() for _ in range(3)]
    SIGNALS[:] = [(first_begins, second_begins), (second_begins, first_has_ended)]
    one = threading.Thread(target=run, args=(first, 0))
    other = threading.Thread(target=run, args=(second, 1))
    one.start()
    first_begins.get(timeout=120)
    other.start()
    one.join()
    give(first_has_ended)
    other.join()
    torchgraft.symbolic_trace(lambda x: x + 1)
    torch.manual_seed(0)
    random.seed(0)
    assert [now for now, then in zip(patched(), before, strict=True) if now is not then] == []
