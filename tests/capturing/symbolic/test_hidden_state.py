"""State that is no part of the model: what a trace reads of it is a constant of the program, what it writes is not undone.
State of the model itself is put back, and writing it refused."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import torchgraft as fx

ITEMS: list[Any] = [1]


class Notes:
    calls = 2


def test_what_is_read_is_a_constant() -> None:
    def forward(x):
        return x * len(ITEMS) + Notes.calls + random.Random(4).random()

    program = fx.symbolic_trace(forward)
    assert program(torch.zeros(1)).item() == pytest.approx(2 + random.Random(4).random())


def test_notes_may_be_taken() -> None:
    seen: list[Any] = []
    program = fx.symbolic_trace(lambda x: (seen.append("here"), x + 1)[1])
    assert program(torch.zeros(1)) == 1
    assert seen == ["here"]


def test_programs_can_be_traced_again() -> None:
    program = fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    assert fx.symbolic_trace(program)(torch.zeros(1)) == 1
    assert fx.symbolic_trace(nn.Sequential(program, nn.ReLU()))(torch.zeros(1)) == 1


class Holding(nn.Module):
    def __init__(self, thing, use) -> None:
        super().__init__()
        self.thing, self.use = thing, use

    def forward(self, x):
        self.use(self.thing)
        return x * 2


@pytest.mark.parametrize(
    ("thing", "use"),
    [
        ([numpy.zeros(2)], lambda thing: thing.append(1)),
        ({"a": [1]}, lambda thing: thing["a"].append(2)),
        ({"a": 1}, lambda thing: thing.update(b=torch.ones(1))),
        ({1}, lambda thing: thing.add(2)),
    ],
    ids=["list", "nested", "memo", "set"],
)
def test_what_the_model_holds_is_put_back_and_refused(thing, use) -> None:
    before = repr(thing)
    with pytest.raises(fx.TraceError, match=r"self\.thing"):
        fx.symbolic_trace(Holding(thing, use))
    assert repr(thing) == before
