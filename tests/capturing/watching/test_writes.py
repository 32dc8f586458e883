"""All of torch's ways to write a tensor are recorded, or keep what writes whole; the model and the inputs are as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchgraft import capture, wrap


def shares_memory(y: Any) -> Any:
    z = torch.empty(0)
    z.set_(y)
    z.mul_(3)
    return y


def writes_parts_of_complex_numbers(y: Any) -> Any:
    s = y.to(torch.complex64)
    s.imag = torch.ones(3, 4)
    s.real = s.real * 2
    return torch.view_as_real(s)


def takes_data(y: Any) -> Any:
    z = y + 1
    z.data = y
    z.mul_(2)
    return y


def writes_many(y: Any) -> Any:
    torch._foreach_mul_([y], 3.0)
    return y


def writes_out(y: Any) -> Any:
    found = torch.empty(0)
    torch.mul(y, 2, out=found)
    return found + torch.add(y, 1, out=y)


def writes_by_operators(y: Any) -> Any:
    torch.ops.aten.mul_(y, 2)
    y.view(-1).copy_(torch.arange(12.0))
    y[0] = 5
    y += 1
    y.T[0] = 3
    return y


def writes_past_autograd(y: Any) -> Any:
    y.detach().mul_(3)
    y.as_strided((2, 2), (1, 2)).zero_()
    return nn.init.ones_(torch.empty(3, 4)) + y


def takes_storage(y: Any) -> Any:
    torch.empty(0).set_(y.untyped_storage(), 0, (12,)).mul_(2)
    return y


def swaps(y: Any) -> Any:
    a, b = y + 1, y + 2
    torch.utils.swap_tensors(a, b)
    return a


def writes_an_array(y: Any) -> Any:
    y.numpy()[:] = 3
    return y


def reshapes(y: Any) -> Any:
    y.resize_(2, 2)
    return y * 2


WRITES = [
    shares_memory, writes_parts_of_complex_numbers, takes_data, writes_many, writes_out, writes_by_operators,
    writes_past_autograd, takes_storage, swaps, writes_an_array, reshapes,
]  # fmt: skip


@pytest.mark.parametrize("level", ["module", "function"])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_writes(write: Callable[[Any], Any], level: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return write(x * 1)

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    before = x.clone()
    program = capture(function, (x,), level=level)
    assert torch.equal(x, before)
    assert torch.equal(program(y), function(y)) and torch.equal(program(y), function(y))


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3, 4))
        self.plain = torch.zeros(3, 4, dtype=torch.complex64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.empty(0)
        z.set_(self.total)
        z.add_(x)
        self.plain.imag = x
        return self.total + self.plain.imag


@pytest.mark.parametrize("level", ["module", "function"])
def test_what_the_model_keeps_is_put_back_and_then_written(level: str) -> None:
    model, twin, x = Kept(), Kept(), torch.randn(3, 4)
    program = capture(model, (x,), level=level)
    assert not model.total.any() and not model.plain.imag.any()
    for _ in range(2):
        assert torch.equal(program(x), twin(x)) and torch.equal(model.total, twin.total)
        assert torch.equal(model.plain, twin.plain)


@wrap
def doubles(tensor: Any) -> Any:
    tensor.mul_(2)
    return tensor.sum()


@pytest.mark.parametrize("part", [slice(None), slice(2, None)])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_what_a_leaf_function_writes_into_parameters_is_put_back(name: str, part: slice) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4), requires_grad=False)
            self.register_buffer("bias", torch.ones(4))

        def forward(self, x: Any) -> Any:
            return x + doubles(getattr(self, name)[part])

    model = Model()
    program = capture(model, torch.ones(4))
    assert torch.equal(model.weight, torch.ones(4)) and torch.equal(model.bias, torch.ones(4))
    expected = Model()
    assert torch.equal(program(torch.ones(4)), expected(torch.ones(4)))
    assert torch.equal(getattr(program, name), getattr(expected, name))
