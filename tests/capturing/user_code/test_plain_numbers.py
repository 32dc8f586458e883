"""`int`, `float` and `len` of what is symbolic: the number flows on, and is fixed only where something is decided by it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.capturing.watched import captured_like_eager, given, is_looked_into, normal
from torchgraft import GuardError, capture
from torchgraft.capturing.user_code import plain_numbers


def rows(x: torch.Tensor) -> int:
    return len(x)


def halves(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(size) // 2 for size in x.shape)


def scaled(size: int, factor: float) -> int:
    return int(float(size) / factor)


def groups(index: torch.Tensor) -> int:
    return int(index.max()) + 1


class Rows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(rows(x), -1) * len(x)


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = halves(x)
        return x[:height, :width] + torch.zeros(int(x.shape[0]) // 2, scaled(x.shape[1], 2))


class Groups(nn.Module):
    """Adds up rows by an index; how many groups there are is in its values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.arange(len(x)) // 2
        return torch.zeros(groups(index), x.shape[1]).index_add(0, index, x)


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum()) + int(x.mean() * 100) + int(x[0, 0] > 0)


class Chosen(nn.Module):
    """Has a choice by the mode in the same function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(len(x), -1) * (2.0 if self.training else 3.0)


class Loop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in range(len(x)):
            x = x + step
        return x


class Decided(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if int(x.sum()) > 0 else x - 1


class Shadowed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        int = plainly
        return x * int(x.shape[0])


def plainly(number: float) -> int:
    return number.__int__() + 1


class Nested(nn.Module):
    """The function that asks is made anew in every run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def count() -> int:
            return len(x)

        return x * count()


@pytest.mark.parametrize("kind", [Rows, Halves, Groups, Scaled, Chosen])
def test_numbers_that_only_flow(kind: type[nn.Module]) -> None:
    program = captured_like_eager(kind, given(normal(4, 6)), [given(normal(8, 6)), given(normal(4, 10))])
    assert is_looked_into(program)
    assert not program.guards


@pytest.mark.parametrize("training", [False, True])
def test_choices_by_the_mode_stay_choices(training: bool) -> None:
    model = Chosen().train(training)
    program, x = capture(model, (torch.randn(4, 6),)), torch.randn(3, 2)
    for mode in (not training, training):
        assert torch.equal(program.train(mode)(x), model.train(mode)(x))


@pytest.mark.parametrize("kind", [Loop, Shadowed, Nested])
def test_numbers_that_decide(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(4, 6)
    program = capture(model, (x,))
    assert torch.equal(program(x), model(x))
    with pytest.raises(GuardError):
        program(torch.randn(5, 6))


def test_values_that_decide() -> None:
    model = Decided()
    program = capture(model, (torch.ones(4, 6),))
    assert torch.equal(program(torch.ones(2, 2)), model(torch.ones(2, 2)))
    with pytest.raises(GuardError):
        program(-torch.ones(4, 6))


def test_functions_keep_their_code_and_are_known_the_next_time() -> None:
    before = rows.__code__
    capture(Rows(), (torch.randn(4, 6),))
    assert rows.__code__ is before
    assert id(before) in plain_numbers._known
    assert rows(torch.ones(3)) == 3 and type(rows(torch.ones(3))) is int


def test_too_many_elements_raise_as_in_eager() -> None:
    with pytest.raises((RuntimeError, ValueError)):
        capture(lambda x: x * int(x), (torch.ones(3),))


class Mapped(nn.Module):
    """Asks in a way that is not written as a call, beside one that is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = map(int, x.shape)
        return x.reshape(width, height) * int(x.shape[0])


def test_other_ways_of_asking_are_guards() -> None:
    model, x = Mapped(), torch.randn(4, 6)
    for _ in range(2):
        program = capture(model, (x,))
        assert torch.equal(program(x), model(x))
        with pytest.raises(GuardError):
            program(torch.randn(5, 6))


def test_functions_are_found_by_their_names() -> None:
    for function in (rows, Rows.forward, plain_numbers._named):
        assert plain_numbers._named(function.__code__, function.__globals__) is function
    nested = next(item for item in Nested.forward.__code__.co_consts if hasattr(item, "co_code"))
    assert plain_numbers._named(nested, globals()) is None
