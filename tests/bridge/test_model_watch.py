"""What torch's own tracers lose: found in the model before, during and after its run."""

import functools

import pytest
import torch
from torch import nn

from torchgraft.bridge.model_tensors import ModelTensors
from torchgraft.bridge.model_watch import (
    AttributeWatch,
    PlainTensors,
    custom_gradient,
    loses_dropout,
    reads_training,
)
from torchgraft.bridge.run_watch import Asked, CallWatch


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.count, self.seen, self.table = 0, [1], {"a": 1}
        self.inner = nn.Module()
        self.inner.state = torch.zeros(2)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: setattr(model, "count", 1), "self.count"),
        (lambda model: setattr(model, "fresh", 1), "self.fresh"),
        (lambda model: delattr(model, "count"), "self.count"),
        (lambda model: model.seen.append(2), "self.seen"),
        (lambda model: model.seen.__setitem__(0, 2), "self.seen"),
        (lambda model: model.table.update(b=2), "self.table"),
        (lambda model: setattr(model.inner, "state", torch.ones(2)), "self.inner.state"),
        (lambda model: setattr(model.linear, "training", False), None),
    ],
)
def test_changed_attributes_are_named_and_put_back(change, name):
    model = Model()
    before = dict(vars(model))
    state = model.inner.state
    watch = AttributeWatch(model)
    change(model)
    assert watch.restore() == ([name] if name else [])
    assert vars(model) == before and model.seen == [1] and model.table == {"a": 1} and model.inner.state is state
    assert model.linear.training


def test_equal_values_are_no_change():
    model = Model()
    watch = AttributeWatch(model)
    model.count = int("0")
    model.linear.weight = nn.Parameter(torch.ones(2, 2))
    assert watch.restore() == []


def test_writes_to_plain_tensors_are_undone():
    model = Model()
    model.tensors = [torch.ones(2)]
    plain = PlainTensors(model)
    model.inner.state.add_(1)
    model.tensors[0].mul_(3)
    plain.restore()
    assert torch.equal(model.inner.state, torch.zeros(2)) and torch.equal(model.tensors[0], torch.ones(2))


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_custom_gradients():
    x = torch.ones(2, requires_grad=True)
    assert custom_gradient([{"y": (Scale.apply(x) + 1).sum()}]) == "Scale"
    assert custom_gradient(x * 2) is None
    assert custom_gradient(Scale.apply(x).detach()) is None
    hooked = nn.Linear(2, 2)
    hooked.register_full_backward_hook(lambda module, inputs, outputs: None)
    assert custom_gradient(hooked(x)) == "BackwardHookFunction"


def test_hooks_on_tensors():
    x = torch.ones(2, requires_grad=True)
    with CallWatch(Asked(), []) as watch:
        x.add(1)
        assert watch.gradient == (None, None)
        x.add(1).register_hook(lambda gradient: gradient)
    assert watch.gradient[0] == "puts a hook on a tensor" and "test_model_watch.py" in str(watch.gradient[1])
    with CallWatch(Asked(), []) as watch, torch.inference_mode():
        torch.ones(2)
    assert watch.gradient[0] == "switches torch.inference_mode()"


def helper(module, x):
    return x * 2 if module.training else x


def indirect(module, x):
    return helper(module, x)


class Direct(nn.Module):
    def forward(self, x):
        return x * 2 if self.training else x


class ThroughHelper(nn.Module):
    def forward(self, x):
        return indirect(self, x)


class ByName(nn.Module):
    def forward(self, x):
        return x * 2 if getattr(self, "training") else x  # noqa: B009


class OnlyInInit(nn.Module):
    def __init__(self):
        super().__init__()
        self.training = True

    def forward(self, x):
        return x * 2


def hooked(hook):
    module = nn.Linear(1, 1)
    module.register_forward_pre_hook(hook)
    return module


@pytest.mark.parametrize(
    ("module", "reads"),
    [
        (Direct(), True),
        (ThroughHelper(), True),
        (ByName(), True),
        (OnlyInInit(), False),
        (nn.BatchNorm1d(2), True),
        (nn.Dropout(), True),
        (nn.Conv2d(1, 1, 1), False),
        (nn.LayerNorm(2), False),
        (hooked(lambda module, inputs: None), False),
        (hooked(lambda module, inputs: (helper(module, inputs[0]),)), True),
        (hooked(functools.partial(lambda flag, module, inputs: module.training, 1)), True),
        (nn.utils.spectral_norm(nn.Linear(2, 2)), True),
    ],
)
def test_reads_of_the_mode(module, reads):
    assert reads_training(module) is reads


def test_recurrent_dropout():
    calls = []

    class Calls(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(loses_dropout(getattr(func, "__name__", ""), args))
            return func(*args, **(kwargs or {}))

    for model in (nn.GRU(2, 2, 2, dropout=0.5), nn.GRU(2, 2, 2), nn.GRU(2, 2, 2, dropout=0.5).eval()):
        calls.append(None)
        with Calls():
            model(torch.ones(3, 2))
    assert [any(calls[slice(*part)]) for part in _parts(calls)] == [True, False, False]
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    calls.clear()
    with Calls():
        nn.LSTM(2, 2, 2, dropout=0.5)(packed)
    assert any(calls)


def _parts(calls):
    starts = [index for index, value in enumerate(calls) if value is None]
    return zip(starts, [*starts[1:], None], strict=True)


def test_tensors_of_a_model():
    model = Model()
    model.tied = nn.Linear(2, 2)
    model.tied.weight = model.linear.weight
    model.tensors = [torch.ones(2), "text"]
    tensors = ModelTensors(model, {"loss": nn.BatchNorm1d(1)})
    assert [(held.kind, held.name) for held in tensors.held] == [
        ("parameter", "linear.weight"),
        ("parameter", "linear.bias"),
        ("parameter", "tied.bias"),
        ("parameter", "loss.weight"),
        ("parameter", "loss.bias"),
        ("buffer", "loss.running_mean"),
        ("buffer", "loss.running_var"),
        ("buffer", "loss.num_batches_tracked"),
        ("constant", "tensors[0]"),
        ("constant", "inner.state"),
    ]
    own = [held.value for held in tensors.held]
    others = [torch.zeros_like(value) for value in own]
    with tensors.replaced(others):
        assert model.linear.weight is model.tied.weight is others[0]
        model.inner.state = model.inner.state + 1
        assert list(tensors.take_assigned(others)) == [9]
        assert model.inner.state is others[9]
    assert all(held.value is value for held, value in zip(tensors.held, own, strict=True))
