"""`graft calibrate`: a machine that can be simulated on, and what is refused before anything is measured."""

import json
import os

import pytest

from torchgraft.analysis.simulate.calibration import calibrate
from torchgraft.cli.main import main


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def said(capsys, *arguments):
    try:
        code = main(list(arguments))
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


@pytest.mark.slow
def test_a_machine_to_simulate_on(tmp_path, capsys):
    code, text, error = said(
        capsys, "calibrate", "-o", "mine.toml", "--seconds", "5", "--threads", "1", "--name", "my CPU"
    )
    assert code == 0 and error == "" and text.startswith("my CPU: ") and text.endswith("written: mine.toml\n")
    assert os.listdir(tmp_path) == ["mine.toml"]
    code, text, _ = said(capsys, "simulate", "zoo:mlp", "--machine", "mine.toml", "--json")
    found = json.loads(text)
    assert code == 0 and found["machine"] == "my CPU" and 0 < found["seconds"] < 60


def never(*arguments):
    raise AssertionError("something was measured")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (
            ["-o", "missing/mine.toml"],
            1,
            "graft calibrate: cannot write 'missing/mine.toml': its folder does not exist\n",
        ),
        (["-o", "folder.toml"], 1, "graft calibrate: cannot write 'folder.toml': it is a folder\n"),
        (
            ["-o", "mine.json"],
            2,
            "graft calibrate: a machine is a .toml file, not 'mine.json'; for example -o my-machine.toml\n",
        ),
        (
            ["-o", "mine.toml", "--seconds", "1"],
            2,
            "graft calibrate: argument --seconds: give a whole number, 5 or more, not '1'",
        ),
        (
            ["-o", "mine.toml", "--threads", "0"],
            2,
            "graft calibrate: argument --threads: give a whole number, 1 or more, not '0'",
        ),
        ([], 2, "graft calibrate: the following arguments are required: -o/--output"),
    ],
)
def test_mistakes_are_said_before_the_work(options, code, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "folder.toml").mkdir()
    monkeypatch.setattr(calibrate, "cpu_at_hand", never)
    found, text, error = said(capsys, "calibrate", *options)
    assert found == code and text == "" and error.startswith(message)
    assert os.listdir(tmp_path) == ["folder.toml"]


def test_an_interrupt_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "measure_on_cpu", interrupted)
    monkeypatch.setattr(calibrate, "cpu_at_hand", lambda name, threads: None)
    monkeypatch.setattr(calibrate, "COUNTS", {"linear": 2})
    code, text, error = said(capsys, "calibrate", "-o", "mine.toml")
    assert code == 130 and text == "" and error == "" and os.listdir(tmp_path) == []
