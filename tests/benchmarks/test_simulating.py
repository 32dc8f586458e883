"""What measures machines for simulations and judges them: rows that survive, measured models, errors and their tables."""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.simulating import __main__ as command
from benchmarks.simulating import cpu, fit, measure_gpu, measured_models
from benchmarks.simulating.comparing import measured_rows, pairs_of
from benchmarks.simulating.errors import Pair, mean_error, rank_correlation, ranks, tables
from benchmarks.simulating.log import Log, all_rows, keep, rows_of
from benchmarks.simulating.measured_models import build, measure_runs, measure_training
from benchmarks.simulating.models import CASES, Case
from benchmarks.simulating.more_probes import more_probes
from torchgraft import Machine, simulate
from torchgraft.analysis.simulate.calibration.fitting import Sample
from torchgraft.analysis.simulate.calibration.probes import Probe

NAMES = ("model", "batch")


def test_rows_are_gone_on_with(tmp_path):
    path = tmp_path / "rows.jsonl"
    Log(path, *NAMES).add({"model": "a", "batch": 1, "eager": 2.0})
    with path.open("a") as file:
        file.write('{"model": "b", "ba')  # the process ended while it wrote
    again = Log(path, *NAMES)
    assert again.has({"model": "a", "batch": 1}) and not again.has({"model": "b", "batch": 1})
    again.add({"model": "b", "batch": 1})
    assert rows_of(path) == [{"model": "a", "batch": 1, "eager": 2.0}, {"model": "b", "batch": 1}]


def test_what_a_process_died_on_is_left_out_by_the_next(tmp_path):
    path = tmp_path / "rows.jsonl"
    first = Log(path, *NAMES)
    first.begin({"model": "a", "batch": 1})
    again = Log(path, *NAMES)
    assert again.has({"model": "a", "batch": 1}) and "ended or hung" in again.rows[0]["error"]
    assert "error" not in (Log(path, *NAMES).rows[1:] or [{}])[0] and len(Log(path, *NAMES).rows) == 1


def test_a_full_file_takes_no_more(tmp_path):
    log = Log(tmp_path / "rows.jsonl", *NAMES)
    assert not log.has({"model": "a"})
    log.size = 2**24
    assert log.has({"model": "a"})


def test_rows_of_earlier_runs_are_known(tmp_path):
    log = Log(tmp_path / "rows.jsonl", *NAMES, known=[{"model": "a", "batch": 1, "eager": 2.0}])
    assert log.has({"model": "a", "batch": 1}) and not log.has({"model": "a", "batch": 2}) and log.rows == []


def test_rows_are_kept_in_one_file(tmp_path):
    rows = [{"model": "a", "batch": 1}, {"model": "b", "batch": 1, "eager": 1.5}]
    kept = tmp_path / "kept" / "all.jsonl.gz"
    keep(rows, kept)
    first = kept.read_bytes()
    Log(tmp_path / "more.jsonl", *NAMES).add({"model": "c", "batch": 1})
    assert all_rows([kept.parent, tmp_path / "more.jsonl", kept]) == [*rows, {"model": "c", "batch": 1}]
    keep(rows, kept)
    assert kept.read_bytes() == first and [path.name for path in kept.parent.iterdir()] == ["all.jsonl.gz"]


def command_line(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.simulating.measure_gpu", *map(str, arguments)], **options
    )


@pytest.mark.slow
def test_measuring_is_killed_and_goes_on(tmp_path):
    """Ended while it measures, with all of its processes: what it was about is measured by the next run, and nothing twice."""
    options = (
        "--device",
        "cpu",
        "--models",
        "mlp,pointnet",
        "--batches",
        "1,2",
        "--precisions",
        "fp32",
        "--probes",
        "1",
    )
    first = command_line(tmp_path / "out", *options, "--known", start_new_session=True)
    file = tmp_path / "out" / "models.jsonl"
    for _ in range(600):
        if file.exists() and file.read_text().count("\n"):
            break
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    there = rows_of(file)
    (tmp_path / "out" / "models.now").write_text('{"model": "mlp", "batch": 2, "precision": "fp32"}')
    keep(there[:1], tmp_path / "known" / "rows.jsonl.gz")
    assert command_line(tmp_path / "out", *options, "--known", tmp_path / "known").wait(300) == 0
    rows = rows_of(file)
    cases = [(row["model"], row["batch"]) for row in rows]
    assert sorted(cases) == [("mlp", 1), ("mlp", 2), ("pointnet", 1), ("pointnet", 2)] and rows[: len(there)] == there
    assert not any("error" in row for row in rows) and not list((tmp_path / "out").glob("*.now"))
    assert len(rows_of(tmp_path / "out" / "probes.jsonl")) == 11
    other = tmp_path / "other"  # on a machine where nothing is left of the first one but what was kept
    assert command_line(other, *options, "--only", "models", "--known", tmp_path / "out").wait(300) == 0
    assert not (other / "models.jsonl").exists()


def test_a_process_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_gpu, "MOST_SECONDS", 1.0)
    hangs = [sys.executable, "-c", "import time; time.sleep(60)"]
    start = time.monotonic()
    assert measure_gpu._watched(hangs, tmp_path, start + 100) == -signal.SIGKILL and time.monotonic() - start < 30
    assert measure_gpu._watched([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, start + 100) == 3


def test_kinds_come_first_and_models_that_take_part_in_fitting_later():
    names = [case.name for case in CASES]
    order = measure_gpu._chosen(argparse.Namespace(models=names))
    kinds = len({case.kind for case in CASES})
    assert sorted(case.name for case in order) == sorted(names) and len({case.kind for case in order[:kinds]}) == kinds
    held = [case.kind for case in CASES if not case.fit]
    assert all(not case.fit for case in order[: len(set(held))])


def small():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


SMALL = Case("small", "mlp", small, lambda batch: (torch.randn(batch, 8),))


def test_models_are_measured_on_the_cpu(tmp_path):
    log = Log(tmp_path / "models.jsonl", "model", "batch", "precision")
    measure_runs(SMALL, log, (1, 16), ("fp32",), "cpu", time.perf_counter() + 60)
    assert [(row["batch"], row["fit"]) for row in log.rows] == [(1, False), (16, False)]
    assert all(row["eager"] > 0 and row["peak_bytes"] > row["resident_bytes"] for row in log.rows)
    log.rows.clear()
    measure_runs(SMALL, log, (1, 16), ("fp32",), "cpu", time.perf_counter() + 60)
    assert log.rows == []  # all of them are there
    measure_runs(SMALL, log, (32,), ("fp32",), "cpu", time.perf_counter() - 1)
    assert log.rows == []  # the time is up


def test_steps_of_training_are_measured_on_the_cpu(tmp_path):
    log = Log(tmp_path / "training.jsonl", "training", "batch", "precision")
    measure_training(SMALL, log, ("fp32", "fp16"), "cpu", time.perf_counter() + 60, batch=4)
    assert [(row["training"], row["precision"]) for row in log.rows] == [("small", "fp32")]
    assert log.rows[0]["eager"] > 0


def test_what_a_case_does_wrong_is_a_row(tmp_path):
    log = Log(tmp_path / "models.jsonl", "model", "batch", "precision")
    wrong = Case("wrong", "mlp", small, lambda batch: (torch.randn(batch, 7),))
    measure_runs(wrong, log, (1,), ("fp32",), "cpu", time.perf_counter() + 60)
    assert log.rows[0]["error"].startswith("RuntimeError: mat1 and mat2 shapes")


def test_a_missing_library_is_said(capsys):
    def needs():
        import no_such_library  # noqa: F401

    assert build(Case("needs", "mlp", needs, lambda batch: ()), "cpu") is None
    assert capsys.readouterr().out == "needs: left out, ModuleNotFoundError: No module named 'no_such_library'\n"


def test_more_probes_can_be_written_down():
    found = more_probes()
    assert len({str(probe.to_dict()) for probe in found}) > 700
    assert {probe.precision for probe in found} == {"fp32", "tf32", "fp16"}


# ---- errors ----


def pair(measured, simulated, fit=False, what="eager"):
    return Pair("m", "k", fit, 1, "fp32", what, measured, simulated)


def test_errors():
    assert mean_error([pair(2.0, 1.0), pair(1.0, 1.5)]) == 0.5
    assert rank_correlation([pair(1, 1)]) is None and rank_correlation([pair(1, 2), pair(1, 3)]) is None
    assert rank_correlation([pair(1, 1), pair(2, 3), pair(3, 2)]) == pytest.approx(0.5)


@given(st.lists(st.floats(0.1, 1e6), min_size=2, unique=True))
def test_ranks_do_not_depend_on_scale(values):
    scaled = [pair(value, value**3) for value in values]
    if len({one.simulated for one in scaled}) == len(values):
        assert rank_correlation(scaled) == pytest.approx(1.0)
    assert sum(ranks(values)) == len(values) * (len(values) + 1) / 2


def test_tables_keep_apart_what_took_part_in_fitting():
    text = tables([pair(1.0, 1.1), pair(2.0, 2.0, fit=True), pair(100, 103, what="memory")])
    held, fitted = text.split("**Fitted**")
    assert "| fp32 | 1 | 1 | 10.0% | - | 3.0% | 3.0% |" in held and "10.0%" not in fitted
    assert "| fp32 | 1 | 1 | 0.0% | - |" in fitted


def test_simulations_are_compared_with_measured_files(tmp_path, capsys):
    """What was "measured" here is what is simulated, twice as long: the error of all is a half."""
    case = next(case for case in CASES if case.name == "mlp")
    log = Log(tmp_path / "models.jsonl", "model", "batch", "precision")
    for batch in (1, 128):
        for precision in ("fp32", "fp16"):
            row = {"model": "mlp", "batch": batch, "precision": precision}
            for name, mode in (("eager", "eager"), ("graph", "graph")):
                one = simulate(case.build(), case.inputs(batch), precision=precision, mode=mode)
                row |= {name: 2 * one.seconds, "peak_bytes": one.peak_bytes}
            log.add(row)
    log.add({"model": "mlp", "batch": 16, "precision": "fp32", "error": "out of memory"})
    rows = measured_rows([tmp_path])
    found = list(pairs_of(rows, Machine.named("h200")))
    assert len(found) == 4 * 3 and all(one.error == 0 for one in found if one.what == "memory")
    assert all(one.error == pytest.approx(0.5) for one in found if one.what != "memory")
    plot = tmp_path / "plot.svg"
    command.main([str(tmp_path / "models.jsonl"), "--plot", str(plot), "--pairs", str(tmp_path / "pairs")])
    assert "| all | all | 1 | 50.0% | " in capsys.readouterr().out
    assert plot.read_text().count("<circle") == 8 and len((tmp_path / "pairs").read_text().splitlines()) == 12


def test_mistakes(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main([str(tmp_path)])
    assert "no measured models in" in capsys.readouterr().err
    for main, rest in ((command.main, []), (fit.main, ["-o", str(tmp_path / "other.toml")])):
        with pytest.raises(SystemExit):
            main([str(tmp_path / "nowhere"), *rest])
        assert "nowhere is not there; python -m benchmarks.simulating.measure_gpu OUT writes" in capsys.readouterr().err


def test_nothing_that_was_kept_is_needed_to_measure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure_gpu, "MEASURED", tmp_path / "measured")
    monkeypatch.setattr(sys, "argv", ["measure_gpu", str(tmp_path)])
    assert measure_gpu._options().known == []
    (tmp_path / "measured").mkdir()
    assert measure_gpu._options().known == [tmp_path / "measured"]
    monkeypatch.setattr(sys, "argv", ["measure_gpu", str(tmp_path), "--known", "nowhere"])
    with pytest.raises(SystemExit):
        measure_gpu._options()
    assert "--known nowhere: there is no such file or folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="has no place for the tables"):
        command.with_section("nothing", "text")


# ---- fitting ----


def test_a_probe_is_simulated_as_its_kernels():
    h200 = Machine.named("h200")
    bias = Probe("linear", ((8, 16), (32, 16), (32,)), "tf32")
    (product,) = fit.kernels_of_probe(bias, h200)
    assert (product.kind, product.type, product.sizes) == ("matmul", "tf32", (1, 8, 32, 16))
    heads = Probe("attention", ((2, 4, 16, 32),) * 3, "fp16", {"causal": True})
    assert [(k.kind, k.variant) for k in fit.kernels_of_probe(heads, h200)] == [("attention", "causal")]
    kinds = {k.kind for probe in (p for p in more_probes()[::60]) for k in fit.kernels_of_probe(probe, h200)}
    assert "unknown" not in kinds and {"convolution", "matmul"} <= kinds


def test_figures_are_found_again_from_times(tmp_path, capsys):
    """The times of a machine whose products and host are slower than the H200's: what is fitted to them comes near it."""
    h200 = Machine.named("h200")
    kernels = {name: dict(figures) for name, figures in h200.kernels.items()}
    kernels["matmul.fp16"] |= {"rate": 0.4, "floor": 6e-6}
    other = dataclasses.replace(h200, kernels=kernels)
    log = Log(tmp_path / "probes.jsonl", "probe")
    shapes = [(rows, columns) for rows in (64, 1024, 8192) for columns in (512, 4096)]
    for rows, columns in shapes:
        probe = Probe("linear", ((rows, columns), (columns, columns)), "fp16")
        these = fit.kernels_of_probe(probe, other)
        hot, cold = (Sample(these, 1.0, hot).simulated(other) for hot in (True, False))
        log.add({"probe": probe.to_dict(), "hot": hot, "cold": cold})
    host = Log(tmp_path / "host.jsonl", "host")
    for name in ("module identity", "function add", "function view", "function linear", "module linear"):
        host.add({"host": name, "seconds": 1e-5 + 1e-6 * len(name)})
    case = next(case for case in CASES if case.name == "mlp")
    slow = dataclasses.replace(other, host={name: 3 * seconds for name, seconds in h200.host.items()})
    models = Log(tmp_path / "models.jsonl", "model", "batch", "precision")
    eager = simulate(case.build(), case.inputs(1), machine=slow).seconds
    models.add({"model": "mlp", "batch": 1, "precision": "fp32", "eager": eager})
    fit.main([str(tmp_path), "-o", str(tmp_path / "other.toml"), "--rounds", "1"])
    found = Machine.named(tmp_path / "other.toml")
    assert found.kernels["matmul.fp16"]["rate"] == pytest.approx(0.4, rel=0.15)
    assert found.kernels["matmul.fp32"] == pytest.approx(h200.kernels["matmul.fp32"])
    assert simulate(case.build(), case.inputs(1), machine=found).seconds == pytest.approx(eager, rel=0.02)
    text = (tmp_path / "other.toml").read_text()
    assert "# Kernels: fitted to 6 probes" in text and "which mlp asks for" in text and found.peak == h200.peak
    assert "matmul.fp16: 12 times, off by" in capsys.readouterr().out


def test_nothing_is_measured_after_the_device_was_lost(tmp_path, monkeypatch):
    """A device that breaks in the first case: the others stay to be measured by another process."""

    def breaks(device):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(measured_models, "synchronize", breaks)
    log = Log(tmp_path / "models.jsonl", "model", "batch", "precision")
    wrong = Case("wrong", "mlp", small, lambda batch: (torch.randn(batch, 7),))
    measure_runs(wrong, log, (1, 2, 3), ("fp32",), "cpu", time.perf_counter() + 60)
    assert [row["batch"] for row in log.rows] == [1] and log.rows[0]["lost"] == "the device did not answer any more"
    with pytest.raises(SystemExit) as end:
        measure_gpu._stop_if_lost(log)
    assert end.value.code == measure_gpu.LOST


def test_tables_and_the_plot_are_written_from_what_is_kept(tmp_path, monkeypatch, capsys):
    """The way from measured rows to the page: kept in one file, compared from it, written between the marks."""
    page, plot, kept = tmp_path / "simulate.md", tmp_path / "simulated.svg", tmp_path / "h200.jsonl.gz"
    page.write_text(f"before\n{command.BEGIN}\nold\n{command.END}\nafter\n")
    monkeypatch.setattr(command, "PAGE", page)
    monkeypatch.setattr(command, "PLOT", plot)
    log = Log(tmp_path / "out.jsonl", "model", "batch", "precision")
    log.add({"model": "mlp", "batch": 1, "precision": "fp32", "eager": 1e-4, "graph": 2e-5, "peak_bytes": 60_000_000})
    command.main([str(tmp_path / "out.jsonl"), "--keep", str(kept), "--write"])
    first = page.read_text()
    assert first.startswith(f"before\n{command.BEGIN}\n\nMeasured on NVIDIA H200") and first.endswith(
        f"{command.END}\nafter\n"
    )
    assert "old" not in first and "| fp32 | 1 | 1 |" in first and plot.read_text().count("<circle") == 2
    command.main([str(kept), "--write"])
    assert page.read_text() == first
    capsys.readouterr()


def test_the_table_of_cpus_is_written_from_what_was_measured(tmp_path, monkeypatch, capsys):
    page, rows = tmp_path / "simulate.md", tmp_path / "rows.json"
    page.write_text(f"{cpu.MARKS[0]} old {cpu.MARKS[1]}")
    rows.write_text(
        json.dumps([{"model": "recommender", "kind": "recommender", "batch": 1, "threads": 1, "seconds": 2e-4}])
    )
    monkeypatch.setattr(cpu, "PAGE", page)
    known = ["--machine", "epyc_turin_1_thread", "--models", "recommender", "--measured", str(rows), "--write"]
    monkeypatch.setattr(sys, "argv", ["cpu", *known])
    cpu.main()
    text = page.read_text()
    assert "old" not in text and "| recommender | 0.2 ms, " in text and "1 cases of 1 models" in text
    assert capsys.readouterr().out.strip() in text
    monkeypatch.setattr(sys, "argv", ["cpu"])
    with pytest.raises(SystemExit):
        cpu.main()
    assert "give --machine or --calibrate" in capsys.readouterr().err
