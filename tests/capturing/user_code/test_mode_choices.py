"""Values chosen by the mode (`0.0 if not self.training else self.rate`) stay a choice in a captured program."""

from __future__ import annotations

import copy
import functools
import importlib.util
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.capturing.watched import refused_in_the_other_mode
from torchgraft import GuardError, capture


def same_in_both_modes(model: nn.Module, x: torch.Tensor, level: str = "module") -> Any:
    """Capture in each mode, and compare in both, gradients included."""
    program = None
    for training in (False, True):
        model.train(training)
        program = capture(model, (x,), level=level)
        for mode in (False, True, False):
            ours, theirs = program.train(mode), copy.deepcopy(model).train(mode)
            torch.manual_seed(7)
            found = ours(x)
            torch.manual_seed(7)
            expected = theirs(x)
            assert torch.equal(found, expected), (training, mode)
            if expected.requires_grad:
                parameters = list(theirs.parameters())
                wanted = torch.autograd.grad(expected.sum(), parameters)
                given = torch.autograd.grad(found.sum(), list(ours.parameters()))
                assert all(map(torch.equal, given, wanted))
    return program


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 8)
        self.attention_dropout = 0.4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.projection(x)[:, None]
        y = F.scaled_dot_product_attention(y, y, y, dropout_p=0.0 if not self.training else self.attention_dropout)
        return y[:, 0]


class Parent(nn.Module):
    rate = 0.25

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


class Several(Parent):
    """A private name, `super()`, a default, another function inside, and a choice the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.__private = 0.5

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        def inner(y: torch.Tensor) -> torch.Tensor:
            return F.dropout(y, self.__private if self.training else 0.0)

        return super().scaled(inner(self.linear(x))) * (scale if self.training else 1.5)


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) + 1

    return wrapper


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    @decorated
    @decorated
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (
            0.5
            if not self.training
            else 2.0
        )  # fmt: skip


class MayNotMatter(nn.Module):
    def __init__(self, noise: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.noise = noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.noise > 0:
            x = x + torch.randn_like(x) * self.noise
        return self.linear(x)


@pytest.mark.parametrize("level", ["module", "function"])
@pytest.mark.parametrize("kind", [Attention, Several, Decorated, functools.partial(MayNotMatter, 0.0)])
def test_both_modes_are_right(kind: Any, level: str) -> None:
    torch.manual_seed(0)
    program = same_in_both_modes(kind(), torch.randn(4, 5, 8), level)
    assert not [guard for guard in program.guards if "training" in str(guard.node.target)]
    assert program.meta["kept_whole"] == {}


def test_the_choice_can_be_read() -> None:
    assert "(0.0, 0.4)[" in capture(Attention().eval(), (torch.randn(4, 5, 8),)).code


def test_what_does_matter_is_a_guard() -> None:
    x = torch.randn(2, 8)
    program = capture(MayNotMatter(0.5).eval(), (x,))
    program(x)
    with pytest.raises(GuardError, match=r"self\.training"):
        program.train()(x)


def test_equal_values_are_no_choice() -> None:
    model = Attention().eval()
    model.attention_dropout = 0.0
    program = same_in_both_modes(model, torch.randn(4, 5, 8))
    assert "dropout_p = 0.0" in program.code and "[" not in program.code.partition("dropout_p")[2].split("\n")[0]


class OneSided(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            noise = 0.5
        return x * (noise if self.training else 1.0)  # in evaluation mode there is no such name


class OfTensors(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return y if self.training else x


class OfFlags(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled = True if self.training else False
        return x * 2 if doubled else x


class OfKinds(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (2 if self.training else 1.5)


@pytest.mark.parametrize("kind", [OneSided, OfTensors, OfFlags, OfKinds])
def test_other_choices_are_guards(kind: Any) -> None:
    refused_in_the_other_mode(kind, torch.arange(4))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rate = self.rate if self.training else 0.0
        return x * rate if rate > 0 else x


def test_a_choice_that_decides_is_a_guard() -> None:
    x = torch.ones(3)
    model = Branching().eval()
    program = capture(model, (x,))
    assert torch.equal(program(x), x)
    with pytest.raises(GuardError):
        program.train()(x)


SOURCE = """
from torch import nn
class Model(nn.Module):
    def forward(self, x):
        return x * (2.0 if self.training else {})
"""


def loaded(path: Path) -> Any:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_a_file_that_was_edited_since_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "edited_since.py"
    path.write_text(SOURCE.format(3.0))
    model = loaded(path).Model().eval()
    path.write_text(SOURCE.format(4.0))
    x = torch.ones(2)
    program = capture(model, (x,))
    assert torch.equal(program(x), x * 3)
    with pytest.raises(GuardError, match=r"self\.training"):
        program.train()(x)


def test_without_source_it_is_a_guard() -> None:
    scope: dict[str, Any] = {"__name__": "nowhere"}
    exec(SOURCE.format(3.0), scope)
    x = torch.ones(2)
    program = capture(scope["Model"]().eval(), (x,))
    assert torch.equal(program(x), x * 3)
    with pytest.raises(GuardError, match=r"self\.training"):
        program.train()(x)


def test_the_method_is_left_as_it_was() -> None:
    before, names = Attention.forward.__code__, set(globals())
    capture(Attention().eval(), (torch.randn(4, 5, 8),))
    assert Attention.forward.__code__ is before
    assert set(globals()) == names


def test_a_replaced_method_is_looked_at_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 5, 8)
    capture(Attention().eval(), (x,))
    monkeypatch.setattr(Attention, "forward", lambda self, x: self.projection(x))
    model = Attention().eval()
    assert torch.equal(capture(model, (x,))(x), model.projection(x))


def test_other_threads_may_run_the_model_meanwhile() -> None:
    torch.manual_seed(0)
    model, x = Attention().eval(), torch.randn(4, 5, 8)
    expected, failures, is_over = model(x), [], threading.Event()

    def run() -> None:
        while not is_over.is_set():
            if not torch.equal(model(x), expected):
                failures.append("another result")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(30):
            assert torch.equal(capture(model, (x,))(x), expected)
    finally:
        is_over.set()
        thread.join()
    assert not failures
