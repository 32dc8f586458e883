"""`node_call_info`: operators, functions, methods and modules, overloads that are hard to tell apart, and no signature."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchgraft
from torchgraft import node_call_info


def info_of(function, args, kwargs=None, op="call_function"):
    graph = torchgraft.Graph()
    inputs = {name: graph.placeholder(name) for name in ("x", "y", "n")}
    place = lambda value: inputs.get(value, value) if isinstance(value, str) else value
    args = tuple([[place(item) for item in value] if isinstance(value, list) else place(value) for value in args])
    node = graph.create_node(op, function, args, {key: place(value) for key, value in (kwargs or {}).items()})
    info = node_call_info(node)
    assert len(info.given) == len(node.args) + len(node.kwargs)
    return info


def shown(info):
    return {name: str(value) for name, value in info.arguments.items()}


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (torch.ops.aten.addmm.default, ("x", "y", "n"), {}, "input=x mat1=y mat2=n beta=1 alpha=1"),
        (torch.ops.aten.sum.dim_IntList, ("x", [0], True), {}, "input=x dim=[0] keepdim=True dtype=None"),
        (torch.add, ("x", "y"), {"alpha": 2}, "input=x other=y alpha=2"),
        (torch.add, ("x", 1), {}, "input=x other=1 alpha=1"),
        (torch.cat, (["x", "y"],), {"dim": 1}, "tensors=[x, y] dim=1"),
        (torch.zeros, (2, 3), {}, "size=[2, 3] dtype=None layout=None device=None pin_memory=None"),
        (F.relu, ("x",), {}, "input=x inplace=False"),
        (F.dropout, ("x", 0.1), {}, "input=x p=0.1 training=True inplace=False"),
        (operator.mul, ("x", "x"), {}, "a=x b=x"),
        (getattr, ("x", "shape"), {}, "object=x name=shape"),
        (print, ("x",), {"end": ""}, "args[0]=x end="),
    ],
)
def test_functions(function, args, kwargs, expected: str) -> None:
    found = " ".join(f"{name}={value}" for name, value in shown(info_of(function, args, kwargs)).items())
    assert found == expected


@pytest.mark.parametrize(
    ("method", "args", "kwargs", "expected"),
    [
        ("view", ("x", 2, -1), {}, {"input": "x", "size": "[2, -1]"}),
        ("view", ("x", "n", -1), {}, {"input": "x", "size": "[n, -1]"}),
        ("view", ("x", [2, -1]), {}, {"input": "x", "size": "[2, -1]"}),
        ("permute", ("x", 0, 2, 1), {}, {"input": "x", "dims": "[0, 2, 1]"}),
        ("size", ("x", 0), {}, {"input": "x", "dim": "0"}),
        ("mean", ("x", 1), {"keepdim": True}, {"input": "x", "dim": "1", "keepdim": "True", "dtype": "None"}),
        ("split", ("x", 2), {}, {"self": "x", "split_size": "2", "dim": "0"}),
        ("no_such_method", ("x", 2), {}, {"args[0]": "x", "args[1]": "2"}),
    ],
)
def test_methods(method: str, args, kwargs, expected: dict[str, str]) -> None:
    assert shown(info_of(method, args, kwargs, op="call_method")) == expected


def test_modules_and_the_other_opcodes() -> None:
    class Scale(nn.Module):
        def forward(self, x, factor=2.0, *, shift=None):
            return x * factor

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Scale()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x, y=3):
            return self.scale(x) + self.weight * y

    tracer = torchgraft.Tracer()
    tracer.is_leaf_module = lambda module, path: True
    model = Model()
    program = torchgraft.GraphModule(model, tracer.trace(model))
    infos = {node.name: node_call_info(node) for node in program.graph.nodes}
    assert shown(infos["scale"]) == {"x": "x", "factor": "2.0", "shift": "None"}
    assert infos["y"].arguments == {"default": 3} and infos["x"].arguments == {} and infos["weight"].arguments == {}
    assert shown(infos["output"]) == {"result": "add"}
    assert infos["scale"].signature == "(x, factor=2.0, *, shift=None)"


def test_a_module_that_is_not_there_is_bound_by_position() -> None:
    graph = torchgraft.Graph()
    info = node_call_info(graph.create_node("call_module", "gone", (graph.placeholder("x"),), {"k": 1}))
    assert not info.bound and list(info.arguments) == ["args[0]", "k"]


def test_arguments_that_do_not_fit() -> None:
    info = info_of(torch.ops.aten.relu.default, ("x", "y", 3))
    assert not info.bound and list(info.arguments) == ["args[0]", "args[1]", "args[2]"]


def test_every_node_of_a_large_model_has_an_answer() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    for level in ("module", "function", "aten"):
        program = torchgraft.capture(model, (torch.ones(1, 3, 8),), level=level)
        assert [node for node in program.graph.nodes if node.args and not node_call_info(node).bound] == []
