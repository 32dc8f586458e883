"""The node named for a wrong program is the one that was made wrong, however the program was captured."""

import operator

import pytest
import torch
from torch import nn

from torchgraft import symbolic_trace, zoo
from torchgraft.capturing.program import capture
from torchgraft.ir.graph import Graph
from torchgraft.recording.alignment import _called, fingerprint
from torchgraft.recording.verify import verify

torch.manual_seed(0)
RESNET = zoo.create("resnet18").eval()
IMAGES = zoo.example_inputs("resnet18", batch=2, size=32)


def watched():
    return capture(RESNET, IMAGES)


def symbolic():
    return symbolic_trace(RESNET)


def relus(program):
    return [node for node in program.graph.nodes if node.op == "call_module" and str(node.target).endswith("relu")]


def difference(program):
    return verify(RESNET, program, IMAGES, other_values=False, other_sizes=False).first_difference


@pytest.fixture(params=[watched, symbolic])
def program(request):
    return request.param()


pytestmark = pytest.mark.zoo


def replaced(program, node, function):
    with program.graph.inserting_after(node):
        new = program.graph.call_function(function, node.args)
    node.replace_all_uses_with(new)
    program.graph.erase_node(node)
    return new


@pytest.mark.parametrize("number", [0, 3, 4, 16])
def test_another_function(program, number):
    node = replaced(program, relus(program)[number], torch.sigmoid)
    assert difference(program).node == node.name


@pytest.mark.parametrize("number", [3, 4])
def test_call_that_hands_its_input_on(program, number):
    path = relus(program)[number].target
    node = replaced(program, relus(program)[number], torch.clone)
    found = difference(program)
    assert found.node == node.name
    assert found.text.endswith(f"; the model makes the call call_module {path} there")


def test_call_left_out(program):
    node = relus(program)[5]
    user = next(iter(node.users))
    node.replace_all_uses_with(node.args[0])
    program.graph.erase_node(node)
    assert difference(program).node == user.name


def test_wrong_argument(program):
    additions = [node for node in program.graph.nodes if node.target in (operator.add, operator.iadd, "add_", "add")]
    node = additions[2]
    node.args = (node.args[0], node.args[0])
    found = difference(program)
    assert found.node == node.name
    assert found.line.endswith('"y += x if self.downsample is None else self.downsample(x)"')


def test_wrong_module(program):
    program.get_submodule("layer2.0").register_module("conv2", nn.Conv2d(128, 128, 3, padding=1))
    node = next(node for node in program.graph.nodes if node.target == "layer2.0.conv2")
    try:
        assert difference(program).node == node.name
    finally:
        assert isinstance(RESNET.layer2[0].conv2, nn.Conv2d)


def test_wrong_constant():
    model = zoo.create("transformer", layers=2).eval()
    inputs = zoo.example_inputs("transformer", batch=2, length=6)
    for program in (capture(model, inputs), symbolic_trace(model)):
        node = program.graph.find_nodes(op="call_function", target=torch.softmax)[1]
        node.kwargs = {"dim": -2}
        verification = verify(model, program, inputs, other_values=False, other_sizes=False)
        assert verification.first_difference.node == node.name


def test_wrong_output():
    def model(x):
        first = x + 1
        second = first * 2
        return first, second

    program = symbolic_trace(model)
    output = program.graph.output_node()
    output.args = (output.args[0][::-1],)
    found = verify(model, program, (torch.rand(3),), other_sizes=False).first_difference
    assert found.node == "output"
    assert "every value is the model's, but the program returns others" in found.text


def test_removed_draw():
    def model(x):
        torch.rand(3)
        return x + 1

    found = verify(model, symbolic_trace(lambda x: x + 1), (torch.rand(3),), other_sizes=False).first_difference
    assert found.node is None
    assert found.text == "the program lacks the call 'rand' (call_function torch.rand)"
    assert found.line.endswith('"torch.rand(3)"')


def test_setitem():
    def model(x):
        y = x * 2
        y[0] = 5
        return y + 1

    program = symbolic_trace(model)
    node = program.graph.find_nodes(op="call_function", target=operator.setitem)[0]
    node.args = (node.args[0], 1, 5)
    assert verify(model, program, (torch.rand(3),), other_sizes=False).first_difference.node == node.name


def test_fingerprints():
    x = torch.randn(50)
    print_of_x = fingerprint(x)
    assert print_of_x.same_values(fingerprint(x * (1 + 1e-7))) and print_of_x.same_values(fingerprint(x.to("meta")))
    assert not print_of_x.same_values(fingerprint(x.flip(0))) and print_of_x.shape == (50,)


@pytest.mark.parametrize(
    ("op", "target", "key"),
    [
        ("call_function", operator.add, "add"),
        ("call_function", operator.iadd, "add"),
        ("call_method", "__add__", "add"),
        ("call_method", "relu_", "relu"),
        ("call_function", torch.ops.aten.mm.default, "mm"),
        ("call_method", "index", "index"),
        ("call_function", symbolic, "symbolic"),
    ],
)
def test_names_of_calls(op, target, key):
    graph = Graph()
    assert _called(graph.create_node(op, target, (graph.placeholder("x"),))) == key
