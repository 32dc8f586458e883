"""`symbolic_shapes`: expressions that hold at other sizes than those of the example, and what is refused."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import torchgraft
from torchgraft import zoo
from torchgraft.analysis.shapes import shapes
from torchgraft.bridge.symbolic_shapes import Dimension, SymbolicShapes, symbolic_shapes


def at(found: SymbolicShapes, **sizes: int) -> dict[str, Any]:
    """The shapes as numbers, tensors only."""
    result = {}
    for name, shape in found.items():
        if isinstance(shape, tuple):
            result[name] = tuple(size(**sizes) if isinstance(size, Dimension) else size for size in shape)
    return result


def numbers(program: torchgraft.GraphModule, *args: torch.Tensor) -> dict[str, Any]:
    return {name: tuple(value.shape) for name, value in shapes(program, args).items() if hasattr(value, "shape")}


def agree(program: torchgraft.GraphModule, found: SymbolicShapes, sizes: dict[str, int], *args: torch.Tensor) -> None:
    expected = numbers(program, *args)
    evaluated = at(found, **sizes)
    assert {name: evaluated[name] for name in expected} == expected


RESNET = torchgraft.symbolic_trace(zoo.create("resnet18").eval())
RESNET_SHAPES = symbolic_shapes(RESNET, {"x": ("batch", 3, "h", "w")})
TRANSFORMER = torchgraft.capture(
    zoo.create("transformer", layers=1, width=32, attention="fused").eval(), zoo.example_inputs("transformer", batch=2)
)
TRANSFORMER_SHAPES = symbolic_shapes(TRANSFORMER, {"ids": ("batch", "t")}, zoo.example_inputs("transformer", batch=2))


@settings(max_examples=6)
@given(st.integers(2, 9), st.integers(33, 300), st.integers(33, 300))
def test_convolutions_hold_at_any_size(batch: int, h: int, w: int) -> None:
    agree(RESNET, RESNET_SHAPES, {"batch": batch, "h": h, "w": w}, torch.empty(batch, 3, h, w, device="meta"))


@settings(max_examples=6)
@given(st.integers(2, 9), st.integers(2, 60))
def test_attention_holds_at_any_size(batch: int, t: int) -> None:
    ids = torch.zeros(batch, t, dtype=torch.int64)
    agree(TRANSFORMER, TRANSFORMER_SHAPES, {"batch": batch, "t": t}, ids)


def test_expressions_read_like_people_write_them() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        joined = torch.cat([x, x, y], 1)
        return joined.flatten(0, 1), joined.sum(-1), x.view(x.shape[0], -1, 16), joined @ joined.transpose(1, 2)

    program = torchgraft.symbolic_trace(function)
    found = symbolic_shapes(program, {"x": ("batch", "t", 64), "y": ("batch", "s", 64)})
    assert repr(found["cat"]) == "(batch, s + 2*t, 64)"
    assert found["sum_1"] == ("batch", "s + 2*t")
    assert repr(found["view"]) == "(batch, 4*t, 16)"
    assert repr(found["matmul"]) == "(batch, s + 2*t, s + 2*t)"
    assert found["flatten"][0](batch=2, s=3, t=5) == 26
    assert RESNET_SHAPES["maxpool"][2] == "((h - 1)//4) + 1"
    assert RESNET_SHAPES["fc"] == ("batch", 1000)


def test_upsampling_pooling_and_strided_slices() -> None:
    def function(x: torch.Tensor) -> Any:
        return (
            F.interpolate(x, scale_factor=2),
            F.avg_pool2d(x, 3, 2),
            x[:, :, ::2],
            F.pad(x, (1, 2)),
            x.unfold(3, 4, 2),
        )

    program = torchgraft.symbolic_trace(function)
    found = symbolic_shapes(program, {"x": (None, 3, "h", "w")}, torch.ones(2, 3, 32, 48))
    agree(program, found, {"h": 57, "w": 31}, torch.ones(2, 3, 57, 31))


def test_a_size_that_the_program_fixes_is_said() -> None:
    found = symbolic_shapes(torchgraft.symbolic_trace(lambda x: x + torch.ones(7)), {"x": ("n",)}, torch.ones(7))
    assert found.fixed == {"n": 7} and found["add"] == (7,)
    assert str(found).endswith("where n is 7")


def test_an_example_of_one_does_not_fix_the_batch() -> None:
    found = symbolic_shapes(nn.Sequential(nn.Linear(3, 4)), {"input": ("batch", 3)}, torch.ones(1, 3))
    assert found["output"] == ("batch", 4) and found.fixed == {}


def test_conditions_are_in_the_same_names() -> None:
    found = symbolic_shapes(torchgraft.symbolic_trace(lambda x: x.view(-1, 4)), {"x": ("n",)})
    assert repr(found["view"]) == "(n//4, 4)" or found["view"][0](n=12) == 3
    assert any("n" in condition for condition in found.conditions)


def test_a_size_that_depends_on_values_has_a_name_of_its_own() -> None:
    found = symbolic_shapes(torchgraft.symbolic_trace(lambda x: x.nonzero() + 1), {"x": ("n", 3)})
    assert repr(found["add"]) == "(u0, 2)"


def test_what_is_refused() -> None:
    def chooses(x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[0] > 3 else x + 1

    graph = torchgraft.Graph()
    graph.output(graph.call_function(chooses, (graph.call_method("nonzero", (graph.placeholder("x"),)),)))
    with pytest.raises(torchgraft.GraftError, match=r"(?s)shape of 'chooses': it depends on the values of a tensor"):
        symbolic_shapes(torchgraft.GraphModule({}, graph), {"x": ("n", 3)})
    program = torchgraft.symbolic_trace(lambda x: x + 1)
    with pytest.raises(torchgraft.GraftError, match="the inputs are 'x'; use one of these"):
        symbolic_shapes(program, {"y": ("n",)})
    with pytest.raises(torchgraft.GraftError, match="1 dimensions, and 2 are named"):
        symbolic_shapes(program, {"x": ("n", "m")}, torch.ones(3))
    with pytest.raises(torchgraft.GraftError, match="there is no example to take it from"):
        symbolic_shapes(program, {"x": (None,)})
    with pytest.raises(torchgraft.GraftError, match="name its sizes or give example inputs"):
        symbolic_shapes(torchgraft.symbolic_trace(lambda x, y: x + y), {"x": ("n",)})
    with pytest.raises(torchgraft.GraftError, match="no size is given for h"):
        RESNET_SHAPES["maxpool"][2](w=3)
