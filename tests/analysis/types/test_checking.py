"""`check_types`: sizes that follow, sizes that stay open, and shapes that cannot agree."""

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
from torchgraft.analysis.types import Dyn, TensorType, check_types, is_consistent
from torchgraft.errors import GraftError, ShapeError


def result(function: Any, *types: Any) -> Any:
    program = torchgraft.symbolic_trace(function)
    names = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    return check_types(program, dict(zip(names, types, strict=True)))["output"]


def test_annotations_of_forward_are_followed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, stride=2)
            self.fc = nn.Linear(8, 10)

        def forward(self, x: TensorType((Dyn, 3, 33, Dyn))) -> torch.Tensor:  # type: ignore[valid-type]
            return self.fc(self.conv(x).mean((2, 3)))

    found = check_types(torchgraft.symbolic_trace(Model()))
    assert found["conv"] == TensorType((Dyn, 8, 16, Dyn))
    assert found["output"] == TensorType((Dyn, 10))
    assert str(found).splitlines()[1].split() == ["conv", "TensorType[(Dyn,", "8,", "16,", "Dyn)]"]


def test_whole_models_with_open_sizes() -> None:
    resnet = torchgraft.symbolic_trace(zoo.create("resnet18").eval())
    found = check_types(resnet, {"x": TensorType((Dyn, 3, Dyn, 224))})
    assert found["maxpool"] == TensorType((Dyn, 64, Dyn, 56)) and found["output"] == TensorType((Dyn, 1000))
    transformer = torchgraft.symbolic_trace(zoo.create("transformer", layers=1, width=32))
    found = check_types(transformer, {"ids": TensorType((Dyn, Dyn))})
    assert found["softmax"] == TensorType((Dyn, 8, Dyn, Dyn)) and found["output"] == TensorType((Dyn, Dyn, 4096))


def test_a_disagreement_names_the_node_the_types_and_the_line() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x)

    program = torchgraft.symbolic_trace(Wrong())
    with pytest.raises(ShapeError) as caught:
        check_types(program, {"x": TensorType((Dyn, 5, Dyn, Dyn))})
    message = str(caught.value)
    assert message.startswith("shapes cannot agree: node 'conv' calls conv = Conv2d(3, 8, kernel_size=(3, 3)")
    assert "with TensorType[(Dyn, 5, Dyn, Dyn)]" in message and "ways to fill the open sizes fits" in message
    assert "test_checking.py:" in message and '"return self.conv(x)"' in message
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    "function, types",
    [
        (lambda x, y: x @ y, (TensorType((Dyn, 3)), TensorType((4, Dyn)))),
        (lambda x, y: x + y, (TensorType((Dyn, 3)), TensorType((5,)))),
        (lambda x, y: torch.cat([x, y], 1), (TensorType((2, Dyn)), TensorType((3, Dyn)))),
        (lambda x: x.view(7, 2), (TensorType((5, 3)),)),
        (lambda x: x.transpose(0, 3), (TensorType((Dyn, Dyn)),)),
        (lambda x: F.linear(x, torch.ones(4, 5)), (TensorType((Dyn, 6)),)),
    ],
)
def test_shapes_that_cannot_agree(function: Any, types: tuple[Any, ...]) -> None:
    with pytest.raises(ShapeError, match="shapes cannot agree"):
        result(function, *types)


@pytest.mark.parametrize(
    "function, types, expected",
    [
        (lambda x, y: x + y, (TensorType((Dyn, 3)), TensorType((7, 1))), TensorType((7, 3))),
        (lambda x, y: x @ y, (TensorType((Dyn, Dyn)), TensorType((4, 5))), TensorType((Dyn, 5))),
        (lambda x: x[:4], (TensorType((Dyn, 2)),), TensorType((Dyn, 2))),
        (lambda x: x.view(-1, 12), (TensorType((Dyn, 4)),), TensorType((Dyn, 12))),
        (lambda x: x.view(-1, 7, 11), (TensorType((Dyn, 13)),), TensorType((Dyn, 7, 11))),
        (lambda x: x.view(-1, 7, 11, 13), (TensorType((Dyn, 2)),), TensorType((Dyn, 7, 11, 13))),
        (lambda x: x.view(7, 7, 11), (TensorType((Dyn, 49)),), TensorType((7, 7, 11))),
        (lambda x: x.view(x.shape[0] * x.shape[1], 5), (TensorType((Dyn, Dyn, 5)),), None),
        (lambda x: x.chunk(2, 1)[0], (TensorType((Dyn, 8)),), TensorType((Dyn, 4))),
        (lambda x: x.max(1).values, (TensorType((Dyn, 8)),), None),
        (lambda x: x + 1, (Dyn,), Dyn),
        (lambda x, y: x + y, (Dyn, TensorType((3,))), Dyn),
        (lambda x: {"a": (x.t(), 3)}, (TensorType((2, Dyn)),), {"a": (TensorType((Dyn, 2)), 3)}),
        (lambda x: x[0] if True else x, (TensorType((Dyn, 0)),), TensorType((0,))),
    ],
)
def test_open_sizes_agree_with_anything(function: Any, types: tuple[Any, ...], expected: Any) -> None:
    found = result(function, *types)
    if expected is not None:
        assert found == expected


def test_an_annotation_inside_makes_what_follows_more_precise_or_is_refused() -> None:
    program = torchgraft.symbolic_trace(lambda x: x.exp().t())
    exp = next(node for node in program.graph.nodes if node.target == "exp")
    exp.type = TensorType((4, Dyn))
    assert check_types(program, {"x": TensorType((Dyn, 3))})["output"] == TensorType((3, 4))
    with pytest.raises(
        ShapeError, match=r"'exp' is annotated TensorType\[\(4, Dyn\)\] and makes TensorType\[\(5, 3\)\]"
    ):
        check_types(program, {"x": TensorType((5, 3))})


def test_what_shape_propagation_noted_counts_as_a_type() -> None:
    from torchgraft.passes.shape_prop import ShapeProp

    program = torchgraft.symbolic_trace(lambda x: x.t())
    ShapeProp(program).propagate(torch.ones(2, 3))
    assert check_types(program)["t"] == TensorType((3, 2))


def test_a_shape_that_changes_in_place_is_open_afterwards() -> None:
    program = torchgraft.symbolic_trace(lambda x: (x.t_(), x))
    found = check_types(program, {"x": TensorType((2, 3))})
    assert found["t_"] == TensorType((3, 2)) and found["x"] == Dyn
    twice = torchgraft.symbolic_trace(lambda x, y: (x.t_(), y.t_(), x, y))
    found = check_types(twice, {"x": TensorType((2, 3)), "y": TensorType((2, 3))})
    assert found["x"] == found["y"] == Dyn


def test_calls_that_cannot_be_tried_stay_open() -> None:
    assert result(lambda x: x.nonzero() + 1, TensorType((Dyn,))) == Dyn
    assert result(lambda x: x.to("cpu").numpy(), TensorType((3,))) == Dyn


def test_an_annotation_for_nothing_is_refused() -> None:
    with pytest.raises(torchgraft.GraftError, match="annotations are for y"):
        check_types(torchgraft.symbolic_trace(lambda x: x), {"y": TensorType((1,))})


OPERATIONS: list[Any] = [
    lambda x: x.t(),
    lambda x: x.flatten(),
    lambda x: torch.cat([x, x], 0),
    lambda x: x.sum(0, keepdim=True),
    lambda x: x.unsqueeze(0).squeeze(0),
    lambda x: x[:, :3],
    lambda x: x @ x.t(),
    lambda x: F.pad(x, (1, 2)),
    lambda x: x.repeat(1, 2),
]


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        ((2, 3), "is no type"), (torch.Size([2]), "is no type"), ("float", "is no type"), (None, "is no type"),
        (TensorType((-1, 3)), "has the size -1"), (TensorType((2.0,)), "has the size 2.0"),
        (TensorType(("batch",)), "has the size 'batch'"), (TensorType((True,)), "has the size True"),
    ],
)  # fmt: skip
def test_annotations_that_say_nothing_are_refused(annotation: Any, message: str) -> None:
    with pytest.raises(GraftError, match=message):
        result(lambda x: x + 1, annotation)


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 9), st.booleans()
)
def test_a_program_that_runs_is_never_refused(operations: list[Any], rows: int, columns: int, open_rows: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for operation in operations:
            x = operation(x)
        return x

    program = torchgraft.symbolic_trace(function)
    try:
        expected = shapes(program, torch.ones(rows, columns), compute=True)
    except Exception:
        return
    annotation = TensorType((Dyn if open_rows else rows, Dyn if not open_rows else columns))
    found = check_types(program, {"x": annotation})
    for name, metadata in expected.items():
        assert is_consistent(found[name], TensorType(tuple(metadata.shape))), name
