"""The guards that programs in torch's operators begin with: what they say, and that they come before what is written."""

import copy

import pytest
import torch
from torch import nn

from torchgraft import GuardError, Interpreter, capture, capture_training, zoo
from torchgraft.lowering.guards import check_mode, check_tensors
from torchgraft.lowering.lower import lower
from torchgraft.lowering.tensors import TracedTensor

X = torch.randn(4, 6)


class Doubled(nn.Module):
    """Branches by its mode, after a norm that writes its statistics in training."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        y = self.norm(x)
        return y * 2 if self.training else y


NORM = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))


@pytest.mark.parametrize(("model", "level"), [(NORM, "core_aten"), (Doubled(), "core_aten"), (Doubled(), "aten")])
def test_modes_are_checked_before_anything_is_written(model, level):
    program = capture(copy.deepcopy(model).eval(), (X,), level=level).train()
    before = copy.deepcopy(program.state_dict())
    for run in (program, Interpreter(program).run):
        with pytest.raises(GuardError, match="training mode"):
            run(X)
    for name, value in program.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_training_steps_check_modes_before_anything_is_written():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).eval()
    programs = capture_training(model, (X,))
    before = copy.deepcopy(model.state_dict())
    programs.program.train()
    with pytest.raises(GuardError, match="call capture_training again with the model as it is now"):
        programs.run(X)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_mode_says_what_to_do():
    with pytest.raises(GuardError) as raised:
        check_mode(True, False, 'model.py:3 "x = self.norm(x)"')
    assert str(raised.value) == (
        "the program was lowered in evaluation mode, and the module is now in training mode\n"
        '  at model.py:3 "x = self.norm(x)"\n'
        "  call .train() on the model and capture it again at this level, switch this module back with .eval(), or run it at "
        "level 'function' or 'aten', which take both modes"
    )


def test_tensors_are_checked_module_by_module():
    program = capture(zoo.create("mlp"), zoo.example_inputs("mlp"), level="core_aten")
    checks = program.graph.find_nodes(op="call_function", target=check_tensors)
    assert [(list(node.args[0]), *node.args[1:]) for node in checks] == [
        (["x"], "torch.float32", (2,), "the inputs of MLP"),
        (["weight", "bias"], "torch.float32", (2, 1), "fc1"),
        (["weight", "bias"], "torch.float32", (2, 1), "fc2"),
    ]
    program.fc2.double()
    with pytest.raises(GuardError) as raised:
        program(*zoo.example_inputs("mlp"))
    assert str(raised.value).splitlines()[:2] == [
        "the program was lowered for the dtype torch.float32 of 'weight', and now it is torch.float64",
        "  at fc2",
    ]


def test_conditions_that_are_alike_are_one():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)).eval()
    conditions = [(guard.condition, guard.expected) for guard in capture(model, (X,), level="core_aten").guards]
    assert ("dtype of 'input_1'", "torch.float32") in conditions
    assert ("dtype of the tensors of '0'", "torch.float32") in conditions
    assert ("number of dimensions of the tensors of '0'", (2, 1)) in conditions
    assert ("torch.is_autocast_enabled()", False) in conditions
    assert ("1.training", False) in conditions and ("2.training", False) in conditions
    text = capture(zoo.create("resnet18").eval(), (torch.randn(1, 3, 32, 32),), level="core_aten").explain()
    assert "dtype of the tensors of 'conv1' is 'torch.float32', and the same for 40 more" in text
    assert "20 BatchNorm2d check that their input has 4 dimensions" in text
    assert "20 BatchNorm2d are in evaluation mode" in text
    assert len(text.splitlines()) < 27


def test_a_check_that_was_taken_back_with_its_call_is_written_again(monkeypatch):
    def first(tensor):
        if type(tensor) is TracedTensor and tensor.dtype is torch.float32:
            raise RuntimeError("it wants memory")
        return tensor + 1

    def second(tensor):
        return tensor * (2 if tensor.dtype is torch.float32 else 3)

    program = capture(nn.ReLU(), (X,), level="function")
    for function in (first, second):
        function.__module__ = "torch"  # only torch's own functions are looked into
        monkeypatch.setattr(torch, f"_{function.__name__}_for_a_test", function, raising=False)
        output = program.graph.output_node()
        with program.graph.inserting_before(output):
            relu = next(node for node in program.graph.nodes if node.name == "relu")
            output.args = (program.graph.call_function(function, (relu,)),)
    lowered = lower(program, (X,))
    torch.testing.assert_close(lowered(X), X.relu() * 2)
    with pytest.raises(GuardError, match="dtype of"):
        lowered(X.double())
