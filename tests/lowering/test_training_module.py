"""Training programs as a module: autograd, optimizers, copies and modes treat it as they treat the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft.errors import GuardError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any, scale: float = 2.0) -> Any:
        self.calls += 1
        y = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.2, self.training)
        return {"out": self.last(y) * scale, "best": y.argmax(-1), "rows": x.shape[0]}


def trained(module: Any, steps: int = 4) -> Any:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        result = module(torch.randn(5, 6))
        assert not result["best"].requires_grad
        assert result["rows"] == 5
        optimizer.zero_grad()
        loss = result["out"].square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def test_it_trains_as_the_model() -> None:
    torch.manual_seed(0)
    model = Net()
    subject = copy.deepcopy(model)
    full = torchgraft.capture_training(copy.deepcopy(model), torch.randn(4, 6)).saved_bytes
    module = torchgraft.capture_training(subject, torch.randn(4, 6), memory_budget=full // 2).module()
    assert list(module.state_dict()) == list(model.state_dict())
    assert all(map(torch.equal, trained(model), trained(module)))
    for (name, ours), theirs in zip(module.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    assert module.get_parameter("unused.weight").grad is None
    assert module.get_parameter("first.weight") is subject.first.weight


def test_copies_and_loaded_weights() -> None:
    torch.manual_seed(0)
    model = Net()
    module = torchgraft.capture_training(copy.deepcopy(model), torch.randn(4, 6)).module()
    other = copy.deepcopy(module)
    trained(model)
    other.load_state_dict(model.state_dict())
    x = torch.randn(5, 6)
    torch.manual_seed(2)
    expected = model(x)["out"]
    torch.manual_seed(2)
    assert torch.equal(other(x)["out"], expected)
    assert not torch.equal(module.get_parameter("first.weight"), other.get_parameter("first.weight"))


def test_modes_and_other_inputs_are_refused() -> None:
    module = torchgraft.capture_training(Net(), torch.randn(4, 6)).module()
    with torch.no_grad():
        assert not module(torch.randn(3, 6))["out"].requires_grad
    with pytest.raises(GuardError, match="and now it is False"):
        module.eval()(torch.randn(3, 6))
    module.train()
    with pytest.raises(GuardError, match="expected 2.0 for 'scale', got 3.0"):
        module(torch.randn(3, 6), scale=3.0)
    with pytest.raises(GuardError, match="'x' required no gradient, and now it does"):
        module(torch.randn(3, 6, requires_grad=True))


def test_inputs_have_gradients_and_results_any_layout() -> None:
    def model(x: Any, y: Any) -> Any:
        return (x @ y).t(), x

    args = torch.randn(2, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    module = torchgraft.capture_training(model, args).module()
    for function in (model, module):
        first, second = function(*args)
        (first.sum() + (first * torch.arange(8.0).view(4, 2)).sum() + second.square().sum()).backward()
    found = [tensor.grad for tensor in args]
    for tensor in args:
        tensor.grad = None
    for _ in range(2):
        first, second = model(*args)
        (first.sum() + (first * torch.arange(8.0).view(4, 2)).sum() + second.square().sum()).backward()
    for ours, tensor in zip(found, args, strict=True):
        assert torch.equal(ours, tensor.grad)  # type: ignore[arg-type]


def test_written_inputs() -> None:
    def model(x: Any, w: Any) -> Any:
        y = x.sin() * w
        x.add_(1)
        return y * x

    w = torch.randn(3, requires_grad=True)
    x, other = torch.ones(3), torch.ones(3)
    module = torchgraft.capture_training(model, (torch.ones(3), w)).module()
    expected = model(x, w)
    found = module(other, w)
    assert torch.equal(found, expected)
    assert torch.equal(other, x)
    (first,) = torch.autograd.grad(expected.sum(), w)
    (second,) = torch.autograd.grad(found.sum(), w)
    assert torch.equal(first, second)
