"""Whether a changed model is noticed, and a model that changes itself is left in peace."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchgraft import adapt, lower
from torchgraft.errors import BackendError


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU())
        self.scales, self.pair, self.table = [1.0, 2.0], (1.0, 2.0), {"k": 3.0}
        self.config = types.SimpleNamespace(scale=2.0)
        self.tensor, self.tensors = torch.ones(4), [torch.ones(4)]
        self.function = torch.sigmoid

    def forward(self, x: Any) -> Any:
        x = self.steps(x) * self.scales[0] * self.pair[0] * self.table["k"] * self.config.scale
        x = x * self.tensor * self.tensors[0]
        if getattr(self, "extra", None) is not None:
            x = x * self.extra
        return self.function(x)


def _set(path: str, value: Any) -> Callable[[Any], None]:
    return lambda model: exec(f"model.{path} = value", {"model": model, "value": value})


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an item of a list": _set("scales[0]", 5.0),
    "a list": _set("scales", [5.0]),
    "a tuple": _set("pair", (5.0, 5.0)),
    "an item of a dict": _set("table['k']", 5.0),
    "a configuration": _set("config.scale", 5.0),
    "a tensor": _set("tensor", torch.full((4,), 5.0)),
    "a weight": _set("steps[0].weight", nn.Parameter(torch.full((4, 4), 5.0))),
    "the data of a weight": _set("steps[0].weight.data", torch.full((4, 4), 5.0)),
    "the values of a weight": lambda model: nn.init.constant_(model.steps[0].bias, 5.0),
    "a table of a module": lambda model: model.steps[0]._parameters.update(bias=None),
    "an attribute, behind the module's back": lambda model: vars(model.steps[1]).update(negative_slope=5.0),
    "a layer, behind the module's back": lambda model: model.steps._modules.update({"1": nn.Tanh()}),
    "the values of a tensor": lambda model: model.tensor.mul_(5),
    "a tensor in a list": _set("tensors[0]", torch.full((4,), 5.0)),
    "a function": _set("function", torch.tanh),
    "a new attribute": _set("extra", 5.0),
    "an option of a layer": _set("steps[1].negative_slope", 5.0),
    "a new layer": lambda model: model.steps.append(nn.Tanh()),
    "a hook": lambda model: model.steps[1].register_forward_hook(lambda module, args, result: result * 2),
    "a hook before": lambda model: model.steps[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "a hook of the model": lambda model: model.register_forward_hook(lambda module, args, result: result * 2),
    "the forward of a layer": lambda model: setattr(model.steps[1], "forward", lambda x: x * 5),
    "the forward of the model": lambda model: setattr(model, "forward", lambda x: x * 5),
}


# What models do themselves, too, when they are first asked for something: transformers, for hidden states.
COMPILED_AGAIN = {
    *("a new attribute", "a new layer", "a hook", "a hook before", "a hook of the model"),
    *("the forward of a layer", "the forward of the model"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_noticed(change: str) -> None:
    x = torch.randn(2, 4)
    model = Configured().eval()
    lowered, adapted = lower(model, x, backend="native"), adapt(model)
    with torch.no_grad():
        before = model(x)
        for _ in range(3):  # the first look compares everything, the next ones go by counters
            adapted(x), lowered(x)
        CHANGES[change](model)
        expected = model(x)
        assert not torch.allclose(before, expected)
        torch.testing.assert_close(adapted(x), expected)
        if change not in COMPILED_AGAIN:
            with pytest.raises(BackendError, match="lowered with other weights"):
                lowered(x)
            lowered.refresh()
        torch.testing.assert_close(lowered(x), expected)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.last = 0, [1], None

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.seen.append(x.shape[0])
        self.last = x * self.calls
        return self.last + 1


@pytest.mark.parametrize("follows", ["adapt", "lower"])
def test_a_model_that_counts_its_calls_is_not_made_anew_with_each(follows: str) -> None:
    model, plain = Counting().eval(), Counting().eval()
    module = adapt(model) if follows == "adapt" else lower(model, torch.ones(2), backend="native")
    assert model.calls == 0  # lowering is no call of the model
    for size in (2, 3, 2, 4):
        torch.testing.assert_close(module(torch.ones(size)), plain(torch.ones(size)))
    assert (model.calls, model.seen) == (plain.calls, plain.seen)
    assert len(module.variants()) == 1


def test_adapted_and_lowered_modules_inside_a_model_are_no_change_of_it() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = adapt(nn.Linear(4, 4))
            self.second = lower(nn.Linear(4, 4).eval(), torch.ones(2, 4), backend="native")

        def forward(self, x: Any) -> Any:
            return self.second(self.first(x)).relu()

    model = Outer().eval()
    fast = lower(model, torch.ones(2, 4), backend="native")
    with torch.no_grad():
        for size in (2, 3, 2):
            x = torch.randn(size, 4)
            torch.testing.assert_close(fast(x), model(x))
