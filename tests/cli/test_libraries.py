"""Models of torchvision, timm and transformers on the command line; where a library is not installed, that is said."""

import importlib.util

import pytest

from torchgraft.cli.libraries import library_model
from torchgraft.cli.main import main
from torchgraft.cli.models import load_model
from torchgraft.errors import GraftError

LIBRARIES = {"torchvision": "torchvision", "timm": "timm", "hf": "transformers"}


@pytest.mark.parametrize("prefix", LIBRARIES)
def test_missing_library_is_one_line(prefix, capsys):
    package = LIBRARIES[prefix]
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(SystemExit) as end:
        main(["show", f"{prefix}:anything"])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"graft show: cannot import {package}: ") and error.count("\n") == 1
    assert error.endswith(f"install it with: pip install {package}\n")


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("hf:llama", [(1, 16)]),
        ("hf:BertModel", [(1, 16)]),
        ("hf:gpt2", [(1, 16)]),
        ("hf:jamba", [(1, 16)]),
        ("hf:mamba2", [(1, 16)]),
        ("hf:nemotron", [(1, 16)]),
        ("hf:bart", [(1, 16), (1, 16)]),
        ("hf:whisper", [(1, 4, 64), (1, 16)]),
        ("hf:clip", [(1, 16), (1, 4, 16, 16)]),
        ("hf:qwen2_5_vl", [(1, 16)]),
    ],
)
def test_transformers(text, shapes, capsys):
    pytest.importorskip("transformers", reason="transformers is not installed")
    model, inputs, note = load_model(text)
    args, kwargs = inputs
    assert [tuple(value.shape) for value in (*args, *kwargs.values())] == shapes
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert note.endswith(" parameters; use --full for its real size")
    assert main(["capture", text]) == 0
    assert "calls of" in capsys.readouterr().out


@pytest.mark.zoo
def test_timm():
    pytest.importorskip("timm", reason="timm is not installed")
    _, inputs, _ = load_model("timm:test_resnet")
    assert [tuple(value.shape)[:2] for value in inputs[0]] == [(1, 3)]
    with pytest.raises(GraftError, match="no model named 'resnet51' in timm; did you mean "):
        library_model("timm", "resnet51")


@pytest.mark.zoo
def test_torchvision():
    pytest.importorskip("torchvision", reason="torchvision is not installed", exc_type=Exception)
    _, inputs, _ = load_model("torchvision:resnet18")
    assert [tuple(value.shape) for value in inputs[0]] == [(1, 3, 224, 224)]


@pytest.mark.zoo
def test_unknown_architecture():
    pytest.importorskip("transformers", reason="transformers is not installed")
    with pytest.raises(GraftError, match="no model named 'lama' in transformers; did you mean "):
        library_model("hf", "lama")
