"""What a forward changes outside of its model is put back, and the trace refused with the line that mentions it."""

from __future__ import annotations

import builtins
import collections
import random
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import torchgraft as fx
from torchgraft.capturing.pictures import picture_of

COUNT = 0
ITEMS: list[Any] = [1]
TABLE: dict[str, Any] = {"calls": 0}
SEEN: set[Any] = {1}
QUEUE: Any = collections.deque([1])
SHARED = random.Random(3)
ARRAY = numpy.zeros(3)
GENERATOR = numpy.random.default_rng(3)
STATE = numpy.random.RandomState(3)
TORCH_GENERATOR = torch.Generator().manual_seed(3)
MEMO: dict[int, torch.Tensor] = {}


class Notes:
    calls = 0
    items: list[Any] = []

    def __init__(self) -> None:
        self.count = 0


NOTES = Notes()


def rebinds(x):
    global COUNT
    COUNT += 1
    return x * COUNT


def deletes(x):
    global COUNT
    del COUNT
    return x


def appends(x):
    ITEMS.append(x)
    return x


def fills(x):
    TABLE["calls"] += 1
    return x


def adds(x):
    SEEN.add(2)
    return x


def queues(x):
    QUEUE.append(x)
    return x


def draws(x):
    return x * SHARED.random()


def writes_an_array(x):
    ARRAY[0] += 1
    return x


def draws_from_a_generator(x):
    return x * float(GENERATOR.random())


def draws_from_a_state(x):
    return x * float(STATE.rand())


def seeds_a_generator(x):
    TORCH_GENERATOR.manual_seed(4)
    return x


def writes_a_class(x):
    Notes.calls += 1
    return x


def writes_a_list_of_a_class(x):
    Notes.items.append(x)
    return x


def adds_to_a_class(x):
    Notes.late = 1
    return x


def writes_an_object(x):
    NOTES.count += 1
    return x


def calls_another(x):
    return appends(x)


def inside_a_function(x):
    return [ITEMS.append(item) or x for item in (1, 2)].pop()


CHANGING = [
    rebinds, deletes, appends, fills, adds, queues, draws, writes_an_array, draws_from_a_generator, draws_from_a_state,
    seeds_a_generator, writes_a_class, writes_a_list_of_a_class, adds_to_a_class, writes_an_object, calls_another,
    inside_a_function,
]  # fmt: skip


def picture() -> Any:
    return (
        COUNT, list(ITEMS), dict(TABLE), set(SEEN), list(QUEUE), SHARED.getstate(), ARRAY.tolist(), Notes.calls,
        repr(GENERATOR.bit_generator.state), repr(STATE.get_state()), TORCH_GENERATOR.get_state().tolist(),
        list(Notes.items), hasattr(Notes, "late"), vars(NOTES).copy(),
    )  # fmt: skip


@pytest.mark.parametrize("function", CHANGING, ids=lambda function: function.__name__)
@pytest.mark.parametrize("raises", [False, True], ids=["traced", "raising"])
def test_what_is_outside_is_put_back_and_refused(function, raises) -> None:
    class Model(nn.Module):
        def forward(self, x):
            result = function(x)
            if raises:
                raise LookupError
            return result

    before = picture()
    with pytest.raises(LookupError if raises else fx.TraceError):
        fx.symbolic_trace(nn.Sequential(Model()))
    assert picture() == before


def test_the_message_names_the_line() -> None:
    with pytest.raises(
        fx.TraceError,
        match=r'it writes TABLE at .*test_outside_state.py:\d+ "TABLE\["calls"\] \+= 1", .* Everything is left',
    ):
        fx.symbolic_trace(fills)


class OnClass(nn.Module):
    calls = 0
    seen: list[Any] = []

    def __init__(self, write) -> None:
        super().__init__()
        self.write = write

    def forward(self, x):
        self.write(type(self), x)
        return x * type(self).calls


@pytest.mark.parametrize(
    "write",
    [
        lambda cls, x: setattr(cls, "calls", cls.calls + 1),
        lambda cls, x: cls.seen.append(x),
        lambda cls, x: setattr(cls, "late", 2),
    ],
)
def test_attributes_of_the_class_of_a_module(write) -> None:
    with pytest.raises(fx.TraceError, match="OnClass"):
        fx.symbolic_trace(nn.Sequential(OnClass(write)))
    assert OnClass.calls == 0 and OnClass.seen == [] and not hasattr(OnClass, "late")


class Holding(nn.Module):
    def __init__(self, thing, use) -> None:
        super().__init__()
        self.thing, self.use = thing, use

    def forward(self, x):
        return x * float(self.use(self.thing))


@pytest.mark.parametrize(
    ("thing", "use"),
    [
        (random.Random(1), lambda thing: thing.random()),
        (numpy.random.default_rng(1), lambda thing: thing.random()),
        (numpy.zeros(2), lambda thing: thing.__setitem__(0, 3) or 1),
        (torch.Generator(), lambda thing: thing.manual_seed(7) and 1),
        ([numpy.zeros(2)], lambda thing: thing[0].__setitem__(0, 3) or 1),
    ],
    ids=["random", "numpy", "array", "generator", "nested"],
)
def test_state_of_things_on_the_model(thing, use) -> None:
    watched = picture_of(thing[0] if isinstance(thing, list) else thing)
    with pytest.raises(fx.TraceError, match=r"it writes self\.thing"):
        fx.symbolic_trace(Holding(thing, use))
    assert watched() is False


def test_what_is_only_read_is_no_change() -> None:
    def forward(x):
        return x * len(ITEMS) + TABLE["calls"] + float(ARRAY[0]) + Notes.calls + random.Random(4).random()

    assert fx.symbolic_trace(forward)(torch.zeros(1)).item() == pytest.approx(random.Random(4).random())


def test_memos_of_constants_are_computed_anew() -> None:
    def forward(x):
        if 3 not in MEMO:
            MEMO[3] = torch.arange(3.0)
        return x + MEMO[3]

    assert fx.symbolic_trace(forward)(torch.zeros(3)).tolist() == [0, 1, 2]
    assert MEMO == {}


def test_programs_can_be_traced_again() -> None:
    program = fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    assert fx.symbolic_trace(program)(torch.zeros(1)) == 1
    assert fx.symbolic_trace(nn.Sequential(program, nn.ReLU()))(torch.zeros(1)) == 1


def test_a_namespace_is_no_business_of_ours_unless_it_is_at_home() -> None:
    assert picture_of(SimpleNamespace()) is None


_written = 0


class _ByName(torch.nn.Module):
    def forward(self, x):
        globals()["_written"] = globals()["_written"] + 1
        return x * _written


class _InBuiltins(torch.nn.Module):
    def forward(self, x):
        builtins.torchgraft_count = getattr(builtins, "torchgraft_count", 0) + 1
        return x * builtins.torchgraft_count


class _InItsText(torch.nn.Module):
    """0"""

    def forward(self, x):
        _InItsText.__doc__ = str(int(_InItsText.__doc__) + 1)
        return x * int(_InItsText.__doc__)


class _OnTheWay(torch.nn.Module):
    def forward(self, x):
        import tests.capturing.test_outside_state as here

        here._written = here._written + 1
        return x * here._written


@pytest.mark.parametrize("kind", [_ByName, _InBuiltins, _InItsText, _OnTheWay])
def test_counts_that_no_name_shows_are_put_back_and_kept_whole(kind) -> None:
    global _written
    _written, _InItsText.__doc__ = 0, "0"
    vars(builtins).pop("torchgraft_count", None)
    model, x = kind(), torch.ones(1)
    try:
        program = fx.capture(model, (x,))
        assert "" in program.meta["kept_whole"]
        assert [program(x).item() for _ in range(3)] == [1, 2, 3]
        with pytest.raises(fx.TraceError, match="outside"):
            fx.symbolic_trace(model)
        assert program(x).item() == 4
    finally:
        vars(builtins).pop("torchgraft_count", None)
