"""A dtype that only flows is read anew by the program, so that `.double()` and `.half()` mean what they mean on the model."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft import GraphModule, GuardError, capture


def right_in_all(model: nn.Module, x: torch.Tensor, level: str = "module") -> GraphModule:
    """Capture in single precision, cast, and compare bit by bit, gradients included."""
    program = capture(model, (x,), level=level)
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float32):
        ours = pickle.loads(pickle.dumps(copy.deepcopy(program))).to(dtype)
        theirs = copy.deepcopy(model).to(dtype)
        for given in (x, x.to(dtype)):
            found, expected = ours(given), theirs(given)
            assert found.dtype == expected.dtype and torch.equal(found, expected), (dtype, given.dtype)
            wanted = torch.autograd.grad(expected.sum(), list(theirs.parameters()))
            assert all(map(torch.equal, torch.autograd.grad(found.sum(), list(ours.parameters())), wanted))
    return program


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class ToWeights(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x.to(self.linear.weight.dtype))
        return y + torch.ones(4, dtype=y.dtype) + torch.arange(4, dtype=self.linear.weight.dtype)


class Masked(Linear):
    """The way of language models: a mask of the smallest number that there is, softmax in single precision, and back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x.to(self.dtype))
        dtype, device = y.dtype, y.device
        smallest = torch.finfo(dtype).min
        mask = torch.full((y.shape[0], 4), smallest, dtype=dtype, device=device).triu(1)
        mask = mask.masked_fill(y > torch.finfo(y.dtype).max / 2, smallest) + torch.tensor(torch.finfo(dtype).eps).to(y)
        weights = nn.functional.softmax(y + mask, dim=-1, dtype=torch.float32).to(y.dtype)
        return weights.type_as(y) * torch.zeros(4, dtype=torch.result_type(y, y)).add(1)

    @property
    def dtype(self) -> torch.dtype:
        return next(item.dtype for item in self.parameters() if item.is_floating_point())


class Asked(Linear):
    """Questions that all of these answer in the same way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = self.linear.weight.dtype
        is_dtype = isinstance(kind, torch.dtype) and type(kind) is torch.dtype and kind is not None
        if is_dtype and kind.is_floating_point and not kind.is_complex:
            x = x.to(dtype=kind)
        return self.linear(x) * x.new_ones(4, dtype=kind)


@pytest.mark.parametrize("level", ["module", "function"])
@pytest.mark.parametrize("kind", [ToWeights, Masked, Asked])
def test_what_flows_is_right_in_every_precision(kind: type[nn.Module], level: str) -> None:
    torch.manual_seed(0)
    program = right_in_all(kind(), torch.randn(3, 4), level)
    assert not [guard for guard in program.guards if "dtype of" in guard.condition and "is_" not in guard.condition]
    assert program.meta["kept_whole"] == {}


def test_the_code_can_be_read() -> None:
    code = capture(Masked(), (torch.randn(3, 4),)).code
    assert "torch.finfo(getattr_" in code and ".dtype" in code and ".min" in code


class Compared(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (2 if self.linear.weight.dtype == torch.float32 else 3)


class InTuple(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (2 if self.linear.weight.dtype in (torch.float16, torch.float32) else 3)


class AsText(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * len(f"{self.linear.weight.dtype}")


class AsKey(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * {torch.float32: 2, torch.float64: 3}[self.linear.weight.dtype]


class AsSize(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.linear.weight.dtype.itemsize


class ByInformation(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (2 if torch.finfo(self.linear.weight.dtype).bits > 32 else 3)


class InBranch(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = self.linear.weight.dtype
        return self.linear(x.to(kind)) if x.dtype != kind else self.linear(x) * 2


@pytest.mark.parametrize("kind", [Compared, InTuple, AsText, AsKey, AsSize, ByInformation])
def test_what_decides_is_a_guard(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(2, 4)
    program = capture(model, (x,))
    assert torch.equal(program(x), model(x)) and program.meta["kept_whole"] == {}
    with pytest.raises(GuardError):
        program.double()(x.double())


class NotHalf(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.dtype == torch.float16 or y.dtype in (torch.bfloat16, None) or y.dtype is torch.int32:
            y = y.clamp(max=1)
        return y


@pytest.mark.parametrize("kind", [InBranch, NotHalf])
def test_of_dtypes_that_are_compared_the_answer_is_checked(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(2, 4)
    program = capture(copy.deepcopy(model), (x,))
    assert torch.equal(program(x), model(x)) and program.meta["kept_whole"] == {}
    assert torch.equal(program.double()(x.double()), model.double()(x.double()))
    with pytest.raises(GuardError, match="=="):
        program.to(torch.bfloat16)(x.bfloat16() if kind is NotHalf else x.double())


TABLE: dict[Any, Any] = {}


class Remembering(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = self.linear.weight.dtype
        if key not in TABLE:
            TABLE[key] = 2.0
        return self.linear(x) * TABLE[key]


@functools.lru_cache
def remembered(kind: torch.dtype) -> torch.Tensor:
    return torch.ones(4, dtype=kind) * 2


class ByMemo(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * remembered(self.linear.weight.dtype)


class Written(Linear):
    seen = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.linear.weight.dtype
        return self.linear(x.to(self.seen))


@pytest.mark.parametrize("kind", [Remembering, ByMemo, Written])
def test_nothing_of_the_run_is_remembered(kind: type[nn.Module]) -> None:
    TABLE.clear()
    model, x = kind(), torch.randn(2, 4)
    before = dict(vars(model))
    program = capture(model, (x,))
    assert all(type(key) is torch.dtype for key in TABLE) and vars(model).keys() == before.keys()
    assert torch.equal(program(x), model(x))
    expected = copy.deepcopy(model).double()(x.double())
    try:
        assert torch.equal(program.double()(x.double()), expected)
    except GuardError:
        pass


def test_dtypes_are_results_too() -> None:
    class Model(Linear):
        def forward(self, x: torch.Tensor) -> Any:
            promoted = torch.promote_types(self.linear.weight.dtype, torch.float32)
            return {"dtype": self.linear.weight.dtype, "both": (promoted, x.to(promoted))}

    program = capture(Model(), (torch.ones(1),))
    found = program.double()(torch.ones(1))
    assert found["dtype"] is torch.float64 and found["both"][0] is torch.float64
    assert found["both"][1].dtype is torch.float64
    assert program.guards == []


class Holder:
    """Notes what it is made for, as a cache of keys and values does."""

    def __init__(self, like: torch.Tensor) -> None:
        self.dtype = like.dtype
        self.keys = torch.zeros(0, 4, dtype=self.dtype)


def test_dtypes_in_objects() -> None:
    class Model(Linear):
        def forward(self, x: torch.Tensor) -> Any:
            holder = Holder(self.linear(x))
            holder.keys = torch.cat([holder.keys, self.linear(x).to(holder.dtype)])
            return holder

    model, x = Model(), torch.randn(2, 4)
    program = capture(model, (x,))
    for dtype in (torch.float32, torch.float64):
        found, expected = program.to(dtype)(x.to(dtype)), model.to(dtype)(x.to(dtype))
        assert found.dtype is expected.dtype is dtype
        assert torch.equal(found.keys, expected.keys)


def test_kept_whole_modules_get_plain_dtypes() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
            assert type(kind).__name__ == "dtype"
            return x.to(kind)

    class Model(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x, self.linear.weight.dtype)

    program = capture(Model(), (torch.ones(2),), leaf="inner")
    assert program.double()(torch.ones(2)).dtype is torch.float64


def test_the_dead_reads_are_not_in_the_program() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kind = x.dtype
            return x if kind is None else x + 1

    assert "dtype" not in capture(Model(), (torch.ones(2),)).code


def test_finfo_is_torchs_again_afterwards() -> None:
    before = torch.finfo
    capture(Masked(), (torch.randn(3, 4),))
    assert torch.finfo is before and torchgraft.capture is capture
