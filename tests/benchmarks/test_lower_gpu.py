"""The GPU benchmark of `lower`: rows that die or hang take no others with them, and are shown as what they are."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import lower_gpu

# Stands for the benchmark in a process of its own: measures the first row, and then the other one in the way of its name.
SCRIPT = """
import json, os, signal, sys, time
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
first, *others = json.loads(given["--rows"])
rows = {first: {"seconds": 0.004, "ready": 0.1}}
open(given["--found"], "w").write(json.dumps(rows))
print("measuring", others, flush=True)
if "dies" in others:
    os.kill(os.getpid(), signal.SIGSEGV)
if "hangs" in others:
    time.sleep(600)
rows |= {label: {"seconds": 0.001, "ready": 0.2} for label in others}
open(given["--found"], "w").write(json.dumps(rows))
"""


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(lower_gpu, "__file__", str(script))
    monkeypatch.setattr(lower_gpu, "LEAST", 0.0)
    return argparse.Namespace(backends="a", rehearse=False, limit=3.0)


def test_a_row_that_dies_or_hangs_takes_no_other_with_it(arguments: Any) -> None:
    results: dict[str, Any] = {"tables": {}}
    end = time.monotonic() + 60
    for label in ("dies", "hangs", "works"):
        lower_gpu.measure_row(results, "decoding", "eager", label, arguments, end)
    rows = results["tables"]["decoding"]["rows"]
    assert "its process ended with -11" in rows["dies"]["note"] and "longer than 3 s" in rows["hangs"]["note"]
    assert rows["works"]["seconds"] == 0.001 and rows["eager"]["seconds"] == 0.004
    assert "| works | 1.000 ms | 4.00 | 0.2 s |  |" in lower_gpu.text_of("decoding", results["tables"]["decoding"])
    lower_gpu.explain_deaths(results, arguments, end)
    said = results["tables"]["decoding"]["alone"]
    assert list(said) == ["dies", "hangs", "dies, with launches that wait", "hangs, with launches that wait"]


def test_what_is_left_of_the_budget_is_kept(arguments: Any) -> None:
    results: dict[str, Any] = {"tables": {}}
    lower_gpu.measure_row(results, "decoding", "eager", "works", arguments, time.monotonic() - 1)
    assert results["tables"]["decoding"]["rows"] == {"works": {"note": "left out: the budget was used up"}}


def test_rows_are_known_before_a_model_is_made() -> None:
    for name, (_, rows, _) in lower_gpu.TABLES.items():
        labels = list(rows(1, ["cudagraphs"]))
        assert labels[0].startswith("eager") and labels[1].startswith("lower("), name
