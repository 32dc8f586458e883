"""What a `train()` of a model's own means for its program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchgraft import GuardError, capture
from torchgraft.capturing.mode_switches import has_own_train, only_switches


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.kernels, self.notes = False, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.linear(x))


class Polite(Plain):
    """As the models of transformers have it."""

    def train(self, mode: bool = True) -> Any:
        result = super().train(mode)
        if self.kernels:
            self.linear = nn.Identity()
        return result


class Asking(Plain):
    """Looks at flags of its own and of its class, by name too."""

    is_strict = False

    @property
    def uses_kernels(self) -> bool:
        return getattr(self, "_kernels", False)

    def replace_all(self) -> None:
        self.linear = nn.Identity()

    def train(self, mode: bool = True) -> Any:
        is_changed = self.training != mode
        result = super().train(mode)
        if (self.uses_kernels or self.is_strict) and is_changed:
            self.replace_all()
        return result


class AskingForMore(Asking):
    """The same, and it has what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._kernels = True


class Strict(Asking):
    is_strict = True


class AskingInCircles(Plain):
    """Two properties that mention one another."""

    @property
    def first(self) -> bool:
        return self.kernels if self.kernels is not None else self.second

    @property
    def second(self) -> bool:
        return self.kernels if self.kernels is not None else self.first

    def train(self, mode: bool = True) -> Any:
        result = super().train(mode)
        if self.first:
            self.linear = nn.Identity()
        return result


class AskingByName(Plain):
    """A name that is put together is none that a look at the code shows."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        inner = getattr(self, "dr" + "op"[self.kernels :], None)
        if inner is not None:
            inner.training = False
        return self


class WalkingThrough(Plain):
    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        for inner in self.children():
            inner.training = False
        return self


class Frozen(Plain):
    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.drop.eval()
        return self


class Merging(Plain):
    def train(self, mode: bool = True) -> Any:
        if mode != self.training:
            self.linear.weight.data += 1 if mode else -1
        return super().train(mode)


class Noting(Plain):
    def train(self, mode: bool = True) -> Any:
        self.mode = mode
        return super().train(mode)


class Failing(Plain):
    def train(self, mode: bool = True) -> Any:
        if mode:
            raise ValueError("not to be trained")
        return super().train(mode)


def test_who_has_a_train_of_its_own() -> None:
    assert not has_own_train([Plain(), nn.Linear(1, 1)])
    assert has_own_train([nn.Linear(1, 1), Polite()])


@pytest.mark.parametrize("kind", [Plain, Polite, Asking, AskingInCircles])
def test_switching_only(kind: type[Plain]) -> None:
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(3, 4)
    assert only_switches(model, list(model.modules()))
    program = capture(model, (x,))
    model.train(), program.train()
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    assert torch.equal(program(x), expected)


@pytest.mark.parametrize(
    "kind", [Frozen, Merging, Noting, Failing, AskingForMore, Strict, AskingByName, WalkingThrough]
)
def test_switching_that_does_more_is_refused(kind: type[Plain]) -> None:
    model, x = kind(), torch.randn(3, 4)
    for module in model.modules():
        module.training = False
    weight = model.linear.weight.detach().clone()
    assert not only_switches(model, list(model.modules()))
    program = capture(model, (x,))
    assert torch.equal(model.linear.weight, weight) and not model.training and not model.drop.training
    assert torch.equal(program(x), model(x))
    with pytest.raises(GuardError, match=r"train\(\) of its own"):
        program.train()(x)


def test_what_a_switch_notes_in_a_list_is_put_back() -> None:
    class Listing(Plain):
        def train(self, mode: bool = True) -> Any:
            self.notes.append(mode)
            return super().train(mode)

    model, x = Listing(), torch.randn(3, 4)
    model.eval()
    notes = list(model.notes)
    program = capture(model, (x,))
    assert model.notes == notes and torch.equal(program(x), model(x))


def test_a_train_that_is_replaced_is_looked_at_anew() -> None:
    class Replaced(Polite):
        pass

    model = Replaced()
    assert only_switches(model, list(model.modules()))

    def train(self: Any, mode: bool = True) -> Any:
        Plain.train(self, mode)
        inner = getattr(self, "drop", None)
        if inner is not None:
            inner.training = False
        return self

    Replaced.train = train  # type: ignore[method-assign]
    assert not only_switches(model, list(model.modules()))
