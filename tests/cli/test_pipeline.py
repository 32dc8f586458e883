"""`graft pipeline`: the stages, a simulation, a trial in real processes, and mistakes."""

import json

import pytest

from torchgraft.cli.main import main


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def said(capsys, *arguments):
    try:
        code = main(["pipeline", *arguments])
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def test_stages(capsys):
    code, text, error = said(capsys, "zoo:transformer", "--stages", "3")
    assert code == 0 and error == "" and "Transformer in 3 stages" in text and text.count("MB") == 3


def test_json(capsys):
    code, text, _ = said(capsys, "zoo:mlp", "--json")
    assert code == 0 and [row["stage"] for row in json.loads(text)["rows"]] == [0, 1]


def test_a_simulation_and_its_timeline(capsys, tmp_path):
    code, text, _ = said(capsys, "zoo:mlp", "--simulate", "--training", "-o", "timeline.svg")
    assert code == 0 and "written: timeline.svg" in text
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg")
    code, text, _ = said(capsys, "zoo:mlp", "--simulate", "--schedule", "gpipe")
    assert code == 0 and "bubble" in text and "MLP, one run of 8 examples on 2 devices" in text


def test_files_have_the_form_that_their_ending_says(capsys, tmp_path):
    for name, start in (("plan.json", "{"), ("plan.html", "<!DOCTYPE html>"), ("plan.txt", "MLP in 2 stages")):
        assert said(capsys, "zoo:mlp", "-o", name)[0] == 0
        assert (tmp_path / name).read_text().startswith(start)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_trial_in_two_processes(capsys):
    code, text, error = said(capsys, "zoo:mlp", "--run", "--microbatches", "2", "--schedule", "gpipe")
    assert code == 0 and error == "" and "the same as one process computes" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", "0"], "give a whole number, 1 or more, not '0'"),
        (["--stages", "99"], "cannot split into 99 stages"),
        (["--run", "--simulate"], "--simulate and --run are two questions"),
        (["-o", "timeline.svg"], "a timeline is of a simulation"),
        (["--simulate", "-o", "timeline.png"], "a .png file cannot be written"),
        (["--simulate", "--machine", "nowhere"], "nowhere"),
        (["--cost", "magic"], "magic"),
    ],
)
def test_mistakes(capsys, arguments, message):
    code, _, error = said(capsys, "zoo:mlp", *arguments)
    assert code in (1, 2) and message in error
