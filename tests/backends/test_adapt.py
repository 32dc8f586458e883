"""`adapt`: a module that follows every path of its model, and what becomes of paths that cannot be tried."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import pickle
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import torchgraft
from torchgraft.backends.adapt import adapt


class Branching(nn.Module):
    """Goes one of three ways, has an optional argument and a number that somebody may set."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = 2.0
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x, mask=None, *, twice=False):
        x = self.layer(x) * self.scale + self.shift
        if mask is not None:
            x = x * mask
        if x.sum() > 0:
            x = x.relu()
        return x + x if twice else x


def _calls():
    x = torch.randn(3, 4)
    return [
        ((x,), {}),
        ((-x,), {}),
        ((x, torch.ones(4)), {}),
        ((x,), {"twice": True}),
        ((x, torch.zeros(3, 1)), {"twice": True}),
        ((torch.randn(7, 4),), {}),
        ((torch.randn(4),), {}),
    ]


def test_follows_every_path():
    torch.manual_seed(0)
    model = Branching()
    module = adapt(model, max_variants=16)
    for _ in range(2):
        for args, kwargs in _calls():
            assert torch.equal(module(*args, **kwargs), model(*args, **kwargs))


def test_other_sizes_need_no_new_variant():
    module = adapt(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    for batch in (1, 2, 9):
        assert module(torch.ones(batch, 4)).shape == (batch, 4)
    assert len(module.variants()) == 1


@given(signs=st.lists(st.booleans(), min_size=1, max_size=12), most=st.integers(1, 3))
def test_any_order_of_branches_is_right(signs, most):
    def model(x):
        return x + 1 if x.sum() > 0 else x - 1

    module = adapt(model, max_variants=most)
    for positive in signs:
        x = torch.ones(2) if positive else -torch.ones(2)
        assert torch.equal(module(x), model(x))
    assert len(module.variants()) <= most


def test_the_least_recently_used_goes(caplog):
    module = adapt(lambda x, n: x * n, max_variants=2)
    with caplog.at_level(logging.INFO, "torchgraft.backends"):
        for n in ("a", "b"):
            module(2, n)
        module(2, "a")
        module(2, "c")
    assert [row["inputs"] for row in module.variants().rows()] == ["2, 'a'", "2, 'c'"]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4
    assert "variant 2 goes, it was used least recently" in lines[2]


def test_raise_and_eager():
    model = Branching()
    module = adapt(model, on_guard="raise")
    module(torch.ones(2, 4))
    with pytest.raises(torchgraft.GuardError, match="expected None for 'mask', got a tensor"):
        module(torch.ones(2, 4), torch.ones(4))
    module = adapt(model, on_guard="eager")
    module(torch.ones(2, 4))
    assert torch.equal(module(torch.ones(2, 4), torch.ones(4)), model(torch.ones(2, 4), torch.ones(4)))
    assert len(module.variants()) == 1


@pytest.mark.parametrize(
    ("options", "text"), [({"on_guard": "retry"}, "on_guard"), ({"max_variants": 0}, "max_variants")]
)
def test_wrong_options(options, text):
    with pytest.raises(ValueError, match=text):
        adapt(nn.ReLU(), **options)
    with pytest.raises(TypeError, match="cannot adapt"):
        adapt(5)


def test_attributes_and_buffers_that_change_are_seen():
    model = Branching()
    module, x = adapt(model), torch.randn(3, 4)
    assert torch.equal(module(x), model(x))
    model.scale = 3.0
    assert torch.equal(module(x), model(x))
    model.shift = torch.zeros(4)
    assert torch.equal(module(x), model(x))
    with torch.no_grad():
        model.layer.weight.mul_(2)
    assert torch.equal(module(x), model(x))
    module.double()
    assert torch.equal(module(x.double()), model(x.double()))
    model.layer = nn.Linear(4, 4)
    assert torch.equal(module(x), model.float()(x))


def test_is_the_model_for_everybody_else():
    model = Branching()
    module = adapt(model)
    assert inspect.signature(module) == inspect.signature(model.forward)
    assert list(module.state_dict()) == list(model.state_dict())
    assert [*map(id, module.parameters())] == [*map(id, model.parameters())]
    module.eval()
    assert not model.training and not model.layer.training
    model.train()
    assert module.training and module.scale == 2.0
    x = torch.randn(2, 4, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None and model.layer.weight.grad is not None
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), model(x))
        assert other.layer.weight is not model.layer.weight


def test_modes_are_followed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    module, x = adapt(model), torch.randn(6, 4)
    expected = copy.deepcopy(model)
    for mode in (True, False, True):
        torch.manual_seed(3)
        found = module.train(mode)(x)
        torch.manual_seed(3)
        assert torch.equal(found, expected.train(mode)(x))
    assert torch.equal(model[2].running_mean, expected[2].running_mean)


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        x = self.norm(x)
        return x + 1 if x[0, 0] > 0 else x - 1


def test_a_check_after_an_effect_runs_the_model():
    model = Late()
    expected, module = copy.deepcopy(model), adapt(model)
    for seed in range(6):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(module(x), expected(x))
    assert torch.equal(model.norm.running_mean, expected.norm.running_mean)
    assert "effect cannot be undone" in module.variants().rows()[0]["runs"]
    assert len(adapt(model.eval()).variants()) == 0


class LateDraws(nn.Module):
    def __init__(self, generator=None):
        super().__init__()
        self.generator = generator

    def forward(self, x):
        x = x + torch.rand(x.shape, generator=self.generator)
        x = functional.dropout(x, 0.5, self.training)
        return x + 1 if x[0, 0] > 0.6 else x - torch.rand(())


@pytest.mark.parametrize("training", [True, False])
def test_random_numbers_before_a_check_are_put_back(training):
    model = LateDraws().train(training)
    module = adapt(model)
    for seed in range(12):
        torch.manual_seed(seed)
        expected = model(torch.zeros(2, 3)), torch.rand(2)
        torch.manual_seed(seed)
        found = module(torch.zeros(2, 3)), torch.rand(2)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert [row["runs"] for row in module.variants().rows()] == ["captured program"] * 2


def test_random_numbers_of_a_generator_that_is_given_are_not():
    module = adapt(LateDraws(torch.Generator()).eval())
    module(torch.zeros(2, 3))
    assert all("model's own Python" in row["runs"] for row in module.variants().rows())


def test_threads():
    torch.manual_seed(0)
    model = Branching().eval()
    module, calls = adapt(model, max_variants=3), _calls()
    expected = [model(*args, **kwargs) for args, kwargs in calls]
    wrong: list[object] = []

    def work(start: int) -> None:
        for step in range(40):
            number = (start + step) % len(calls)
            args, kwargs = calls[number]
            try:
                if not torch.equal(module(*args, **kwargs), expected[number]):
                    wrong.append(number)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(module.variants()) <= 3


def test_who_traces_sees_the_model():
    model = Branching().eval()
    module, x = adapt(model), torch.ones(2, 4)
    program = torchgraft.capture(module, x)
    assert torch.equal(program(x), model(x))
    assert len(module.variants()) == 0


def test_errors_of_the_model_are_the_models():
    module = adapt(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        module(torch.ones(2, 5))
    assert len(module.variants()) == 0


def test_a_cache_that_grows_and_a_result_of_a_class() -> None:
    """What language models that decode do: the check of what they are given comes before all that they make and change."""

    class Cache:
        def __init__(self) -> None:
            self.keys = torch.zeros(1, 0, 4)

    @dataclasses.dataclass
    class Result:
        last: torch.Tensor
        cache: Any

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, cache: Cache) -> Result:
            cache.keys = torch.cat([cache.keys, self.key(x)], 1)
            return Result((x @ cache.keys.mT).softmax(-1) @ cache.keys, cache)

    model = Decoder().eval()
    with torch.no_grad():
        for follows in (adapt(model), torchgraft.lower(model, (torch.ones(1, 1, 4), Cache()), backend="native")):
            ours, theirs = Cache(), Cache()
            for _ in range(3):
                x = torch.randn(1, 1, 4)
                found, expected = follows(x, ours), model(x, theirs)
                assert type(found) is Result and found.cache is ours
                assert torch.allclose(found.last, expected.last, atol=1e-6)
                assert torch.allclose(ours.keys, theirs.keys, atol=1e-6)
            assert all(row["runs"] in ("captured program", "native") for row in follows.variants().rows()), str(
                follows.variants()
            )
            with pytest.raises(AttributeError, match="keys"):
                follows(x, object())


class Double(torch.autograd.Function):
    """A function of the user's own, which may do anything."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Layers:
    """A cache with memory for `length` words, or with none, in each of two layers."""

    def __init__(self, length: int | None) -> None:
        self.layers = [Layer(length), Layer(length)]


class Layer:
    def __init__(self, length: int | None) -> None:
        self.keys = torch.zeros(1, length or 0, 4)
        self.filled = None if length is None else torch.tensor(0)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor, cache: Layers) -> torch.Tensor:
        for key, layer in zip(self.key, cache.layers, strict=True):
            length, words = x.size(1), Double.apply(key(x))
            if layer.filled is None:
                layer.keys = torch.cat([layer.keys, words], 1)
                x = (x @ layer.keys.mT).softmax(-1) @ layer.keys
            else:
                where = torch.arange(length) + layer.filled
                layer.filled.add_(length)
                layer.keys.index_copy_(1, where, words)
                torch._dynamo.mark_static_address(layer.keys)
                x = (x @ layer.keys.mT).masked_fill(torch.arange(layer.keys.size(1)) > where[:, None], -9e9)
                x = (x if x.size(1) > 1 else x * 2).softmax(-1) @ layer.keys
        return x


@pytest.mark.parametrize("length", [None, 16])
def test_caches_of_several_layers(length: int | None) -> None:
    """Checks that come after a write into memory, or after a function of the user's own, are of objects and of sizes."""
    model = TwoLayers().eval()
    with torch.no_grad():
        for follows in (adapt(model), torchgraft.lower(model, (torch.ones(1, 3, 4), Layers(length)), backend="native")):
            ours, theirs = Layers(length), Layers(length)
            for words in (3, 1, 1, 2):
                x = torch.randn(1, words, 4)
                assert torch.allclose(follows(x, ours), model(x, theirs), atol=1e-6)
                assert torch.allclose(ours.layers[1].keys, theirs.layers[1].keys, atol=1e-6)
            variants = follows.variants()
            assert all(row["runs"] in ("captured program", "native") for row in variants.rows()), str(variants)
            ours.layers[1] = ours.layers[0]
            theirs.layers[1] = theirs.layers[0]
            assert torch.allclose(follows(x, ours), model(x, theirs), atol=1e-6)
