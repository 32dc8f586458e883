"""What is written in and behind a box."""

import operator

import pytest
import torch

import torchgraft
from torchgraft.view.drawing import labels
from torchgraft.view.plain import argument_text, shape_text


def node_of(function, *inputs, level="module", name=None):
    program = torchgraft.capture(function, inputs, level=level)
    nodes = [node for node in program.graph.nodes if name is None or node.name == name]
    return program, nodes


def test_kinds_of_a_traced_model():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.register_buffer("table", torch.ones(3))
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, x):
            return torch.relu(self.layer(x) * self.weight + self.table).neg()

    program = torchgraft.symbolic_trace(Model())
    kinds = {node.name: labels.kind_of(node, program, {}) for node in program.graph.nodes}
    assert kinds == {
        "x": "input",
        "layer": "module",
        "weight": "parameter",
        "mul": "function",
        "table": "constant",
        "add": "function",
        "relu": "function",
        "neg": "method",
        "output": "output",
    }


def test_kinds_of_a_joint_program():
    program = torchgraft.capture(torch.nn.Linear(2, 3), (torch.ones(4, 2),), level="joint")
    kinds = [labels.kind_of(node, program, {}) for node in program.graph.nodes]
    assert kinds[:4] == ["parameter", "parameter", "input", "tangent"]
    assert {"function", "backward"} <= set(kinds)


def test_a_guard_is_known_and_says_what_it_asks():
    program = torchgraft.capture(lambda x: x + 1 if x.sum() > 0 else x - 1, (torch.ones(2),))
    guards = [node for node in program.graph.nodes if labels.kind_of(node, program, {}) == "guard"]
    assert guards
    tooltips = [labels.tooltip_of(node, "guard", program, "") for node in guards]
    assert any("True" in tooltip for tooltip in tooltips)
    assert not any("/home/" in tooltip or "/tmp/" in tooltip for tooltip in tooltips)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(2, 3), "2×3"),
        (torch.ones((), dtype=torch.float64), "scalar f64"),
        (torch.ones(0, 3, dtype=torch.bool), "0×3 b8"),
        ((torch.ones(2), torch.arange(3)), "2, 3 i64"),
        ([torch.ones(1), torch.ones(2), torch.ones(3)], "1, 2 …"),
        (None, ""),
        (7, ""),
        (torch.Size([2, 3]), ""),
        ("text", ""),
    ],
)
def test_shapes(value, text):
    assert shape_text(value) == text


def test_huge_arguments_are_cut_before_they_are_written():
    class Slow(list):
        def __repr__(self):
            raise AssertionError("nobody may ask for all of it")

    huge = Slow(range(10_000_000))
    assert len(argument_text(huge, 400)) <= 400
    assert argument_text({"a": [1, (2,)], "b": slice(None, 3)}) == "{'a': [1, (2,)], 'b': slice(None, 3, None)}"
    assert len(argument_text("x" * 10_000_000, 400)) <= 402


def test_texts_hold_no_addresses():
    class Plain:
        pass

    class Rude:
        def __repr__(self):
            raise RuntimeError("no")

    assert argument_text([Plain(), Rude(), torch.ones(2), operator.add, lambda x: x]).startswith(
        "[Plain, Rude, tensor 2,"
    )
    assert " at " not in argument_text([Plain(), Plain().__init__])


def test_a_module_whose_extra_repr_fails_is_drawn_without():
    class Rude(torch.nn.Linear):
        def extra_repr(self):
            raise RuntimeError("no")

    model = torch.nn.Sequential(Rude(2, 2), torch.nn.ReLU())
    program = torchgraft.capture(model, (torch.ones(1, 2),), leaf=Rude)
    assert ">Rude<" in torchgraft.draw(program).svg


def test_the_tooltip_has_arguments_shape_and_the_users_line():
    def forward(x):
        return torch.softmax(x, dim=-1)

    program = torchgraft.capture(forward, (torch.ones(2, 3),))
    node = next(node for node in program.graph.nodes if node.name == "softmax")
    lines = labels.tooltip_of(node, "function", program, "2×3").split("\n")
    assert lines[0] == "%softmax"
    assert lines[1] == "call_function torch.softmax"
    assert "args: (%x,)" in lines
    assert "kwargs: {'dim': -1}" in lines
    assert "value: 2×3" in lines
    assert lines[-1].startswith("drawing/test_labels.py:")
    assert lines[-1].endswith("return torch.softmax(x, dim=-1)")


def test_numbers_are_told_from_tensors():
    program = torchgraft.symbolic_trace(lambda x: x.view(x.size(0) * 2, -1))
    numbers = {}
    for node in program.graph.nodes:
        numbers[node] = labels.is_number(node, None, lambda source: numbers[source])
    assert [node.name for node, is_number in numbers.items() if is_number] == ["size", "mul"]


def test_options_of_modules_in_short():
    conv = torch.nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
    assert labels.short_options(conv.extra_repr()) == "3→64, 7×7, /2, padding=3, bias=False"
    assert labels.short_options(torch.nn.BatchNorm2d(64).extra_repr()) == "64"
    assert labels.short_options(torch.nn.ReLU(inplace=True).extra_repr()) == ""
    assert labels.short_options(torch.nn.MaxPool2d(3, 2, 1).extra_repr()) == "3×3, /2, padding=1"


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(torchgraft.GraftError, match="cannot draw a int: it has no graph of nodes\ngive what capture"):
        torchgraft.draw(3)
