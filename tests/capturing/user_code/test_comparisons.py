"""Comparisons by identity and by type, found in bytecode; and what becomes of those of a traced value."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchgraft as fx
from torchgraft.capturing.user_code.comparisons import (
    compared_types,
    compared_with_none,
    compares_element_types,
    compares_variables,
    compares_with_bool,
)


def is_wide(dtype):
    return dtype is torch.float32


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x + 1 if x.dtype is torch.float32 else x - 1,
        lambda x: x + 1 if torch.float32 is x.dtype else x - 1,
        lambda x: (dtype := x.dtype, x + 1 if dtype is not torch.half else x)[1],
        lambda x: x + 1 if x.relu().dtype is x.dtype else x,
        lambda x: x + 1 if is_wide(x.dtype) else x - 1,
        lambda x: x + 1 if x.layout is torch.strided else x,
    ],
)
def test_an_element_type_compared_by_identity_is_refused(model) -> None:
    with pytest.raises(
        fx.TraceError, match=r"(?s)cannot compare by `is` the .*test_comparisons.py.*torchgraft.capture"
    ):
        fx.symbolic_trace(model)


def test_element_types_that_are_only_handed_on_are_not() -> None:
    program = fx.symbolic_trace(lambda x, mask: x if mask is None else x.to(mask.dtype))
    assert program(torch.ones(1), torch.ones(1, dtype=torch.int64)).dtype is torch.int64


class Moded(nn.Module):
    def __init__(self, ask) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x):
        return x + 1 if self.ask(self) else x - 1


def is_true(value):
    return value is True


@pytest.mark.parametrize(
    "ask",
    [
        lambda self: self.training is True,
        lambda self: (mode := self.training, mode is not False)[1],
        lambda self: is_true(self.training),
    ],
)
@pytest.mark.parametrize("mode", [True, False])
def test_a_mode_compared_by_identity_is_answered_and_checked(ask, mode) -> None:
    model = Moded(ask).train(mode)
    program = fx.symbolic_trace(model)
    assert program(torch.zeros(1)) == model(torch.zeros(1)) == (1 if mode else -1)
    with pytest.raises(fx.GuardError, match="mode"):
        program.train(not mode)(torch.zeros(1))


def test_what_is_found() -> None:
    assert compares_variables((lambda a, b: a is b).__code__)
    assert not compares_variables((lambda a, b: a is None and a == b and a.x is b.x).__code__)
    assert compares_with_bool((lambda a: a is True).__code__)
    assert not compares_with_bool((lambda a: a is None or a == True).__code__)  # noqa: E712
    assert compares_element_types((lambda a: a.dtype is torch.half).__code__)
    assert not compares_element_types((lambda a: a.dtype == torch.half or a.dtype is None).__code__)
    assert compared_with_none((lambda a, b: a if b is None else b).__code__, "b") is not None
    assert compared_with_none((lambda a, b: a if b is None else b).__code__, "a") is None
    assert list(compared_types((lambda a, b: type(a) is int and isinstance(b, int)).__code__)) == ["a"]


def test_functions_inside_are_looked_at() -> None:
    assert compares_with_bool((lambda items: [item for item in items if (lambda: item is True)()]).__code__)
