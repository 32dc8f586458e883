"""What remembers numbers beyond a watched run: the model runs as before afterwards, and sizes stay free where they can."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import torchgraft


@functools.lru_cache(16)
def doubled(batch: int, width: int) -> tuple[int, int]:
    return batch * 2, width


@functools.cache
def table(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(shape[1])


def closed_over() -> Callable[[int], torch.Tensor]:
    remembered = functools.lru_cache(lambda width: torch.arange(width))

    def call(*args: Any) -> torch.Tensor:
        return remembered(*args)

    return call


in_closure = closed_over()


class Remembering(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(2, 1).reshape(doubled(x.shape[0], x.shape[1])) + table(x.shape) + in_closure(x.shape[1])


class Method(nn.Module):
    @functools.lru_cache  # noqa: B019
    def ramp(self, width: int) -> torch.Tensor:
        return torch.arange(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.ramp(x.shape[1])


class Handled(nn.Module):
    """Goes on without remembering where a key cannot be one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            shape = doubled(x.shape[0], x.shape[1])
        except TypeError:
            shape = (1, 1)
        return x.repeat(2, 1).reshape(shape)


@pytest.mark.parametrize("kind", [Remembering, Method, Handled])
def test_sizes_stay_free_and_nothing_is_remembered(kind: type[nn.Module]) -> None:
    for function in (doubled, table, Method.ramp):
        function.cache_clear()  # type: ignore[attr-defined]
    model = kind()
    for _ in range(2):
        program = torchgraft.capture(model, (torch.randn(3, 4),))
        size = len(program.graph.nodes)
        assert doubled.cache_info().currsize == table.cache_info().currsize == 0
        assert type(doubled) is functools._lru_cache_wrapper
        for shape in ((3, 4), (5, 4), (3, 6)):
            x = torch.randn(shape)
            assert torch.equal(program(x), model(x))
        assert len(program.graph.nodes) == size
        doubled.cache_clear()
        table.cache_clear()


MEMO = """
import torch
tables, seen = {}, set()

def positions(width):
    if width not in tables:
        tables[width] = torch.arange(width)
    return tables[width]

def shape(batch, width):
    seen.add(width)
    return tables.setdefault((batch, width), [batch * 2, width])
"""


@pytest.fixture
def elsewhere() -> ModuleType:
    """A file that is not the model's, with tables of its own."""
    module = ModuleType("elsewhere")
    exec(compile(MEMO, "elsewhere.py", "exec"), vars(module))
    return module


@pytest.mark.parametrize("name", ["positions", "shape"])
def test_tables_elsewhere_keep_no_number_of_the_run(elsewhere: ModuleType, name: str) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if name == "positions":
                return x + elsewhere.positions(x.shape[1])
            return x.repeat(2, 1).reshape(elsewhere.shape(x.shape[0], x.shape[1]))

    model, x = Model(), torch.randn(3, 4)
    program = torchgraft.capture(model, (x,))
    size = len(program.graph.nodes)
    kept = [
        *elsewhere.tables,
        *elsewhere.seen,
        *[item for key in elsewhere.tables if type(key) is tuple for item in key],
    ]
    assert {type(key) for key in kept} <= {int, tuple}
    assert torch.equal(program(x), model(x))
    assert len(program.graph.nodes) == size
    y = torch.randn(3, 6)
    assert model(y).shape[-1] == 6
    with pytest.raises(torchgraft.GuardError):
        program(y)


def test_a_number_that_is_drawn_and_made_a_key_keeps_the_model_whole() -> None:
    drawn: dict[float, int] = {}

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            number = random.random()
            drawn[number] = len(drawn)
            return x * number

    program = torchgraft.capture(Model(), (torch.ones(3),))
    assert "key of a table" in program.meta["kept_whole"][""]
    assert all(type(key) is float for key in drawn)
    assert not torch.equal(program(torch.ones(3)), program(torch.ones(3)))


def test_a_dtype_that_is_a_key_is_plain_and_sizes_stay_free() -> None:
    names: dict[torch.dtype, float] = {}

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(x.shape[1], -1) * names.setdefault(x.dtype, 2.0)

    program = torchgraft.capture(Model(), (torch.ones(3, 4),))
    assert [type(key) for key in names] == [torch.dtype]
    assert program(torch.ones(5, 6)).shape == (6, 5)
    with pytest.raises(torchgraft.GuardError):
        program(torch.ones(3, 4, dtype=torch.float64))
