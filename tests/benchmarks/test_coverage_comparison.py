"""Tests of the comparison of results, and of the snapshot that shows what was done to a model."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.coverage.comparison import difference, is_flat
from benchmarks.coverage.model_snapshot import Snapshot

Pair = namedtuple("Pair", "a b")


@dataclass
class Output:
    logits: torch.Tensor
    cache: Any = None


class Cache:
    def __init__(self, keys: torch.Tensor) -> None:
        self.layers = [{"keys": keys}]
        self.owner = self


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(3.0),
        lambda: (torch.ones(2), [None, 3, "x"], {"k": torch.zeros(1)}),
        lambda: Output(torch.ones(2), Cache(torch.ones(3))),
        lambda: Pair(torch.tensor(float("nan")), torch.tensor([float("inf"), 1.0])),
        lambda: torch.empty(0, 3),
        lambda: float("nan"),
    ],
)
def test_a_result_equals_itself_made_again(make: Any) -> None:
    assert difference(make(), make()) == ""


@pytest.mark.parametrize(
    ("expected", "found", "text"),
    [
        (torch.ones(2), torch.ones(3), "shape"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "dtype"),
        (torch.ones(2), torch.ones(2).requires_grad_(), "requires_grad"),
        (torch.ones(2), torch.tensor([1.0, 1.1]), "by 0.1 at most"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 of 2 values"),
        (torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 1.0]), "other places"),
        (torch.zeros(2), torch.full((2,), 1e-30), "by 1e-30"),
        ((torch.ones(1), 2), (torch.ones(1), 3), "[1]: 2 became 3"),
        ({"a": 1}, {"b": 1}, "['a'] became ['b']"),
        ([1, 2], [1], "2 parts became 1"),
        (1, 1.0, "1 became 1.0"),
        (torch.ones(1), None, "a tensor (1,) became None"),
        (Output(torch.ones(1), Cache(torch.ones(1))), Output(torch.ones(1), Cache(torch.zeros(1))), "['keys']"),
    ],
)
def test_a_difference_is_named(expected: Any, found: Any, text: str) -> None:
    assert text in difference(expected, found)


def test_the_last_bits_of_a_sum_are_no_difference() -> None:
    value = torch.rand(100) + 1
    assert difference(value, value * (1 + 1e-7)) == ""


def test_a_flat_result_shows_nothing() -> None:
    assert is_flat({"a": torch.zeros(3), "n": 4})
    assert is_flat(torch.full((2, 2), float("nan")))
    assert not is_flat((torch.zeros(3), torch.arange(3)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(1))
        self.memo: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda model: model.count.add_(1), "the values of count"),
        (lambda model: setattr(model, "count", torch.zeros(1)), "count is another tensor"),
        (lambda model: model.memo.update(x=1), ".memo changed"),
        (lambda model: model.linear.eval(), "linear.training changed"),
        (lambda model: model.linear.register_forward_hook(print), "linear._forward_hooks changed"),
        (lambda model: setattr(model, "visits", 1), ".visits is new"),
        (lambda model: delattr(model, "memo"), ".memo is gone"),
        (lambda model: model.add_module("more", nn.ReLU()), "module more came or went"),
        (lambda model: setattr(model.linear.weight, "grad", torch.ones(2, 2)), "the gradient of linear.weight"),
    ],
)
def test_a_snapshot_shows_what_was_changed(change: Any, text: str) -> None:
    model = Model()
    snapshot = Snapshot(model)
    assert snapshot.changes() == []
    change(model)
    assert text in snapshot.changes()
