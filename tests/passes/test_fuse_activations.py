"""Activations write into the result of the layer before them, and every bit of results and gradients stays."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgraft
from tests.passes.contract import check_edit
from torchgraft.analysis.aliases import Aliases
from torchgraft.passes import Functionalize, FuseActivations

ACTIVATIONS = [nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.2), nn.Hardtanh(-0.3, 0.4), nn.Sigmoid(), nn.Tanh()]
LAYERS = {
    "conv": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 6, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 6, 6)),
    "linear": (lambda: nn.Linear(3, 4), (5, 3)),
    "batch norm": (lambda: nn.BatchNorm2d(3), (2, 3, 6, 6)),
    "layer norm": (lambda: nn.LayerNorm(3), (5, 3)),
    "group norm": (lambda: nn.GroupNorm(1, 3), (2, 3, 6, 6)),
}


def run(program, x):
    x = x.clone().requires_grad_()
    result = program(x)
    gradients = torch.autograd.grad(result.pow(2).sum(), [x, *program.parameters()], allow_unused=True)
    return result.detach(), gradients


@pytest.mark.parametrize("level", ["symbolic", "module", "function"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_and_activation(layer, activation, level):
    make, shape = LAYERS[layer]
    torch.manual_seed(0)
    model = nn.Sequential(make(), activation)
    x = torch.randn(shape)

    def captured():
        return torchgraft.symbolic_trace(model) if level == "symbolic" else torchgraft.capture(model, (x,), level=level)

    expected = run(captured(), x)
    program = captured()
    assert check_edit(FuseActivations(), program) == 1
    assert Aliases(program.graph).has_writes
    torch.testing.assert_close(run(program, x), expected, rtol=0, atol=0)
    # And back again.
    assert Functionalize()(program).changes == 1
    torch.testing.assert_close(run(program, x), expected, rtol=0, atol=0)


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.relu = nn.Linear(3, 3), nn.ReLU()


X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def count(forward, prepare=None):
    torch.manual_seed(0)
    model = type("Model", (Parts,), {"forward": forward})()
    if prepare:
        prepare(model)
    expected = run(torchgraft.symbolic_trace(model), X)
    program = torchgraft.symbolic_trace(model)
    changes = check_edit(FuseActivations(), program)
    torch.testing.assert_close(run(program, X), expected, rtol=0, atol=0)
    return changes


def used_elsewhere(self, x):
    y = self.linear(x)
    return torch.relu(y) + y


def other_region(self, x):
    y = self.linear(x)
    with torch.no_grad():
        z = torch.relu(y)
    return z + x


def view_between(self, x):
    y = self.linear(x)
    v = y.view(-1)
    return torch.relu(y).sum() + v.sum()


@pytest.mark.parametrize(
    ("forward", "changes"),
    [
        (lambda self, x: torch.relu(self.linear(x)), 1),
        (lambda self, x: self.linear(x).relu(), 1),
        (lambda self, x: F.relu(self.linear(x)), 1),
        (lambda self, x: F.relu(input=self.linear(x)), 1),
        (lambda self, x: self.relu(self.linear(self.relu(self.linear(x)))), 2),
        (lambda self, x: torch.relu(self.linear(x) + self.linear(x)), 1),
        (lambda self, x: torch.sigmoid(self.linear(x) + self.linear(x)), 0),  # a sum may be of whole numbers
        (lambda self, x: F.leaky_relu(self.linear(x), -0.2), 0),
        (lambda self, x: F.gelu(self.linear(x)), 0),
        (lambda self, x: F.silu(self.linear(x)), 0),
        (lambda self, x: torch.relu(x) + 1, 0),
        (lambda self, x: torch.relu(x.exp()), 0),  # the gradient of exp needs its result
        (lambda self, x: torch.relu(self.linear(x).view(-1)), 0),
        (used_elsewhere, 0),
        (other_region, 0),
        (view_between, 0),
        (lambda self, x: F.relu(self.linear(x), inplace=True), 0),
    ],
)
def test_which_activations_are_fused(forward, changes):
    assert count(forward) == changes


def test_hooks_keep_what_they_were_given():
    kept = []
    forward = lambda self, x: self.relu(self.linear(x))
    hook = lambda module, args, result: kept.append(result)
    assert count(forward, lambda model: model.linear.register_forward_hook(hook)) == 0
    assert count(forward, lambda model: model.relu.register_forward_hook(hook)) == 0


def test_the_model_is_left_alone():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    program = torchgraft.symbolic_trace(model)
    FuseActivations()(program)
    assert model[1].inplace is False and set(program.state_dict()) == set(model.state_dict())


def test_autocast():
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.relu(self.linear(x)).float()

    assert count(forward) == 0
