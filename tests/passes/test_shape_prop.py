"""ShapeProp and FakeTensorProp beside torch.fx's own: the same metadata, the same interface, errors that name the line."""

from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes import fake_tensor_prop as their_fake_tensor_prop
from torch.fx.passes import shape_prop as their_shape_prop

import torchgraft
from torchgraft.passes.fake_tensor_prop import FakeTensorProp
from torchgraft.passes.shape_prop import ShapeProp, TensorMetadata, _extract_tensor_metadata


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.relu_(self.norm(self.conv(x))) * self.scale
        halves = y.chunk(2, 1)
        return {"views": (halves[0].transpose(2, 3), y.shape[0]), "sum": y.double().sum()}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_metadata_is_that_of_torch_fx(memory_format: torch.memory_format) -> None:
    model = Mixed()
    x = torch.ones(2, 3, 8, 8).contiguous(memory_format=memory_format)
    ours, theirs = torchgraft.symbolic_trace(model), torch.fx.symbolic_trace(model)
    ShapeProp(ours).propagate(x)
    their_shape_prop.ShapeProp(theirs).propagate(x)
    for mine, their in zip(ours.graph.nodes, theirs.graph.nodes, strict=True):
        assert mine.name == their.name
        assert mine.meta.get("tensor_meta") == their.meta.get("tensor_meta")
        assert mine.meta["type"].__name__ == their.meta["type"].__name__
    assert TensorMetadata._fields == their_shape_prop.TensorMetadata._fields


def test_fakes_give_the_same_without_computing() -> None:
    model = Mixed()
    ours, fakes = torchgraft.symbolic_trace(model), torchgraft.symbolic_trace(model)
    x = torch.ones(2, 3, 8, 8)
    ShapeProp(ours).propagate(x)
    version = model.norm.running_mean._version
    result = ShapeProp(fakes, fake_mode=FakeTensorMode()).propagate(x)
    assert model.norm.running_mean._version == version and type(result["sum"]).__name__ == "FakeTensor"
    for real, fake in zip(ours.graph.nodes, fakes.graph.nodes, strict=True):
        assert real.meta.get("tensor_meta") == fake.meta.get("tensor_meta")


def test_an_active_fake_mode_is_used() -> None:
    program = torchgraft.symbolic_trace(Mixed())
    mode = FakeTensorMode()
    with mode:
        propagation = ShapeProp(program)
    assert propagation.fake_mode is mode
    propagation.propagate(torch.ones(2, 3, 8, 8))
    assert program.graph.find_nodes(op="call_module", target="conv")[0].meta["tensor_meta"].shape == (2, 4, 6, 6)


def test_an_error_names_the_node_and_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    class Wrong(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x @ y

    program = torchgraft.symbolic_trace(Wrong())
    with pytest.raises(
        RuntimeError, match=r"(?s)ShapeProp error for: node=%matmul.*test_shape_prop.py:\d+ \"return x @ y\""
    ):
        ShapeProp(program).propagate(torch.ones(2, 3), torch.ones(2, 3))
    assert capsys.readouterr() == ("", "")


def test_sparse_and_quantized_tensors() -> None:
    sparse = torch.eye(3).to_sparse()
    assert _extract_tensor_metadata(sparse).stride == () and _extract_tensor_metadata(sparse).memory_format is None
    quantized = torch.quantize_per_channel(
        torch.ones(2, 2), torch.tensor([0.5, 0.25]), torch.tensor([0, 1]), 0, torch.qint8
    )
    assert _extract_tensor_metadata(quantized) == their_shape_prop._extract_tensor_metadata(quantized)
    single = torch.quantize_per_tensor(torch.ones(2), 0.5, 3, torch.quint8)
    assert _extract_tensor_metadata(single) == their_shape_prop._extract_tensor_metadata(single)


def test_fake_tensor_prop_notes_what_torch_fx_does() -> None:
    def function(x: torch.Tensor) -> Any:
        y = x + 1
        z = y.t_()
        return z, y.shape[0], [x.sum(), None]

    ours, theirs = torchgraft.symbolic_trace(function), torch.fx.symbolic_trace(function)
    FakeTensorProp(ours).propagate(torch.ones(2, 3))
    their_fake_tensor_prop.FakeTensorProp(theirs).propagate(torch.ones(2, 3))

    def described(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), value.dtype, value.stride()
        # Older versions of torch note no numbers.
        return [described(item) for item in value] if isinstance(value, (tuple, list)) else None

    for mine, their in zip(ours.graph.nodes, theirs.graph.nodes, strict=True):
        assert described(mine.meta.get("val")) == described(their.meta.get("val")), mine
    assert list(ours.graph.nodes)[1].meta["val"].shape == (2, 3)  # as it was before t_()


def test_fake_tensor_prop_takes_fakes_and_a_model_with_weights() -> None:
    mode = FakeTensorMode()
    program = torchgraft.symbolic_trace(Mixed())
    with mode:
        x = torch.ones(2, 3, 8, 8)
    result = FakeTensorProp(program, mode).propagate_dont_convert_inputs(x)
    assert result["views"][0].shape == (2, 2, 6, 6) and result["views"][0].fake_mode is mode
