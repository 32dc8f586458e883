"""Notes that a model makes once are left out of its program; whatever else it changes of itself keeps it whole."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchgraft import GuardError, capture


class Classifier(nn.Module):
    """Finds out at the first call which loss fits the labels, and notes it in its configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.config: Any = SimpleNamespace(problem=None, last=None, calls=0)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.config.problem is None:
            self.config.problem = "single label" if labels.dtype == torch.long else "regression"
        return self.loss(self.linear(x), labels)

    def loss(self, found: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.config.problem == "single label":
            return functional.cross_entropy(found, labels)
        return functional.mse_loss(found, labels)


class Attribute(Classifier):
    problem: str | None = None

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.problem is None:
            self.problem = "single label"
        self.config.problem = None
        return functional.cross_entropy(self.linear(x), labels)


@pytest.mark.parametrize("kind", [Classifier, Attribute])
def test_a_note_that_is_made_once(kind: type[Classifier]) -> None:
    model, x, labels = kind(), torch.randn(2, 4), torch.tensor([0, 2])
    program = capture(model, (x, labels))
    assert not program.meta["kept_whole"] and len(program.graph.nodes) > 4
    assert model.config.problem is None and "problem" not in vars(model)
    others = torch.randn(5, 4), torch.tensor([2, 1, 0, 0, 1])
    assert torch.equal(program(*others), model(*others))


def test_what_the_note_was_decided_by_is_checked() -> None:
    model, x = Classifier(), torch.randn(2, 4)
    program = capture(model, (x, torch.tensor([0, 2])))
    with pytest.raises(GuardError, match="dtype"):
        program(x, torch.randn(2, 3))


class Last(Classifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.config.last = f"{len(x)} rows"
        return self.linear(x)


class Counter(Classifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.config.calls += 1
        return self.linear(x)


class First(Classifier):
    """Does something else the first time."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.config.problem is None:
            self.config.problem = "known"
            return self.linear(x) * 2
        return self.linear(x)


class Kept(Classifier):
    """Keeps what it was given first."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.config.last is None:
            self.config.last = x * 2
        return self.linear(x) + self.config.last[:, :3]


@pytest.mark.parametrize("kind", [Last, Counter, First, Kept])
def test_other_changes_keep_the_model_whole(kind: type[Classifier]) -> None:
    x, labels = torch.randn(2, 4), torch.tensor([0, 2])
    model, other = kind(), kind()
    other.load_state_dict(model.state_dict())
    program = capture(model, (x, labels))
    assert "" in program.meta["kept_whole"] and vars(model.config) == {"problem": None, "last": None, "calls": 0}
    for value in (x, torch.randn(2, 4)):
        assert torch.equal(program(value, labels), other(value, labels))
        assert str(model.config) == str(other.config)


class Output(OrderedDict):
    """A dict that is not to be updated."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("no")


class Passes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Output:
        self.calls += 1
        found = Output()
        found["same"], found["more"] = x, x + 1
        return found


class Around(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.passes = Passes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        found = self.passes(x)
        return found["same"] + found["more"]


def test_a_part_that_is_kept_whole_may_give_a_dict_of_its_own_kind() -> None:
    model, x = Around(), torch.randn(2, 4)
    program = capture(model, (x,))
    assert list(program.meta["kept_whole"]) == ["passes"]
    assert torch.equal(program(x), model(x))
