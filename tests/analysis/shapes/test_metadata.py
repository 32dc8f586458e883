"""`shapes`: metadata of every value, on fakes and for real."""

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft import zoo
from torchgraft.analysis.shapes import shapes, tree_metadata


@pytest.mark.parametrize("name, sizes", [("mlp", {}), ("resnet18", {"size": 64}), ("transformer", {"length": 8})])
def test_fakes_see_what_a_run_sees(name: str, sizes: dict[str, int]) -> None:
    options = {"layers": 2, "width": 32} if name == "transformer" else {}
    program = torchgraft.symbolic_trace(zoo.create(name, **options))
    args = zoo.example_inputs(name, batch=2, **sizes)
    found = shapes(program, args)
    assert found == shapes(program, args, compute=True)
    assert next(iter(found.values())).shape == args[0].shape


def test_the_program_is_not_edited() -> None:
    program = torchgraft.symbolic_trace(lambda x: (x + 1, [x]))
    result = shapes(program, torch.ones(2))
    assert result["add"].shape == (2,) and "tensor_meta" not in list(program.graph.nodes)[1].meta
    assert result["output"][1][0].dtype == torch.float32
    assert str(result).splitlines()[-1].split(maxsplit=1) == ["output", "(f32[2], (f32[2]))"]


def test_a_shape_that_depends_on_values_needs_a_real_run() -> None:
    program = torchgraft.symbolic_trace(lambda x: x.nonzero().float())
    with pytest.raises(torchgraft.GraftError, match="nonzero"):
        shapes(program, torch.eye(3))
    assert shapes(program, torch.eye(3), compute=True)["float_1"].shape == (3, 2)


def test_requires_grad_and_memory_format_are_there() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1)).to(memory_format=torch.channels_last)
    x = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    found = shapes(model, x)["output"]
    assert found.requires_grad and found.memory_format is torch.channels_last


def test_values_without_tensors_have_no_metadata() -> None:
    assert tree_metadata((1, None, "a")) is None
    assert tree_metadata({"a": torch.ones(1)})["a"].shape == (1,)
