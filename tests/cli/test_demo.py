"""`graft demo` shows a program, changes it, and notices when the result is wrong."""

import pytest
import torch
from torch import nn

from torchgraft import zoo
from torchgraft.cli import demo
from torchgraft.cli.main import main


def test_small_model(capsys):
    assert main(["demo", "--model", "mlp"]) == 0
    text = capsys.readouterr().out
    assert "Capture mlp: 5 nodes" in text
    assert "def forward(self, x : torch.Tensor) -> torch.Tensor:" in text
    assert "torch.fx " in text and "times as long" in text
    assert "calls of GELU in the graph: 1 " in text
    assert text.count(" agree: largest difference 0\n") == 2


@pytest.mark.zoo
def test_resnet50_is_the_default(capsys):
    assert main(["demo"]) == 0
    text = capsys.readouterr().out
    assert "Capture resnet50: 177 nodes" in text
    assert "... and 169 more nodes" in text
    assert "calls of GELU in the graph: 49 " in text
    assert text.count(" agree: ") == 2
    assert max(map(len, text.splitlines())) <= 120


def test_rows_sets_how_much_is_shown(capsys):
    assert main(["demo", "--model", "mlp", "--rows", "2"]) == 0
    text = capsys.readouterr().out
    assert "... and 3 more nodes" in text
    assert "more lines" in text


def test_wrong_result_is_said_and_fails(capsys, monkeypatch):
    monkeypatch.setattr(demo, "eager_with_gelu", lambda model: model)
    assert main(["demo", "--model", "mlp"]) == 1
    assert "the changed program and the model with nn.GELU DO NOT AGREE: largest difference " in capsys.readouterr().out


def test_unknown_model(capsys):
    assert main(["demo", "--model", "resnet49"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("graft demo: no model named 'resnet49' in torchgraft.zoo; did you mean ")
    assert error.count("\n") == 1


def test_model_without_relu(capsys):
    assert main(["demo", "--model", "deep_recommender"]) == 1
    assert "graft demo: nothing to swap: the model calls no nn.ReLU module" in capsys.readouterr().err


def test_eager_swap_leaves_the_model_alone():
    model = zoo.create("resnet18")
    changed = demo.eager_with_gelu(model)
    assert not any(isinstance(module, nn.GELU) for module in model.modules())
    assert not any(isinstance(module, nn.ReLU) for module in changed.modules())
    assert torch.equal(changed.conv1.weight, model.conv1.weight)
