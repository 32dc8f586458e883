"""`doctor` says what was fixed, what was kept whole and what cannot be traced, with lines and remedies."""

import json

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft import GraftError, zoo
from torchgraft.recording.doctor import doctor


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0:  # asks for a value
            x = x * 2
        return self.linear(x)


class Loop(nn.Module):
    def forward(self, x):
        for number in range(x.shape[0]):  # asks for a size
            x = x + number
        return x


class Gates(nn.Module):
    def __init__(self):
        super().__init__()
        self.gates = nn.Sequential(Gate(), Gate())
        self.loop = Loop()

    def forward(self, x):
        if self.training:  # asks for the mode
            x = x + 1
        return self.loop(self.gates(x))


@torchgraft.wrap
def whole(x):
    return x + 1


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.own = Loop()
        self.own.register_full_backward_hook(lambda module, before, after: None)

    def forward(self, x):
        return whole(self.own(self.linear(x)))


def whats(findings):
    return [finding.what for finding in findings]


@pytest.mark.zoo
@pytest.mark.parametrize("name", ["mlp", "resnet18"])
def test_healthy_models(name):
    model = zoo.create(name).eval()
    inputs = zoo.example_inputs(name, **({"size": 32} if name == "resnet18" else {}))
    diagnosis = doctor(model, inputs)
    assert diagnosis.ok and diagnosis.verification.ok
    assert diagnosis.specialised == diagnosis.symbolic == ()
    assert len(diagnosis.leaves) == 1
    assert "modules of torch.nn stay one call each: " in diagnosis.leaves[0].what
    assert f"captured (watched), {len(diagnosis.program.graph.nodes)} nodes, right" in str(diagnosis).splitlines()[0]


def test_specialised():
    diagnosis = doctor(Gates(), (torch.rand(3, 4),))
    assert diagnosis.ok
    found = {finding.where.rsplit("#")[-1].strip(' "'): finding for finding in diagnosis.specialised}
    assert set(found) == {"asks for the mode", "asks for a value", "asks for a size"}
    assert all("test_doctor.py:" in finding.where for finding in diagnosis.specialised)
    assert found["asks for the mode"].what == "training is True"
    assert "capture once in training mode and once in evaluation mode" in found["asks for the mode"].remedy
    assert "torch.where" in found["asks for a value"].remedy
    assert found["asks for a size"].what.endswith(".size(0) is 3")
    assert "without if, range() or int()" in found["asks for a size"].remedy


def test_symbolic_failures_go_past_the_first():
    diagnosis = doctor(Gates())
    assert not diagnosis.ok and diagnosis.program is None
    assert whats(diagnosis.symbolic) == [
        "cannot branch on a traced value: node 'gt' (in Gate at 'gates.0', 'gates.1')",
        "cannot make an index or a range() of a traced value: node 'getitem' (in Loop at 'loop')",
    ]
    assert diagnosis.symbolic[0].where.endswith('"if x.sum() > 0:  # asks for a value"')
    assert diagnosis.symbolic[0].remedy == (
        "give example inputs: capture(model, args), or keep Gate as a leaf (Tracer.is_leaf_module)"
    )
    assert str(diagnosis).startswith("Gates: not captured (symbolic)\n  cannot branch on a traced value")


def test_ten_symbolic_failures_at_most():
    def failing(number):
        def forward(self, x):
            return x if x.sum() > number else -x

        return type(f"Failing{number}", (nn.Module,), {"forward": forward})()

    assert len(doctor(nn.Sequential(*map(failing, range(15)))).symbolic) == 10


def test_error_of_the_model_itself_while_tracing():
    class Checks(nn.Module):
        def forward(self, x):
            if "numpy" not in dir(x):
                raise TypeError("tensors only")
            return x

    diagnosis = doctor(Checks(), (torch.ones(2),))
    assert diagnosis.ok
    assert whats(diagnosis.symbolic) == ["TypeError: tensors only"]
    assert diagnosis.symbolic[0].where.endswith('"raise TypeError("tensors only")"')


def test_silently_wrong_trace_is_found():
    class Baked(nn.Module):
        def forward(self, x):
            return x + 1 if "numpy" in dir(x) else x + 2

    diagnosis = doctor(Baked(), (torch.ones(2),))
    assert diagnosis.ok
    assert len(diagnosis.symbolic) == 1
    assert "the traced program is wrong on example (node 'add'): the result differs" in diagnosis.symbolic[0].what
    assert "capture(model, args)" in diagnosis.symbolic[0].remedy


def test_leaves():
    diagnosis = doctor(Hooked(), (torch.rand(3, 4),))
    assert diagnosis.ok
    assert whats(diagnosis.leaves) == [
        "modules of torch.nn stay one call each: 1 Linear",
        "Loop at 'own': kept whole so that its hooks run",
        "the Python function whole is called as a whole",
    ]
    assert all("test_doctor.py:" in finding.where for finding in diagnosis.leaves[1:])


def test_capture_that_fails(monkeypatch):
    def refuse(*args, **kwargs):
        raise GraftError("cannot capture this")

    monkeypatch.setattr("torchgraft.recording.doctor.capture", refuse)
    diagnosis = doctor(Gates(), (torch.ones(3, 4),))
    assert not diagnosis.ok
    assert str(diagnosis).startswith("Gates: not captured (watched)\n  GraftError: cannot capture this\n")
    assert diagnosis.to_dict()["captured"]["failure"] == "GraftError: cannot capture this"


def test_model_that_fails_itself():
    with pytest.raises(
        GraftError, match="cannot diagnose: the model itself raises RuntimeError: .*\ngive inputs it accepts"
    ):
        doctor(Gate(), (torch.ones(3, 5),))


def test_wrong_program(monkeypatch):
    monkeypatch.setattr(
        "torchgraft.recording.doctor.capture",
        lambda model, *rest: torchgraft.symbolic_trace(nn.Sequential(model.linear)),
    )
    diagnosis = doctor(Gate(), (torch.rand(3, 4),))
    assert not diagnosis.ok
    assert ", WRONG" in str(diagnosis).splitlines()[0]


def test_without_inputs_nothing_is_verified():
    diagnosis = doctor(zoo.create("mlp"))
    assert diagnosis.ok and diagnosis.verification is None
    assert "  no: give example inputs to run the model and its program" in str(diagnosis).splitlines()


def test_functions():
    assert doctor(lambda x: x + 1, torch.ones(2)).ok


def test_model_is_left_as_it_was():
    model = Gates()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    doctor(model, (torch.rand(3, 4, generator=torch.Generator()),))
    assert model.training and all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_to_dict_is_plain():
    data = doctor(Gates(), (torch.rand(3, 4),)).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["ok"] and data["specialised"][0].keys() == {"what", "where", "remedy", "count"}
