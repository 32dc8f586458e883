"""Comparisons by identity with modes and dtypes are answered as in eager, wherever the model makes them."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from torch import nn

from tests.capturing.watched import refused_in_the_other_mode
from torchgraft import GuardError, capture
from torchgraft.capturing.identities import compares_identity


def scaled(x: torch.Tensor, training: bool) -> torch.Tensor:
    return x * 2 if training is True else x


def widened(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return x * 3 if kind is torch.float32 else x


tools = types.ModuleType("tools")
exec("def doubled(x, training):\n    return x if training is False else x * 2", vars(tools))


class ByName(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mode = self.training
        return x * 2 if mode is True else x


class ByFunction(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(x, self.training)


class ByModule(nn.Module):
    """The text of the function is nowhere to be found, so it gets plain modes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tools.doubled(x, self.training)  # type: ignore[no-any-return]


class ByChoice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled = True if self.training else False
        return x * 2 if doubled is not False else x


@pytest.mark.parametrize("kind", [ByName, ByFunction, ByModule, ByChoice])
def test_modes(kind: type[nn.Module]) -> None:
    refused_in_the_other_mode(kind, torch.randn(3))


class DtypeByName(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.dtype
        return x * 3 if kind is torch.float32 else x


class DtypeByFunction(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return widened(x, x.dtype)


class DtypesOfTwo(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = x.dtype, torch.ones(1).dtype
        return x * 3 if one is other else x


@pytest.mark.parametrize("kind", [DtypeByName, DtypeByFunction, DtypesOfTwo])
def test_dtypes(kind: type[nn.Module]) -> None:
    for x in (torch.randn(3), torch.randn(3).double()):
        model = kind()
        program = capture(model, (x,))
        assert torch.equal(program(x), model(x)) and program.meta["kept_whole"] == {}
        other = x.float() if x.dtype is torch.float64 else x.double()
        with pytest.raises(GuardError, match="dtype"):
            program(other)


def test_what_is_looked_at() -> None:
    def with_none(x: Any) -> bool:
        return x is None or x is not None

    def with_class(x: Any) -> bool:
        return type(x) is torch.Tensor

    def with_bool(x: Any) -> bool:
        return x is True

    def with_dtype(x: Any) -> bool:
        return x.dtype is torch.half

    found = [compares_identity(item.__code__) for item in (with_none, with_class, with_bool, with_dtype)]
    assert found == [False, False, True, True]


def test_inputs_are_compared_before_anything_is_written() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return query if query is key else query + key

    model, x = Counted(), torch.ones(2)
    program = capture(model, (x, torch.ones(2)))
    with pytest.raises(GuardError, match=r"(?s)one tensor.*return query if query is key else query \+ key"):
        program(x, x)
    assert model.calls == 0


@pytest.mark.parametrize("left", [lambda x: x, lambda x: x * 5])
def test_what_was_given_in_a_list_is_compared_and_not_what_was_left_there(left: Any) -> None:
    def function(cache: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        first = cache[0]
        result = x * 2 if first is x else x * 3
        cache[0] = left(x)
        return result

    x, cache = torch.ones(2), [torch.zeros(2)]
    program = capture(function, ([torch.ones(2)], x))
    assert program(cache, x).tolist() == [3, 3] and torch.equal(cache[0], left(x))
    with pytest.raises(GuardError, match="one tensor"):
        program([x], x)


def test_functions_are_left_as_they_were() -> None:
    before = copy.copy([scaled.__code__, widened.__code__])
    capture(ByFunction(), (torch.ones(2),))
    capture(DtypeByFunction(), (torch.ones(2),))
    assert [scaled.__code__, widened.__code__] == before
