"""Mistakes on every command: one short line of what happened, an exit code, and nothing half-written."""

import pytest

from torchgraft.cli.main import COMMANDS, main

NEEDED = {"draw": ["-o", "x.svg"], "graph": ["-o", "x.json"], "run-passes": ["remove-dead-code"], "diff": ["zoo:mlp"]}
NEEDED["compare"] = NEEDED["diff"]
OUTPUTS = {
    "capture": "out.pt",
    "show": "out.txt",
    "summary": "out.txt",
    "draw": "out.svg",
    "calls": "out.txt",
    "record": "out.safetensors",
    "compare": "out.txt",
    "graph": "out.json",
    "diff": "out.txt",
    "doctor": "out.txt",
    "simulate": "out.txt",
}
ON_MODELS = [command.NAME for command in COMMANDS if command.NAME not in ("models", "calibrate", "demo")]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def said(capsys, *arguments):
    """The code and what was said, which goes to standard error."""
    try:
        code = main(list(arguments))
    except SystemExit as end:
        code = end.code
    text, error = capsys.readouterr()
    assert text == "" and "Traceback" not in error and error.startswith(f"graft {arguments[0]}: ")
    return code, error.removeprefix(f"graft {arguments[0]}: ")


MISTAKES = {
    "resnet50": "cannot read the model 'resnet50': it does not say where the model is from; did you mean zoo:resnet50",
    "zoo:resnet49": "no model named 'resnet49' in torchgraft.zoo; did you mean",
    "missing.py:Net": "no file 'missing.py'; write zoo:NAME",
    "missing.pt2": "no file ",
    "missing.pt": "no file 'missing.pt'; write zoo:NAME",
    "no.such.module:Net": "cannot import no.such.module: ModuleNotFoundError: No module named 'no'; write",
}


@pytest.mark.parametrize("command", ON_MODELS)
@pytest.mark.parametrize("model", MISTAKES)
def test_no_such_model(command, model, tmp_path, capsys):
    code, error = said(capsys, command, model, *NEEDED.get(command, []))
    assert code == 2 and error.startswith(MISTAKES[model]) and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ON_MODELS)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2xx3", "cannot read the input '2xx3'; write sizes, dtype and"),
        ("2x16:float33", "cannot read the input '2x16:float33': torch has no dtype 'float33'"),
        (
            "y:2x16",
            "the inputs do not fit: missing a required argument: 'x'; MLP.forward takes (x: torch.Tensor); add --input x",
        ),
    ],
)
def test_wrong_inputs(command, text, message, tmp_path, capsys):
    code, error = said(capsys, command, "zoo:mlp", *NEEDED.get(command, []), "--input", text)
    assert code == 2 and error.startswith(message) and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ON_MODELS)
def test_inputs_of_the_wrong_size(command, tmp_path, capsys):
    code, error = said(capsys, command, "zoo:mlp", *NEEDED.get(command, []), "--input", "2x3")
    assert code == 1 and "mat1 and mat2 shapes cannot be multiplied" in error.splitlines()[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", OUTPUTS)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(command, tmp_path, capsys):
    (tmp_path / "never.py").write_text("def make():\n    raise AssertionError('the model was made')\n")
    rest = [item for item in NEEDED.get(command, []) if item == "zoo:mlp"]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").write_text("")
    for place, reason in ((f"nowhere/{OUTPUTS[command]}", "its folder does not exist"), ("folder", "it is a folder")):
        code, error = said(capsys, command, "never.py:make", *rest, "-o", place)
        assert code == 1 and error.startswith(f"cannot write '{place}': {reason}"), error
        assert "\n  give " in error and "the model was made" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "never.py"]
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["kept"]


def test_an_output_that_exists_is_replaced_only_when_the_work_is_done(tmp_path, capsys):
    (tmp_path / "out.txt").write_text("old")
    code, _ = said(capsys, "summary", "zoo:resnet49", "-o", "out.txt")
    assert code == 2 and (tmp_path / "out.txt").read_text() == "old"
    assert main(["summary", "zoo:mlp", "-o", "out.txt"]) == 0
    assert (tmp_path / "out.txt").read_text().startswith("module ")
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]
