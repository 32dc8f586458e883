"""Tests of the medians that the capture benchmark draws from its figures."""

from __future__ import annotations

from benchmarks.captures import EXPORT, RUNS, medians
from benchmarks.measure import Figure, Row


def figures(measure: str, *ratios: float) -> list[Figure]:
    small = "eager" if measure == RUNS else None
    return [
        Figure(Row(f"{measure}, model {ratio}", None, ours_small=small), "seconds", ratio * 2, 1.0, ratio, ratio, "")
        for ratio in ratios
    ]


def test_the_median_of_the_models_is_what_is_asked_about() -> None:
    runs, beside = medians(figures(RUNS, 1.0, 2.0, 9.0) + figures(EXPORT, 5.0, 20.0, 30.0))
    assert (runs.row.name, runs.ratio, runs.row.required, runs.verdict) == (f"{RUNS}, median of 3", 2.0, 3.0, "ok")
    assert (beside.ratio, beside.theirs, beside.verdict) == (20.0, 40.0, "ok")


def test_a_median_of_one_is_no_median() -> None:
    assert medians(figures(RUNS, 1.0)) == []
