"""`graft quantize`: the report, the program that is kept, data from a file, and mistakes."""

from __future__ import annotations

import json

import pytest
import torch

from torchgraft.cli.main import main

DATA = """
import torch

def batches():
    return [torch.full((2, 16), 0.1) * number + torch.arange(16) / 16 for number in range(1, 5)]

nothing = []
one = torch.ones(2, 16)
"""


@pytest.fixture
def data(tmp_path):
    (tmp_path / "calibration.py").write_text(DATA)
    return tmp_path / "calibration.py"


def test_a_model_is_quantized_kept_and_reported(tmp_path, data, capsys):
    kept, page = tmp_path / "mlp.pt", tmp_path / "mlp.html"
    assert main(["quantize", "zoo:mlp", "--data", f"{data}:batches", "-o", str(kept), "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("MLP: 2 of 2 layers quantized") and f"written: {kept}" in printed
    program = torch.load(kept, weights_only=False)
    assert program(torch.rand(3, 16)).shape == (3, 16)
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_a_folder_is_written_anew_as_by_capture(tmp_path, capsys):
    kept = tmp_path / "mlp"
    assert [main(["quantize", "zoo:mlp", "-o", str(kept)]) for _ in range(2)] == [0, 0]
    assert (kept / "module.py").exists()
    (tmp_path / "other.txt").write_text("kept")
    assert main(["quantize", "zoo:mlp", "-o", str(tmp_path)]) == 1
    assert "it is a folder with other files in it" in capsys.readouterr().err


def test_as_json_with_a_scheme(capsys):
    assert main(["quantize", "zoo:mlp", "--config", "dynamic-int8", "--backend", "reference", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [layer["scheme"] for layer in found["layers"]] == ["dynamic-int8", "dynamic-int8"]


def test_compare_takes_the_kept_program(tmp_path, capsys):
    kept = tmp_path / "mlp.pt"
    main(["quantize", "zoo:mlp", "-o", str(kept)])
    capsys.readouterr()
    assert main(["compare", "zoo:mlp", str(kept), "--input", "1x16"]) == 1  # they differ, and by how much is shown
    assert "output" in capsys.readouterr().out


def test_compare_never_takes_steps_for_numbers(tmp_path, capsys):
    kept = tmp_path / "painter.pt"
    main(["quantize", "zoo:learning_to_paint", "-o", str(kept)])
    capsys.readouterr()
    assert main(["compare", "zoo:learning_to_paint", str(kept), "--json"]) == 1
    pairs = json.loads(capsys.readouterr().out)["pairs"]
    apart = [pair for pair in pairs if pair["note"] == "numbers and steps of a scale"]
    assert apart and {pair["verdict"] for pair in apart} == {"-"}
    assert not [pair for pair in pairs if "uint8" in pair["note"]]
    output = next(pair for pair in pairs if pair["second"] == "output")
    assert output["verdict"] == "DIFFERENT" and output["sqnr"] > 40


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--data", "{data}:one"], "one: expected an iterable of batches for data, got one tensor"),
        (["--batches", "0"], "cannot calibrate with 0 batches"),
        (["--data", "{data}:nothing"], "has no batches"),
        (["--data", "{data}:batch"], "no 'batch' in"),
        (["--data", "somewhere"], "cannot read 'somewhere': it does not say where it is from"),
        (["--config", "static-int9"], "no scheme is called 'static-int9'"),
        (["--train"], "is in training mode"),
    ],
)
def test_mistakes_are_one_line(data, capsys, more, text):
    arguments = ["quantize", "zoo:mlp", *[item.format(data=data) for item in more]]
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code in (1, 2) and text in capsys.readouterr().err
