"""Modules of a program are replaced by class or path; the model keeps its own."""

import pytest
import torch
from torch import nn

import torchgraft
from tests.passes.contract import check_edit
from torchgraft.errors import PassError
from torchgraft.passes import Pipeline, ReplaceModule


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.relu = nn.Linear(3, 3), nn.ReLU()

    def forward(self, x):
        return self.relu(self.linear(self.relu(x)))


def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.ReLU())


X = torch.randn(2, 3)


def doubled(module):
    result = nn.Linear(module.in_features, module.out_features)
    with torch.no_grad():
        result.weight.copy_(module.weight * 2)
        result.bias.copy_(module.bias * 2)
    return result


def test_by_class():
    original = model()
    program = torchgraft.symbolic_trace(original)
    assert check_edit(ReplaceModule(nn.ReLU, nn.Tanh), program) == 3
    assert sum(isinstance(item, nn.Tanh) for item in program.modules()) == 3
    assert sum(isinstance(item, nn.ReLU) for item in original.modules()) == 3
    torch.testing.assert_close(program(X), reference(original, torch.tanh))


def reference(original, activation):
    x = X
    for block in original[:2]:
        x = activation(block.linear(activation(x)))
    return activation(x)


def test_by_text():
    program = torchgraft.symbolic_trace(model())
    pipeline = Pipeline("replace-module{old=torch.nn.ReLU, new=torch.nn:Tanh}")
    assert pipeline(program).changes == 3
    assert str(pipeline) == "replace-module{old=torch.nn.ReLU, new=torch.nn:Tanh}"


def test_by_path_with_a_function_of_the_old_module():
    original = model()
    program = torchgraft.symbolic_trace(original)
    assert check_edit(ReplaceModule("0.lin*", doubled), program) == 1
    assert torch.equal(program.get_submodule("0.linear").weight, original[0].linear.weight * 2)
    assert program.get_submodule("1.linear") is original[1].linear


def test_a_shared_module_is_replaced_once():
    shared = nn.Linear(3, 3)
    program = torchgraft.symbolic_trace(nn.Sequential(shared, nn.ReLU(), shared))
    assert check_edit(ReplaceModule(nn.Linear, doubled), program) == 1
    assert len({id(item) for item in program.modules() if isinstance(item, nn.Linear)}) == 1
    expected = nn.Sequential(doubled(shared), nn.ReLU(), doubled(shared))(X)
    torch.testing.assert_close(program(X), expected)


def test_the_mode_goes_along():
    program = torchgraft.symbolic_trace(nn.Sequential(nn.ReLU()).eval())
    ReplaceModule(nn.ReLU, nn.Dropout)(program)
    assert not program.get_submodule("0").training


def test_nothing_found():
    program = torchgraft.symbolic_trace(model())
    assert check_edit(ReplaceModule("no.such.path", nn.Tanh), program) == 0


def test_returning_the_module_itself_is_no_change():
    program = torchgraft.symbolic_trace(model())
    assert check_edit(ReplaceModule(nn.ReLU, lambda module: module), program) == 0


def test_captured_program():
    program = torchgraft.capture(model(), (X,))
    assert ReplaceModule(nn.ReLU, nn.Tanh)(program).changes == 3
    torch.testing.assert_close(program(X), reference(model(), torch.tanh))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a class or a pattern of paths to look for, not old=''"),
        ({"old": nn.ReLU}, "needs a module class or a function that makes one, not new=''"),
        ({"old": nn.ReLU, "new": "torch.nn.NoSuchThing"}, "not new='torch.nn.NoSuchThing'"),
        ({"old": nn.ReLU, "new": lambda module: 3}, "new made 3 for '0.relu', which is no module"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(PassError) as error:
        ReplaceModule(**options)(torchgraft.symbolic_trace(model()))
    assert message in str(error.value)


def test_the_modules_of_a_program_are_not_listed_for_every_replacement(monkeypatch):
    program = torchgraft.symbolic_trace(nn.Sequential(*[nn.ReLU() for _ in range(50)]))
    listed = []
    original = nn.Module.named_modules

    def counted(self, *args, **kwargs):
        listed.extend([self] if self is program else [])
        return original(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    assert ReplaceModule(nn.ReLU, nn.GELU).run(program) == 50
    assert not listed


def test_a_module_that_is_in_the_program_takes_the_place_of_others():
    layers = nn.Sequential(nn.Tanh(), nn.ReLU(), nn.Sequential(nn.ReLU(), nn.Sigmoid()), nn.ReLU())
    tanh = layers[0]
    program = torchgraft.symbolic_trace(layers)
    assert ReplaceModule(nn.ReLU, lambda module: tanh)(program).changes == 3
    calls = [program.get_submodule(node.target) for node in program.graph.nodes if node.op == "call_module"]
    assert [type(call).__name__ for call in calls] == ["Tanh", "Tanh", "Tanh", "Sigmoid", "Tanh"]
    torch.testing.assert_close(program(X), X.tanh().tanh().tanh().sigmoid().tanh())
