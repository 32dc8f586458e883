"""What torch.export would lose without a word, and what is done about it at the ATen levels.
What it says itself is in `test_levels.py`.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from torchgraft import capture
from torchgraft.bridge.self_check import check_on_example
from torchgraft.errors import BridgeError, GuardError

X = torch.randn(3, 4)


def test_parameters_of_modules_that_a_function_mentions() -> None:
    layer = nn.Linear(4, 4)
    program = capture(lambda x: layer(x) * 2, (X,), level="aten")
    result = program(X)
    assert result.requires_grad and torch.equal(result, layer(X) * 2)
    assert dict(program.named_parameters()).keys() == {"layer.weight", "layer.bias"}


def test_parameters_that_nobody_finds_are_refused() -> None:
    weight = torch.ones(4, requires_grad=True)
    with pytest.raises(BridgeError, match="requires a gradient and is neither an input nor a parameter"):
        capture(lambda x: x * weight, (X,), level="aten")
    with torch.no_grad():
        assert torch.equal(capture(lambda x: x * weight, (X,), level="aten")(X), X)


def test_state_outside_is_put_back_and_refused() -> None:
    calls = {"count": 0}

    def function(x: torch.Tensor) -> torch.Tensor:
        calls["count"] += 1
        return x * calls["count"]

    for level in ("aten", "core_aten"):
        with pytest.raises(BridgeError, match="its forward writes what function keeps"):
            capture(function, (X,), level=level)
        assert calls == {"count": 0}


def _recovers(x: torch.Tensor) -> torch.Tensor:
    try:
        return x * float(x.sum())
    except Exception:
        return x * 100


def _is_compiling(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if not torch.compiler.is_compiling() else x * 100


@pytest.mark.parametrize("function", [_recovers, _is_compiling])
def test_a_model_that_is_led_elsewhere_is_refused(function: Any) -> None:
    with pytest.raises(BridgeError, match="on the example the exported program does not do what the model does"):
        capture(function, (X,), level="aten")


@pytest.mark.parametrize(
    ("function", "other"),
    [
        (lambda x: x * 2 if x.requires_grad else x + 1, lambda: X.clone().requires_grad_()),
        (lambda x: x * 2 if x.stride(-1) == 1 else x + 1, lambda: torch.randn(4, 3).t()),
        (lambda x: x * 2 if x._is_view() else x + 1, lambda: torch.randn(4, 4)[:3]),
        (lambda x: x * 2 if x.grad is None else x + x.grad, lambda: _with_gradient()),
        (lambda x: x * getattr(x, "scale", 2.0), lambda: _with_attribute()),
        (lambda x: x + 1, lambda: None),
    ],
)
def test_facts_that_a_model_asks_for_are_checked(function: Any, other: Any) -> None:
    program = capture(function, (X,), level="aten")
    assert torch.equal(program(X), function(X))
    with pytest.raises(GuardError):
        program(other())


def _with_gradient() -> torch.Tensor:
    x = X.clone()
    x.grad = torch.ones(3, 4)
    return x


def _with_attribute() -> torch.Tensor:
    x: Any = X.clone()
    x.scale = 5.0
    return x


def test_numbers_of_another_type_are_refused() -> None:
    program = capture(lambda x, k: x - 1 if k is True else x * k, (torch.arange(4), 1), level="aten")
    for other in (True, 1.0):
        with pytest.raises(GuardError, match="is_exactly"):
            program(torch.arange(4), other)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 100


def test_a_function_with_its_own_backward_is_not_differentiated() -> None:
    program = capture(lambda x: Cubed.apply(x), (X,), level="aten")
    assert torch.equal(program(X), X**3)
    with pytest.raises(GuardError, match="requires_grad"):
        program(X.clone().requires_grad_())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: (torch.manual_seed(3), x + torch.rand(4))[1], r"calls torch.manual_seed\(\)"),
        (lambda x: x + torch.rand(4, generator=torch.Generator().manual_seed(0)), "draws from a torch.Generator"),
        (lambda x: x * random.random(), "draws Python's random numbers"),
    ],
)
def test_random_numbers_that_operators_do_not_say(function: Any, message: str) -> None:
    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(BridgeError, match=message):
        capture(function, (X,), level="aten")
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_inputs_that_are_changed_or_cannot_be_given() -> None:
    with pytest.raises(BridgeError, match="a dict that it is given"):
        capture(lambda batch: batch.pop("x") * 2, ({"x": X},), level="aten")
    with pytest.raises(BridgeError, match="with a Linear as an input"):
        capture(lambda x, layer: layer(x), (X, nn.Linear(4, 4)), level="aten")


def test_frozen_parameters_and_swapped_modules() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first.requires_grad_(False)
            return self.second(self.first(x))

    class Swapped(Frozen):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first, self.second = self.second, self.first
            return self.first(x)

    with pytest.raises(BridgeError, match="switches the gradient of a parameter"):
        capture(Frozen(), (X,), level="aten")
    model = Swapped()
    before = dict(model._modules)
    with pytest.raises(BridgeError, match="_modules"):
        capture(model, (X,), level="aten")
    assert model._modules == before


def test_checking_leaves_the_model_as_it_was() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("steps", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps.add_(1)
            return x * self.weight + self.steps

    model = Steps()
    program = capture(model, (X,), level="aten")
    check_on_example(model, program, (X,), {})
    assert model.steps.item() == 0 and model.weight.grad is None
    program(X)
    assert model.steps.item() == 1
