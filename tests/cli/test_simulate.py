"""`graft simulate`: one case, tables, files, and mistakes that are said before the model is made."""

import json

import pytest

from torchgraft.cli.main import main


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def said(capsys, *arguments):
    try:
        code = main(["simulate", *arguments])
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def test_one_case(capsys):
    code, text, error = said(capsys, "zoo:mlp", "--batch", "8", "--precision", "fp16", "--mode", "graph")
    assert code == 0 and error == "" and "MLP, one run on NVIDIA H200, fp16, graph" in text and "fc1" in text


def test_a_table(capsys):
    code, text, _ = said(capsys, "zoo:mlp", "--batch", "1,8", "--what-if", "bandwidth=2", "--price", "3.5")
    assert code == 0 and "MLP, one run: 4 cases" in text and "bandwidth × 2" in text and "cost of 1 M" in text


def test_json(capsys):
    code, text, _ = said(capsys, "zoo:mlp", "--batch", "1,8,64", "--json")
    assert code == 0 and [row["batch"] for row in json.loads(text)["rows"]] == [1, 8, 64]
    code, text, _ = said(capsys, "zoo:mlp", "--json")
    assert code == 0 and json.loads(text)["machine"] == "NVIDIA H200"


def test_training(capsys):
    code, text, _ = said(capsys, "zoo:mlp", "--training")
    assert code == 0 and "one training step" in text
    code, text, _ = said(capsys, "zoo:mlp", "--optimizer", "AdamW", "--batch", "1,2", "--json")
    rows = json.loads(text)
    assert code == 0 and rows["training"] is True
    code, text, _ = said(capsys, "zoo:mlp", "--batch", "1,2", "--json")
    assert json.loads(text)["rows"][0]["peak_bytes"] < rows["rows"][0]["peak_bytes"]


@pytest.mark.parametrize(
    ("name", "start"),
    [("out.svg", "<svg"), ("out.html", "<!DOCTYPE html>"), ("out.json", "{"), ("out.txt", "MLP, one run: 2")],
)
def test_files(name, start, tmp_path, capsys):
    code, text, _ = said(capsys, "zoo:mlp", "--batch", "1,8", "-o", name)
    assert code == 0 and text == f"written: {name}\n" and (tmp_path / name).read_text().startswith(start)


def test_a_timeline(tmp_path, capsys):
    code, _, _ = said(capsys, "zoo:mlp", "--trace", "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert code == 0 and any(event.get("cat") == "kernel" for event in events)


def test_passes_and_schemes(capsys):
    options = ["--what-if", "passes=fuse-conv-norm", "--what-if", "quantize=weight-int4"]
    code, text, _ = said(capsys, "zoo:mlp", *options)
    assert code == 0 and "all of these" in text and "weight-int4" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--machine", "h999"], "there is no machine named 'h999'; choose one of "),
        (["--machine", "missing.toml"], "cannot read the machine file 'missing.toml': No such file or directory"),
        (["--machine", "h200,,"], "argument --machine: give names with commas, not 'h200,,'"),
        (["--precision", "fp17"], "there is no precision 'fp17'; choose one of "),
        (["--mode", "fast"], "argument --mode: there is no mode 'fast' (choose from eager, graph, lowered)"),
        (["--batch", "0"], "argument --batch: give a whole number, 1 or more, not '0'"),
        (["--what-if", "speed=2"], "argument --what-if: give NAME=VALUE with one of bandwidth, compute"),
        (["--what-if", "bandwidth=fast"], "argument --what-if: give a positive number, not 'fast'"),
        (["--what-if", "bandwidth=2", "--what-if", "bandwidth=3"], "--what-if bandwidth is given twice; give it once"),
        (["--what-if", "passes=no-such"], "no pass is called 'no-such'"),
        (["--what-if", "quantize=int9"], "no scheme is called 'int9'"),
        (["--price", "cheap"], "argument --price: give a positive number, not 'cheap'"),
        (["--price", "h100=2"], "there is a price for 'h100', which is not simulated; name it with --machine"),
        (["--optimizer", "Adamm"], "torch.optim has no optimizer 'Adamm'; name one such as AdamW or SGD"),
        (["-o", "plot.svg"], "a plot is of several cases; name several batches or machines, or use --what-if"),
        (
            ["--trace", "t.json", "--batch", "1,2"],
            "a timeline is of one case; name one machine, batch, precision and mode",
        ),
    ],
)
def test_mistakes(options, message, tmp_path, capsys):
    (tmp_path / "never.py").write_text("def make():\n    raise AssertionError('the model was made')\n")
    code, text, error = said(capsys, "never.py:make", *options)
    assert code == 2 and text == "" and error.startswith(f"graft simulate: {message}") and error.count("\n") == 1
    assert not list(tmp_path.glob("*.json")) and not list(tmp_path.glob("*.svg"))


def test_a_machine_file_that_is_wrong(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text('name = "mine"\nkind = "gpu"\n')
    code, _, error = said(capsys, "zoo:mlp", "--machine", "mine.toml")
    assert code == 2 and error.startswith(
        "graft simulate: the machine file cannot be used: the figure 'source' is missing"
    )


def test_a_precision_that_the_machine_lacks(tmp_path, capsys):
    from torchgraft.analysis.simulate.machine import _folder

    text = (_folder() / "h200.toml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("bf16")]
    (tmp_path / "old.toml").write_text("\n".join(lines).replace("NVIDIA H200", "old"))
    code, _, error = said(capsys, "zoo:mlp", "--machine", "old.toml", "--precision", "bf16")
    assert code == 1 and error.startswith("graft simulate: old has no bf16\n  it has ")
    code, text, _ = said(capsys, "zoo:mlp", "--machine", "old.toml,h200", "--precision", "bf16")
    assert code == 0 and "old has no bf16" in text


@pytest.mark.parametrize("ending", ["png", "PDF", "csv"])
def test_files_that_would_not_be_what_they_are_called_are_refused(ending, tmp_path, capsys):
    code, _, error = said(capsys, "zoo:mlp", "-o", f"found.{ending}")
    assert code == 2 and error.startswith(f"graft simulate: a .{ending.lower()} file cannot be written; give an .svg")
    assert not list(tmp_path.iterdir())


def test_machines_by_their_first_words(capsys):
    code, text, _ = said(capsys, "zoo:mlp", "--machine", "h200,a100", "--price", "h200=3.5,a100=2", "--json")
    assert code == 0 and [row["machine"] for row in json.loads(text)["rows"]] == ["h200", "a100"]
    code, _, error = said(capsys, "zoo:mlp", "--machine", "epyc_turin")
    assert code == 2 and "there is no machine named 'epyc_turin'" in error
