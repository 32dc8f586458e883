"""Example inputs are taken in one way everywhere: a tuple or one tensor, then a dict; anything else is refused with words."""

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft.codegen.calling import example_inputs, placeholder_values


class Scaled(nn.Module):
    def forward(self, x, *, scale=2.0):
        return x * scale


MODEL = Scaled()
X = torch.ones(2, 3)
PROGRAM = torchgraft.capture(MODEL, X)

FUNCTIONS = {
    "capture": lambda *inputs: torchgraft.capture(MODEL, *inputs),
    "capture aten": lambda *inputs: torchgraft.capture(MODEL, *inputs, level="aten"),
    "capture_training": lambda *inputs: torchgraft.capture_training(nn.Linear(3, 2), *inputs[:1]),
    "verify": lambda *inputs: torchgraft.verify(MODEL, torchgraft.capture(MODEL, X, {"scale": 3.0}), *inputs),
    "cost": lambda *inputs: torchgraft.cost(MODEL, *inputs),
    "memory": lambda *inputs: torchgraft.memory(MODEL, *inputs),
    "shapes": lambda *inputs: torchgraft.shapes(MODEL, *inputs),
    "record": lambda *inputs: torchgraft.record(MODEL, *inputs),
    "log_calls": lambda *inputs: torchgraft.log_calls(MODEL, *inputs),
    "diff": lambda *inputs: torchgraft.diff(MODEL, MODEL, *inputs),
    "draw": lambda *inputs: torchgraft.draw(MODEL, *inputs),
    "compare": lambda *inputs: torchgraft.compare(MODEL, MODEL, *inputs),
    "doctor": lambda *inputs: torchgraft.doctor(MODEL, *inputs),
    "summary": lambda *inputs: torchgraft.summary(MODEL, *inputs),
    "to_networkx": lambda *inputs: torchgraft.to_networkx(MODEL, *inputs),
    "to_dot": lambda *inputs: torchgraft.to_dot(MODEL, *inputs),
    "to_model_explorer": lambda *inputs: torchgraft.to_model_explorer(MODEL, *inputs),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_tuple_one_tensor_and_keywords_are_taken(name):
    for inputs in (((X,),), (X,), ((X,), {"scale": 3.0}), (X, {"scale": 3.0})):
        assert FUNCTIONS[name](*inputs) is not None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_another_kind_is_refused_with_what_is_expected(name):
    with pytest.raises(torchgraft.InputError) as error:
        FUNCTIONS[name](["a", "b"])
    assert str(error.value) == (
        "expected a tuple of inputs or one tensor for args, got a list of str\n"
        "for several inputs write tuple(inputs); for one input that is a list write (inputs,)"
    )
    if name != "capture_training":
        with pytest.raises(torchgraft.InputError) as error:
            FUNCTIONS[name](X, X)
        assert str(error.value) == (
            "expected a dict of keyword inputs for kwargs, got a Tensor\n"
            "give several inputs as a tuple: f(model, (x, y))"
        )


@pytest.mark.parametrize(
    ("given", "found", "advice"),
    [
        (5, "an int", "for one input write (value,); for none leave args out"),
        (None, "None", "for one input write (value,); for none leave args out"),
        ("out.svg", "a str", "a file name is given by its keyword, such as path="),
        ({"x": X}, "a dict", "for keyword inputs write kwargs=inputs; for one input that is a dict write (inputs,)"),
        ([X, 1], "a list", "for several inputs write tuple(inputs); for one input that is a list write (inputs,)"),
    ],
)
def test_the_advice_fits_the_kind(given, found, advice):
    with pytest.raises(torchgraft.InputError) as error:
        example_inputs(given)
    assert str(error.value) == f"expected a tuple of inputs or one tensor for args, got {found}\n{advice}"


def test_keywords_must_have_names():
    with pytest.raises(TypeError, match="expected a dict of keyword inputs for kwargs, got a dict"):
        example_inputs((), {1: X})


def test_placeholders_of_a_structured_call():
    program = torchgraft.capture(lambda a, *rest, **more: a["x"] + rest[0] + more["y"], ({"x": X}, X), {"y": X})
    values = placeholder_values(program, ({"x": X}, X), {"y": X})
    assert [str(node.target) for node in values] == ["a", "*rest", "**more"]
    assert list(values.values()) == [{"x": X}, (X,), {"y": X}]


def test_inputs_that_a_program_does_not_take():
    with pytest.raises(torchgraft.InputError) as error:
        placeholder_values(PROGRAM, (X, 2.0, X))
    assert str(error.value).startswith(
        "the program cannot be called with these inputs: too many positional arguments\nit takes ("
    )


def test_calls_of_a_block_are_logged():
    model = nn.Sequential(nn.Linear(3, 2))
    with torchgraft.log_calls() as log:
        y = torch.relu(X)
        model(y)
    torch.tanh(y)
    assert log.names == ["torch.relu", "torch.nn.functional.linear"]
    assert [call.module for call in log] == ["", "Sequential.0"]
    with pytest.raises(ZeroDivisionError), torchgraft.log_calls(level="dispatch") as log:
        torch.relu(X)
        1 / 0
    assert log.names == ["aten.relu.default"]
