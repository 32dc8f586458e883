"""Dimensions that must stay free: capture raises where the model fixed one, in whatever way, and names the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchgraft import TraceError, capture

X = torch.ones(3, 4)


class OfAnActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        h = self.linear(x)
        return sum(h[index] for index in range(h.shape[0]))


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * len(list(range(2 * x.shape[0])))


def equal(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] == 3 else x


def not_unequal(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if not x.shape[0] != 3 else x


@pytest.mark.parametrize("model", [OfAnActivation(), doubled, equal, not_unequal])
@pytest.mark.parametrize("dimension", [0, -2])
def test_fixed_dimensions_are_refused(model: Any, dimension: int) -> None:
    with pytest.raises(TraceError, match=r"stay free, but the model fixed .*test_free_dimensions.py:\d+"):
        capture(model, (X,), dynamic={"x": [dimension]})
    capture(model, (X,), dynamic={"x": [1]})
    if isinstance(model, OfAnActivation):
        assert model.calls == 0, "left as it was"


@pytest.mark.parametrize(
    "model",
    [lambda x: x.view(x.shape[0], -1), lambda x: x * 2 if x.shape[0] > 1 else x, lambda x: x[: x.shape[0] // 2]],
)
def test_dimensions_that_stay_free(model: Callable[..., Any]) -> None:
    program = capture(model, (X,), dynamic={"x": [0]})
    assert torch.equal(program(torch.ones(7, 4)), model(torch.ones(7, 4)))


@pytest.mark.parametrize(
    ("dynamic", "reason"),
    [
        ({"y": [0]}, "dynamic names 'y', but the inputs are 'x', 'others'"),
        ({"x": [2]}, "dynamic names dimension 2 of 'x', which has 2"),
        ({"x": [-3]}, "dynamic names dimension -3 of 'x', which has 2"),
        ({"others": [0]}, "dynamic names 'others', which is no tensor here but a NoneType"),
    ],
)
def test_dimensions_that_there_are_none_of(dynamic: dict[str, list[int]], reason: str) -> None:
    def model(x: torch.Tensor, others: Any = None) -> torch.Tensor:
        return x

    with pytest.raises(ValueError, match=reason):
        capture(model, (X,), dynamic=dynamic)


def test_a_leaf_that_there_is_none_of() -> None:
    with pytest.raises(ValueError, match="leaf names 'first', and the model has no module there"):
        capture(nn.Sequential(nn.Linear(4, 4)), (X,), leaf=["0", "first"])


@pytest.mark.parametrize("level", ["module", "function", "aten"])
def test_inputs_are_named_as_in_forward(level: str) -> None:
    """The node of an input called `input` has another name."""
    program = capture(torch.nn.Linear(4, 2), (torch.ones(3, 4),), level=level, dynamic={"input": [0]})
    assert program(torch.ones(5, 4)).shape == (5, 2)

    def fixed(input: torch.Tensor) -> torch.Tensor:
        return input * 2 if input.shape[0] == 3 else input

    with pytest.raises(TraceError, match="dimension 0 of 'input' was to stay free"):
        capture(fixed, (torch.ones(3, 4),), level=level, dynamic={"input": [0]})
