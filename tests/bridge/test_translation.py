"""What cannot cross to torch.fx, or would not mean the same in code that torch.fx writes."""

import enum
import operator

import pytest
import torch
import torch.fx
from torch import nn

import torchgraft
from tests.bridge.comparison import assert_same_module
from tests.bridge.models import Pair
from tests.torch_versions import TORCH
from torchgraft import BridgeError, from_fx, to_fx


def function(*values):
    return values


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize("convert", [from_fx, to_fx])
def test_a_plain_module_is_refused(convert):
    with pytest.raises(BridgeError, match="not a torch.nn.modules.activation.ReLU\n  capture it with symbolic_trace"):
        convert(nn.ReLU())


def test_a_node_that_prints_in_its_own_way_is_refused():
    module = torch.fx.symbolic_trace(lambda x: torch.relu(x))
    list(module.graph.nodes)[1]._repr_fn = lambda node: "other"
    with pytest.raises(BridgeError, match="cannot convert node 'relu': it has a _repr_fn"):
        from_fx(module)


class Opaque:
    pass


@pytest.mark.parametrize(
    "value",
    [Opaque, Opaque(), torch.ones(2), {"a": torch.ops.aten.relu.default}, {"p": Pair(1, 2)}, Pair(Color.RED, 1)],
)
def test_what_torch_fx_cannot_write_is_refused(value):
    graph = torchgraft.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(function, (x, value)))
    with pytest.raises(
        BridgeError, match="cannot carry node 'function' over to torch.fx: its argument .*get_attr node"
    ):
        to_fx(torchgraft.GraphModule(nn.Module(), graph))


WRITTEN_BY_NAME = [Pair(1, "x"), Color.RED, [torch.ops.aten.relu.default]]


@pytest.mark.parametrize(
    "value",
    [
        1.5,
        float("inf"),
        2j,
        "a'b",
        b"x",
        ...,
        torch.float32,
        torch.device("cpu"),
        torch.strided,
        range(3),
        *(WRITTEN_BY_NAME if TORCH >= (2, 13) else ()),
    ],
)
def test_what_torch_fx_can_write_crosses(value):
    module = returning(value)
    assert to_fx(module)(1) == [1, value]
    assert_same_module(from_fx(to_fx(module)), module)


@pytest.mark.parametrize("value", WRITTEN_BY_NAME)
def test_what_torch_fx_writes_by_name_crosses_in_an_argument(value):
    graph = torchgraft.Graph()
    graph.output(graph.call_function(function, (graph.placeholder("x"), value)))
    module = torchgraft.GraphModule(nn.Module(), graph)
    assert to_fx(module)(1) == (1, value)
    assert_same_module(from_fx(to_fx(module)), module)


@pytest.mark.skipif(TORCH >= (2, 13), reason="torch.fx can write them into an output")
@pytest.mark.parametrize("value", WRITTEN_BY_NAME)
def test_what_torch_fx_cannot_write_into_an_output_is_refused(value):
    with pytest.raises(BridgeError, match="cannot carry node 'output' over to torch.fx"):
        to_fx(returning(value))


def returning(value):
    graph = torchgraft.Graph()
    graph.output([graph.placeholder("x"), value])
    return torchgraft.GraphModule(nn.Module(), graph)


def test_what_torch_fx_writes_wrongly_is_warned_of():
    graph = torchgraft.Graph()
    graph.output(graph.call_function(operator.pow, (-2, graph.placeholder("x"))))
    module = torchgraft.GraphModule(nn.Module(), graph)
    with pytest.warns(UserWarning, match=r"writes node 'pow_1' as -2 \*\* exponent"):
        theirs = to_fx(module)
    assert module(2) == torch.fx.Interpreter(theirs).run(2) == 4


def test_types_that_torch_takes_for_dtypes_cross():
    def model(x):
        return x.to(int), torch.zeros(3, dtype=float), torch.ones(2, dtype=bool), x.sum(dtype=complex)

    x = torch.randn(3)
    theirs = to_fx(torchgraft.capture(model, x))
    for program in (theirs, from_fx(theirs)):
        for found, expected in zip(program(x), model(x), strict=True):
            torch.testing.assert_close(found, expected)


def test_types_that_other_functions_take_are_refused():
    graph = torchgraft.Graph()
    graph.output(graph.call_function(function, (graph.placeholder("x"), int)))
    with pytest.raises(BridgeError, match="its argument <class 'int'> of type type cannot be written"):
        to_fx(torchgraft.GraphModule(nn.Module(), graph))
