"""What runs leave in a model: constants that each run leaves are left by the program, all else keeps the model whole."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torchgraft import GuardError, capture


class Classifier(nn.Module):
    """Chooses its loss by the first labels it sees, like the heads of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.config = nn.Linear(4, 3), SimpleNamespace(problem=None, labels=3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.linear(x)
        if self.config.problem is None:
            self.config.problem = "one" if labels.dtype in (torch.long, torch.int) else "many"
        if self.config.problem == "one":
            return nn.functional.cross_entropy(logits, labels.view(-1)), logits
        return nn.functional.binary_cross_entropy_with_logits(logits, labels), logits


@pytest.mark.parametrize("level", ["module", "function"])
def test_a_setting_chosen_by_the_first_call(level: str) -> None:
    model, labels = Classifier(), torch.tensor([0, 2])
    program = capture(model, (torch.ones(2, 4), labels), level=level)
    assert not program.meta["kept_whole"] and model.config.problem is None
    with pytest.raises(GuardError, match="dtype"):
        program(torch.ones(2, 4), torch.rand(2, 3))
    assert model.config.problem is None
    x, labels = torch.randn(5, 4), torch.arange(5) % 3
    found = program(x, labels)
    assert model.config.problem == "one"
    torch.testing.assert_close(found, model(x, labels))
    torch.testing.assert_close(program(x, labels), found)


def test_a_model_that_also_asks_whether_its_inputs_are_one() -> None:
    class Attention(nn.Module):
        ready = False

        def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            if not self.ready:
                self.ready = True
            return query * 2 if query is key else query + key

    model = Attention()
    program = capture(model, (torch.ones(2), torch.ones(2)))
    assert not program.meta["kept_whole"] and "ready" not in vars(model)
    assert program(torch.ones(2), torch.ones(2)).tolist() == [2, 2] and model.ready
    with pytest.raises(GuardError, match="one tensor"):
        program(*[torch.ones(2)] * 2)


def test_what_somebody_has_set_meanwhile_stays() -> None:
    model = Classifier()
    program = capture(model, (torch.ones(2, 4), torch.tensor([0, 2])))
    model.config.problem = "many"
    program(torch.ones(2, 4), torch.tensor([0, 2]))
    assert model.config.problem == "many"


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.was_called, self.notes, self.inner = False, {}, Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.was_called, self.inner.size = True, (1, "two", None)
        self.notes["calls"] = "some"
        return self.inner(x)


def test_attributes_of_modules_and_entries_of_dicts() -> None:
    model = Flagged()
    program = capture(model, (torch.ones(2),))
    assert not program.meta["kept_whole"] and "leave" in program.code
    assert not model.was_called and not model.notes and not hasattr(model.inner, "size")
    assert program.verify(model, (torch.ones(2),)).ok
    program.graph.eliminate_dead_code()
    program(torch.ones(3))
    assert model.was_called and model.notes == {"calls": "some"} and model.inner.size == (1, "two", None)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_of_the_program_has_no_model(copied: Any) -> None:
    model = Flagged()
    program = copied(capture(model, (torch.ones(2),)))
    assert torch.equal(program(torch.ones(3)), torch.full((3,), 2.0)) and not model.was_called


class Stateful(nn.Module):
    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.steps, self.is_on, self.kept = 0, False, None
        self.body = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.steps += 1
    return x + 1


def stops_counting(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.steps = min(self.steps + 1, 3)
    return x + 1


def turns(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.is_on = not self.is_on
    return x + 1


def is_special_at_first(self: Any, x: torch.Tensor) -> torch.Tensor:
    was_on, self.is_on = self.is_on, True
    return x + 1 if was_on else x + 2


def says_so_at_first(self: Any, x: torch.Tensor) -> Any:
    was_on, self.is_on = self.is_on, True
    return SimpleNamespace(x=x + 1, was_on=was_on)


def asks_more_later(self: Any, x: torch.Tensor) -> torch.Tensor:
    is_later, self.is_on = self.is_on, True
    return x + 2 if is_later and x.sum() > 100 else x + 1


def keeps_a_tensor(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.kept = x * 2
    return x + 1


def keeps_a_size(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.kept = x.shape[0]
    return x + 1


def fails_later(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.is_on:
        raise RuntimeError("once is enough")
    self.is_on = True
    return x + 1


def forgets(self: Any, x: torch.Tensor) -> torch.Tensor:
    if hasattr(self, "kept"):
        del self.kept
    return x + 1


@pytest.mark.parametrize(
    "forward",
    [
        counts, stops_counting, turns, is_special_at_first, says_so_at_first, asks_more_later, keeps_a_tensor, keeps_a_size,
        fails_later, forgets,
    ],
)  # fmt: skip
def test_what_the_next_run_does_not_repeat_keeps_the_model_whole(forward: Any) -> None:
    model = Stateful(forward)
    before = dict(vars(model))
    program = capture(model, (torch.ones(2),))
    assert list(program.meta["kept_whole"]) == [""]
    assert vars(model) == before


def test_what_is_kept_whole_may_read_it() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0
            self.inner = Stateful(counts)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scale = 2.0
            return self.inner(x)

    assert list(capture(Reading(), (torch.ones(2),)).meta["kept_whole"]) == [""]


def _dropped(x: torch.Tensor, rate: float, training: bool) -> torch.Tensor:
    return x * torch.empty(x.shape[0], 1).bernoulli_(1 - rate) if training and rate > 0 else x


class StochasticDepth(nn.Module):
    """Kept whole, because it does something else in the other mode; it reads nothing but its own number."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rate == 0.0 or not self.training:
            return x
        return _dropped(x, self.rate, self.training)


class Knowing(StochasticDepth):
    """The same with a look at the configuration."""

    def __init__(self, rate: float, config: Any) -> None:
        super().__init__(rate)
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.config.problem is None else super().forward(x) * 2


def test_what_is_kept_whole_and_sees_only_itself_does_not_matter() -> None:
    model, labels = Classifier(), torch.tensor([0, 2])
    model.linear = nn.Sequential(nn.Linear(4, 3), StochasticDepth(0.5))
    program = capture(model.eval(), (torch.ones(2, 4), labels))
    assert list(program.meta["kept_whole"]) == ["linear.1"] and model.config.problem is None
    torch.testing.assert_close(program(torch.ones(2, 4), labels), model(torch.ones(2, 4), labels))
    assert model.config.problem == "one"
    model = Classifier()
    model.linear = nn.Sequential(nn.Linear(4, 3), Knowing(0.5, model.config))
    assert "" in capture(model, (torch.ones(2, 4), labels)).meta["kept_whole"]
