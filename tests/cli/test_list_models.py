"""`graft models`: what can be named, a filter, and what is said of libraries that are not installed."""

import importlib.util
import json

import pytest

from torchgraft import zoo
from torchgraft.cli.main import main


def test_the_zoo_is_listed_and_others_are_counted(capsys):
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[: len(zoo.names())] == [f"zoo:{name}" for name in zoo.names()]
    assert lines[-1].startswith("your own: PATH/FILE.py:NAME")
    for library, package in {"timm": "timm", "hf": "transformers"}.items():
        line = next(line for line in lines if line.startswith(f"{library}: "))
        if importlib.util.find_spec(package) is None:
            assert line.startswith(f"{library}: none, cannot import {package}: ")
            assert line.endswith(f"pip install {package}")
        else:
            assert line.endswith(f"list them with: graft models {library}:")


@pytest.mark.parametrize("text", ["zoo:resnet1", "ZOO:ResNet1", "zoo:resnet1*"])
def test_a_filter_is_a_part_or_a_pattern(text, capsys):
    assert main(["models", text]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if ": none, " not in line]
    assert lines == ["zoo:resnet18", "zoo:resnet101", "zoo:resnet152"]


def test_nothing_fits(capsys):
    assert main(["models", "qwertyuiop"]) == 1
    assert capsys.readouterr().out.startswith("no model has 'qwertyuiop' in its name\n")


def test_json(capsys):
    assert main(["models", "zoo:", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"]["zoo"] == [f"zoo:{name}" for name in zoo.names()]


def test_every_name_of_the_zoo_is_taken(capsys):
    for name in zoo.names():
        assert main(["summary", f"zoo:{name}", "--depth", "0", "--columns", "parameters"]) == 0
    assert "unknown" not in capsys.readouterr().err


@pytest.mark.zoo
def test_a_library_that_is_installed(capsys):
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert main(["models", "hf:llama"]) == 0
    assert "hf:llama" in capsys.readouterr().out.splitlines()
