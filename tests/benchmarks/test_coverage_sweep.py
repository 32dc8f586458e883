"""Tests of the examination of a model, of the processes around it, and of the rows and tables that come out."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchgraft
from benchmarks.coverage import report, rows
from benchmarks.coverage.__main__ import is_due, main, parse
from benchmarks.coverage.cases import Case, Inputs, images
from benchmarks.coverage.examination import examine
from benchmarks.coverage.judging import judge
from benchmarks.coverage.rows import EQUAL, FAILS, REFUSED, UNDEFINED, WRONG, Attempt, Row
from benchmarks.coverage.sweep import run_apart
from benchmarks.report import Environment


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 5:
            return self.linear(x[:, :4])
        return self.dropout(self.linear(x))


def case(build: Any = Branching, **others: Any) -> Case:
    return Case("own", "branching", build, images(3, 4), others)


def raising(error: Exception) -> Any:
    def run() -> Any:
        raise error

    return run


def test_a_verdict_tells_right_from_refused_from_failing_from_wrong() -> None:
    assert judge(lambda: 1, 1) == (EQUAL, "")
    assert judge(lambda: 2, 1) == (WRONG, "result: 1 became 2")
    assert judge(raising(torchgraft.GuardError("no")), 1) == (REFUSED, "no")
    assert judge(raising(KeyError("k")), 1)[0] == FAILS
    assert judge(raising(KeyError("k")), ValueError("eager refuses too"))[0] == UNDEFINED
    assert judge(lambda: 1, ValueError("eager refuses"))[0] == WRONG


def test_an_examination_fills_the_row() -> None:
    reported: list[str] = []
    examine(
        case(values=images(3, 4), batch=images(5, 4), size=images(3, 7), none=lambda: Inputs((torch.ones(3),))),
        lambda row: reported.append(rows.to_json(row)),
        with_export=False,
        rounds=1,
    )
    row = rows.from_json(reported[-1])
    attempt = row.attempt("capture")
    assert attempt.captured and attempt.is_good
    assert {name: attempt.verdicts[name] for name in ("example", "values", "batch")} == dict.fromkeys(
        ("example", "values", "batch"), EQUAL
    )
    assert attempt.verdicts["size"] == REFUSED
    assert attempt.verdicts["none"] == UNDEFINED
    assert attempt.verdicts["training"] in (EQUAL, REFUSED)
    assert row.ratio("capture") is not None
    assert row.attempt("torch.fx").captured is False
    assert len(reported) > 3, "each step is reported, because the next may not come to its end"


def test_a_model_that_does_not_run_says_why() -> None:
    reported: list[Row] = []
    examine(case(build=lambda: nn.Linear(9, 9)), reported.append, with_export=False)
    assert "RuntimeError" in reported[-1].eager
    assert not reported[-1].attempts


def test_work_that_crashes_hangs_or_says_nothing_leaves_the_last_report() -> None:
    def crash(given: Case, send: Any) -> None:
        send(Row(given.collection, given.name, parameters=7))
        os._exit(3)

    def hang(given: Case, send: Any) -> None:
        send(Row(given.collection, given.name, parameters=8))
        time.sleep(60)

    crashed = run_apart(case(), crash, limit=30)
    assert (crashed.parameters, "ended with status" in crashed.note) == (7, True)
    hanging = run_apart(case(), hang, limit=0.5)
    assert (hanging.parameters, hanging.note) == (8, "stopped after 0 s")
    silent = run_apart(case(), lambda given, send: None, limit=30)
    assert "without an answer" in silent.eager


def test_a_row_of_any_length_comes_through_the_pipe() -> None:
    row = run_apart(case(), lambda given, send: send(Row(given.collection, given.name, note="é" * 300_000)), limit=30)
    assert len(row.note) == 300_000


def good(**verdicts: str) -> Attempt:
    return Attempt(True, 5, 1, 0.2, {"example": EQUAL, **verdicts})


def some_rows() -> list[Row]:
    bad = Attempt(True, 5, 1, 0.4, {"example": EQUAL, "values": WRONG}, {"values": "by 1"})
    ways = {
        "torch.fx": Attempt(reasons={"captured": "no"}),
        "torch.export": Attempt(True, 9, 0, 8.0, {"example": EQUAL}),
    }
    both = {"capture": good(values=REFUSED), "capture, functions": good(values=EQUAL), **ways}
    return [
        Row("timm", "a", eager_seconds=0.1, attempts=both),
        Row("timm", "b", eager_seconds=0.1, attempts={"capture": bad, "capture, functions": good()}),
        Row("timm", "c", eager="ValueError: in /some/where/site-packages/timm/c.py:3"),
        Row("large", "d", parameters=10**9, attempts={"capture": good()}, peak_bytes=2**20),
    ]


def test_rows_are_kept_in_a_file_and_the_last_about_a_model_counts(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert rows.read(file) == []
    rows.append(file, some_rows())
    rows.append(file, [Row("timm", "b", note="again")])
    assert [row.note for row in rows.read(file) if row.name == "b"] == ["again"]
    assert rows.read(file)[0] == some_rows()[0]


def test_what_was_well_is_not_examined_again() -> None:
    fine, wrong, idle, _ = some_rows()
    assert not is_due(fine, again=True) and not is_due(idle, again=True) and not is_due(wrong, again=False)
    assert is_due(wrong, again=True) and is_due(None, again=False)


def test_a_capture_that_touched_the_model_is_not_good() -> None:
    assert good().is_good
    assert not Attempt(True, verdicts={"example": EQUAL}, reasons={"untouched": "random state"}).is_good
    assert not good(size=FAILS).is_good
    assert not Attempt(True, verdicts={"example": REFUSED}).is_good, "the example itself must run"


def test_the_summary_counts_and_the_page_names_no_folder_of_this_machine() -> None:
    text = report.summary(some_rows())
    assert "| models | 3 |" in text and "| run in eager | 2 |" in text
    assert "| same program, other values | 1 refused, 1 WRONG |" in text
    assert "| **programs that answered wrongly** | 1 |" in text
    assert "| torch.export in captures | 40 (40 to 40) |" in text
    assert "| 0, of which 0 are one call; 2 not recorded |" in text, "what was not looked at is no zero"
    page = report.markdown(some_rows(), Environment("3", "2", 1, "m"), "python -m benchmarks.coverage")
    assert "/some/where" not in page and "timm/c.py:3" in page
    assert "| d | 1,000,000,000 | 0.20 | 1 MiB | 5 | 1 |" in page
    for table in page.split("\n\n"):
        assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) <= 1, (
            "a cell for each column"
        )


def test_a_line_says_what_to_look_at() -> None:
    fine, wrong, idle, _ = some_rows()
    assert report.line(fine).startswith("ok")
    assert report.line(wrong).startswith("LOOK") and "WRONG on values" in report.line(wrong)
    assert "does not run in eager" in report.line(idle)


def test_an_unknown_collection_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["torchaudio"])
    assert "unknown collection torchaudio; there are torchvision" in capsys.readouterr().err


def test_a_sweep_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.coverage import large_models

    monkeypatch.setattr(large_models, "cases", lambda: [case(values=images(3, 4))])
    command = ["large", "--rows", str(tmp_path / "rows"), "--markdown", str(tmp_path / "page"), "--without-export"]
    assert main(command) == 0
    assert "[1/1] ok   own branching" in capsys.readouterr().out
    assert "| branching |" in (tmp_path / "page").read_text()
    assert main(command) == 0
    assert "[1/1]" not in capsys.readouterr().out
    assert main([*command, "--only", "nothing"]) == 2
