"""`graft run-passes` captures a model, runs passes and reports."""

import json

import pytest

from torchgraft.cli.main import main
from torchgraft.errors import PassError

FILE = """
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)

    def forward(self, x, scale):
        unused = torch.relu(x)
        return self.bn(self.conv(x)) * scale
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "passes_model.py"
    path.write_text(FILE)
    return f"{path}:Model"


def test_report(model, capsys):
    text = "remove-dead-code, fuse-conv-norm"
    assert main(["run-passes", model, text, "--input", "2x3x8x8", "--input", "scale=scalar", "--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["pass", "changes", "ms", "nodes"]
    assert lines[1].split()[:2] == ["remove-dead-code", "1"]
    assert lines[2].split()[:2] == ["fuse-conv-norm", "1"]
    assert lines[-1] == "checked: the program computes the same after every pass"


def test_inputs_by_name_may_leave_out_one_before_them(tmp_path, capsys):
    path = tmp_path / "skipping_model.py"
    text = FILE.replace("x, scale", "x, mask=None, scale=None").replace("return ", "assert mask is None; return ")
    path.write_text(text)
    inputs = ["--input", "x:2x3x8x8", "--input", "scale:scalar"]
    assert main(["run-passes", f"{path}:Model", "fuse-conv-norm", *inputs, "--check"]) == 0
    assert "checked" in capsys.readouterr().out


def test_code_and_symbolic_capture(model, capsys):
    assert main(["run-passes", model, "fuse-conv-norm", "--code"]) == 0
    text = capsys.readouterr().out
    assert "self.conv(x)" in text and "self.bn" not in text


def test_json(capsys):
    assert main(["run-passes", "zoo:mlp", "propagate-shapes, reorder-for-memory", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [step["name"] for step in data["passes"]] == ["propagate-shapes", "reorder-for-memory"]
    assert data["passes"][0]["changes"] > 0 and data["passes"][1]["notes"] == []


def test_why_something_was_left_alone(capsys):
    assert main(["run-passes", "zoo:resnet18", "fuse-conv-norm", "--train", "--level", "symbolic"]) == 0
    assert "stays: it is in training mode" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("remove-dead-cod", "did you mean 'remove-dead-code'"),
        ("fold-constants{max_byte=1}", "has no option 'max_byte'; its options are max_bytes, freeze"),
        ("a b", "cannot read the pipeline"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(text, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["run-passes", "zoo:mlp", text])
    assert end.value.code == 2
    output, error = capsys.readouterr()
    assert output == "" and error.startswith("graft run-passes: ") and error.count("\n") == 1 and message in error


def test_level_without_inputs(model, capsys):
    with pytest.raises(SystemExit) as end:
        main(["run-passes", model, "remove-dead-code", "--level", "function"])
    assert end.value.code == 2 and " --input " in capsys.readouterr().err


def test_traceback():
    with pytest.raises(PassError):
        main(["run-passes", "--traceback", "zoo:mlp", "nothing-like-it"])
