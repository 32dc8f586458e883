"""Linear layers that native computes with oneDNN's kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchgraft
from torchgraft.backends import packed_linears
from torchgraft.backends.lowered import compiled_of

pytestmark = pytest.mark.skipif(packed_linears._LINEAR is None, reason="torch has no oneDNN here")


@pytest.fixture(autouse=True)
def all_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is quicker depends on the machine; here every layer is packed."""
    monkeypatch.setattr(packed_linears, "_LEAST_WORK", 0)
    monkeypatch.setattr(packed_linears, "_pays", lambda *_: True)


def targets(module: Any) -> list[Any]:
    """What the compiled program calls."""
    (compiled,) = compiled_of(module._variants[0])
    return [node.target for node in compiled.module.graph.nodes if node.op == "call_function"]


class Residual(nn.Module):
    """A sum behind a linear layer, and activations behind others."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(8, 16), nn.Linear(16, 8, bias=False), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.activation(self.up(x)))


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Identity()], ids=str)
def test_layers_with_what_follows_are_one_call_each(activation: nn.Module) -> None:
    model = Residual(activation).eval()
    fast = torchgraft.lower(model, torch.randn(2, 3, 8), backend="native")
    calls = targets(fast)
    assert calls.count(packed_linears._LINEAR) == 1 and calls.count(packed_linears.linear_and_sum) == 1
    assert functional.linear not in calls and len(calls) <= 4  # and checks of the inputs
    for x in (
        torch.randn(2, 3, 8),
        torch.randn(5, 1, 8),
        torch.randn(0, 3, 8),
        torch.randn(3, 2, 8).transpose(0, 1),
        torch.randn(2, 3, 16)[..., ::2],
        torch.randn(1, 1, 8).expand(4, 2, 8),
    ):
        torch.testing.assert_close(fast(x), model(x))


def test_a_sum_that_broadcasts_at_other_sizes() -> None:
    model = nn.Linear(4, 6).eval()

    def summed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(x) + y

    fast = torchgraft.lower(summed, (torch.randn(3, 4), torch.randn(3, 6)), backend="native")
    assert packed_linears.linear_and_sum in targets(fast)
    with torch.no_grad():
        for shapes in [((5, 4), (5, 6)), ((5, 4), (1, 6)), ((1, 4), (5, 6)), ((5, 4), (5, 1)), ((5, 4), (1, 1))]:
            x, y = (torch.randn(shape) for shape in shapes)
            torch.testing.assert_close(fast(x, y), summed(x, y))


def test_addmm_with_constants_is_a_linear_layer() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.gelu(torch.addmm(self.bias, x.view(-1, 4), self.weight), approximate="tanh")

    model = Transposed().eval()
    fast = torchgraft.lower(model, torch.randn(3, 2, 4), backend="native")
    assert packed_linears._LINEAR in targets(fast)
    x = torch.randn(7, 1, 4)
    torch.testing.assert_close(fast(x), model(x).detach())


def test_a_result_that_is_used_twice_stays() -> None:
    model = nn.Linear(4, 4).eval()
    twice = torchgraft.lower(lambda x: (y := model(x)) * torch.relu(y), torch.randn(3, 4), backend="native")
    x = torch.randn(2, 4)
    torch.testing.assert_close(twice(x), (model(x) * torch.relu(model(x))).detach())


def test_inputs_that_a_layer_refuses_are_refused() -> None:
    fast = torchgraft.lower(nn.Linear(4, 6).eval(), torch.randn(3, 4), backend="native")
    for wrong in (torch.randn(3, 5), torch.randn(3, 3)):
        with pytest.raises(RuntimeError):
            fast(wrong)


def test_small_layers_and_other_types_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    double = nn.Linear(4, 6).double().eval()
    fast = torchgraft.lower(double, torch.randn(3, 4).double(), backend="native")
    assert packed_linears._LINEAR not in targets(fast)
    monkeypatch.setattr(packed_linears, "_LEAST_WORK", 1 << 17)
    fast = torchgraft.lower(nn.Linear(4, 6).eval(), torch.randn(3, 4), backend="native")
    assert packed_linears._LINEAR not in targets(fast)
