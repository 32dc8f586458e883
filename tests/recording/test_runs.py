"""Runs of a model leave everything as it was, and start alike."""

import random

import pytest
import torch
from torch import nn

from tests.recording.models import Net
from torchgraft import GraftError, GraphModule, symbolic_trace
from torchgraft.capturing.program import capture
from torchgraft.recording.verify import verify


class Sum(nn.Module):
    def forward(self, x, y):
        return x * 2 + y


def test_python_and_generator_draws_start_alike():
    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator()

        def forward(self, x):
            return x * random.random() + torch.rand(2, generator=self.generator)

    model = Draws()
    program = capture(model, (torch.ones(2),))
    before = model.generator.get_state()
    assert verify(model, program, (torch.ones(2),)).ok
    assert torch.equal(model.generator.get_state(), before)


@pytest.mark.parametrize("wrong", [False, True])
def test_everything_is_left_as_it_was(wrong):
    model = Net().train()
    program = symbolic_trace(model)
    if wrong:
        next(node for node in program.graph.nodes if node.name == "tanh").target = "sigmoid"
    model.first.weight.grad = torch.full((4, 4), 7.0)
    gradient = model.first.weight.grad
    x = torch.randn(3, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {module: dict(module.__dict__) for module in [*model.modules(), *program.modules()]}
    versions = {name: value._version for name, value in model.state_dict(keep_vars=True).items() if name != "calls"}
    values, random_states, code = x.clone(), (torch.get_rng_state(), random.getstate()), program.code
    hooks = [len(module._forward_hooks) for module in model.modules()]

    assert verify(model, program, (x,)).ok is not wrong

    assert torch.equal(x, values) and x.grad is None and not x.requires_grad
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert {name: v._version for name, v in model.state_dict(keep_vars=True).items() if name != "calls"} == versions
    assert model.first.weight.grad is gradient and torch.all(gradient == 7)
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name != "first.weight")
    assert torch.equal(torch.get_rng_state(), random_states[0]) and random.getstate() == random_states[1]
    for module, old in attributes.items():
        assert module.__dict__.keys() == old.keys()
        assert all(module.__dict__[name] is value for name, value in old.items() if name != "_edits")
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert program.code == code
    assert torch.is_grad_enabled()


def test_modules_behind_a_function():
    model = Net()

    def function(x):
        return model(x) * 2

    inputs = (torch.ones(2, 4),)
    program = capture(function, inputs)
    before = model.calls.clone()
    verification = verify(function, program, inputs)
    assert verification.ok, verification
    assert verification.checks[0].aspects["state"].compared and verification.checks[0].aspects["gradients"].compared
    assert torch.equal(model.calls, before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_input_that_was_computed_and_shared():
    leaf = torch.randn(3, 4, requires_grad=True)
    computed = leaf * 2
    model = Sum()
    inputs = (computed, computed)
    verification = verify(model, capture(model, inputs), inputs)
    assert verification.ok, verification
    assert leaf.grad is None
    assert "inputs with grad" not in [check.situation for check in verification.checks]


def test_lazy_modules_are_refused():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(GraftError, match="'0.weight' has no shape yet\nrun the model once"):
        verify(model, GraphModule(nn.Module(), symbolic_trace(lambda x: x).graph), (torch.ones(2, 3),))
