"""Tests of the examination of levels aten, core_aten and joint, and of what rows and the page say about them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.coverage import levels, report
from benchmarks.coverage.__main__ import is_due
from benchmarks.coverage.cases import Case, images
from benchmarks.coverage.examination import examine
from benchmarks.coverage.levels import Step, examine_joint, lowered
from benchmarks.coverage.rows import (
    ATEN,
    CORE_ATEN,
    EQUAL,
    EXPORT,
    EXPORT_CORE,
    FUNCTION,
    JOINT,
    MODULE,
    REFUSED,
    WRONG,
    Attempt,
    Row,
)
from torchgraft import capture


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(x)).softmax(1)


class Untrained(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def case(build: Any = Small) -> Case:
    return Case("own", "small", build, images(3, 4), {"values": images(3, 4), "batch": images(5, 4)})


def examined(given: Case, with_export: bool = False) -> Row:
    reported: list[Row] = []
    examine(given, reported.append, with_export, rounds=1)
    return reported[-1]


def test_every_level_is_made_of_one_program_and_compared() -> None:
    row = examined(case(), with_export=True)
    for way in (ATEN, CORE_ATEN, JOINT):
        attempt = row.attempt(way)
        assert attempt.is_good, attempt.reasons
        assert [attempt.verdicts[name] for name in ("example", "values", "batch")] == [EQUAL] * 3
        assert attempt.seconds and row.ratio(way)
        assert not row.shortfalls(way)
    assert row.attempt(EXPORT).captured and row.attempt(EXPORT_CORE).captured
    assert row.ratio(EXPORT, ATEN) and row.ratio(EXPORT_CORE, CORE_ATEN)


def test_what_cannot_be_trained_is_not_tried_at_level_joint() -> None:
    row = examined(case(Untrained))
    assert JOINT not in row.attempts
    assert row.attempt(ATEN).is_good


def test_a_wrong_lowering_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    other = capture(Untrained(), images(3, 4)().args, level="function")
    monkeypatch.setattr(levels.torchgraft, "lower", lambda *args, **kwargs: other)
    row = examined(case())
    assert row.attempt(ATEN).is_wrong
    assert row.shortfalls(ATEN)["values"].startswith(WRONG)
    assert report.line(row).startswith("LOOK")


def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Small().eval()
    program = capture(model, images(3, 4)().args, level="function")
    stepped = levels._stepped

    def halved(programs: Any, inputs: Any, step: Any) -> Step:
        found = stepped(programs, inputs, step)
        return Step(
            found.result, found.tangents, {**found.gradients, "linear.bias": found.gradients["linear.bias"] / 2}
        )

    monkeypatch.setattr(levels, "_stepped", halved)
    attempt = examine_joint(model, model, program, case(), images(3, 4)(), rounds=1)
    assert attempt is not None and attempt.verdicts["example"] == WRONG
    assert attempt.reasons["example"].startswith("gradient of ['linear.bias']")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_are_right_that_are_nearer_than_eager_to_those_of_double_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Small().eval()
    program = capture(model, images(3, 4)().args, level="function")
    eager = levels._eager_step

    def imprecise(model: Any, inputs: Any, tangents: Any = None) -> Step:
        step = eager(model, inputs, tangents)
        if tangents is None:
            step.gradients["linear.bias"] = step.gradients["linear.bias"] * 1.5
        return step

    monkeypatch.setattr(levels, "_eager_step", imprecise)
    attempt = examine_joint(model, model, program, case(), images(3, 4)(), rounds=1)
    assert attempt is not None and attempt.verdicts["example"] == EQUAL


def test_a_lowering_that_raises_is_an_attempt_with_a_reason() -> None:
    model = Small().eval()
    program = capture(model, images(3, 4)().args, level="function")
    attempt, made = lowered(model, program, images(3, 4)(), "no such level", rounds=1)
    assert (attempt.captured, made) == (False, None)
    assert "level must be" in attempt.reasons["captured"]


def some_row() -> Row:
    right = {"example": EQUAL, "batch": EQUAL, "training": EQUAL}
    return Row(
        "timm",
        "a",
        eager_seconds=0.1,
        attempts={
            MODULE: Attempt(True, 5, 1, 0.2, right),
            FUNCTION: Attempt(True, 5, 1, 0.3, right),
            ATEN: Attempt(True, 5, 1, 0.5, right),
            CORE_ATEN: Attempt(True, 5, 1, 0.7, {**right, "training": REFUSED, "batch": REFUSED}, {"batch": "size 3"}),
            JOINT: Attempt(reasons={"captured": "BridgeError: 'drop' is one call"}),
            EXPORT: Attempt(True, 5, 0, 1.6, {"example": EQUAL}),
        },
    )


def test_a_lowering_is_timed_with_its_capture_and_without() -> None:
    row = some_row()
    assert row.ratio(ATEN) == pytest.approx(8) and row.lowering_ratio(ATEN) == pytest.approx(5)
    assert row.ratio(EXPORT, ATEN) == pytest.approx(2)
    assert row.ratio(JOINT) is None


def test_shortfalls_are_what_is_right_as_functions_and_not_lower_down() -> None:
    row = some_row()
    assert row.shortfalls(ATEN) == {}
    assert row.shortfalls(CORE_ATEN) == {"batch": "refused: size 3"}, "training that is refused is none"
    assert row.shortfalls(JOINT) == {"captured": "BridgeError: 'drop' is one call"}


def test_the_page_has_every_level() -> None:
    text = report.summary([some_row()])
    assert "| aten: another batch size | 1 equal |" in text
    assert "| core_aten: another batch size | 1 refused |" in text
    assert "| joint: on the example | 0 of 1 |" in text
    assert "| joint: **right as functions, and not here** | 1 |" in text
    assert "| torch.export in captures with lowering to aten | 2 (2 to 2) |" in text
    page = report.markdown([some_row()], report.Environment("3", "2", 1, "m"), "make coverage")
    assert (
        "1 models that run in eager; 1 of them at levels aten and core_aten, 1 at level joint, 1 beside torch.export."
        in page
    )
    assert "- timm a, core_aten, batch: refused: size 3" in page


def test_torch_export_is_added_to_rows_that_lack_it() -> None:
    row = some_row()
    assert not is_due(row, again=False, with_export=True)
    del row.attempts[EXPORT]
    assert is_due(row, again=False, with_export=True) and not is_due(row, again=False)
