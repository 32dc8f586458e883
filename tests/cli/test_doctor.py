"""`graft doctor` prints a diagnosis, and its exit code says whether the program is right."""

import json

import pytest

from torchgraft.cli.main import main
from torchgraft.errors import GraftError

FILE = """
import torch


class Gate(torch.nn.Module):
    def forward(self, x, mask):
        if mask.any():
            x = x * mask
        return x
"""


@pytest.fixture
def gate(tmp_path):
    path = tmp_path / "gate_model.py"
    path.write_text(FILE)
    return f"{path}:Gate"


def test_right_model(capsys):
    assert main(["doctor", "zoo:mlp"]) == 0
    text, error = capsys.readouterr()
    assert error == ""
    assert text.startswith("MLP: captured (watched), 6 nodes, right\n")
    assert "the program does what the model does" in text


def test_specialised_model(gate, capsys):
    assert main(["doctor", gate, "--input", "2x3", "--input", "mask=2x3:bool"]) == 0
    text = capsys.readouterr().out
    assert "Specialised (1)\n" in text
    assert 'gate_model.py:7 "if mask.any():"' in text
    assert "remedy: use torch.where" in text


def test_json(gate, capsys):
    assert main(["doctor", gate, "--json", "--input", "2x3", "--input", "2x3:bool"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is True
    assert data["model"] == "Gate"
    assert len(data["specialised"]) == 1
    assert data["symbolic"][0]["where"].endswith('gate_model.py:7 "if mask.any():"')


def test_model_that_is_not_captured(gate, capsys):
    assert main(["doctor", gate]) == 1
    assert capsys.readouterr().out.startswith("Gate: not captured (symbolic)\n")


def test_inputs_that_the_model_refuses(capsys):
    assert main(["doctor", "zoo:mlp", "--input", "2x3"]) == 1
    text, error = capsys.readouterr()
    assert text == "" and error.endswith("\n  give inputs it accepts\n")
    assert error.startswith("graft doctor: cannot diagnose: the model itself raises RuntimeError: ")


@pytest.mark.parametrize("arguments", [["zoo:resnet49"], ["nothing"], ["zoo:mlp", "--input", "2by3"]])
def test_wrong_usage_is_one_line_and_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(["doctor", *arguments])
    assert end.value.code == 2
    text, error = capsys.readouterr()
    assert text == "" and error.startswith("graft doctor: ") and error.count("\n") == 1


def test_traceback():
    with pytest.raises(GraftError, match="no model named 'resnet49'"):
        main(["doctor", "--traceback", "zoo:resnet49"])


def test_help(capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "zoo:NAME, torchvision:NAME, timm:NAME, hf:NAME, PACKAGE.MODULE:FACTORY, PATH/FILE.py:FACTORY, FILE.pt2 or FILE.pt"
        in text
    )
    assert "--input SPEC" in text and "--json" in text and "--train" in text
