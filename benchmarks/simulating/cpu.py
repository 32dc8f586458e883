"""How far simulations are off on the CPU at hand, after `graft calibrate`: models held out of the fit, measured and simulated.

python -m benchmarks.simulating.cpu --calibrate build/machines --write
python -m benchmarks.simulating.cpu --machine one.toml --machine two.toml

The first calibrates with one and with two threads, and writes the table into docs/simulate.md. Each machine's file says with how
many threads it was made. Every model runs in a process of its own, in turns; the least time counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.coverage.torchvision_models import import_torchvision
from benchmarks.simulating.__main__ import PAGE, with_section
from benchmarks.simulating.models import CASES, Case, call_of
from torchgraft.analysis.simulate import Machine, simulate

MODELS = [
    *("alexnet", "densenet121", "squeezenet1_1", "shufflenet_v2_x1_0", "efficientnet_b0", "mobilenet_v3_large"),
    *(
        "regnet_y_800mf",
        "resnext50_32x4d",
        "convnext_tiny",
        "swin_t",
        "unet",
        "gpt2",
        "t5_small",
        "translator",
        "mixer",
    ),
    *("speech_gru", "pointnet", "recommender"),
]
BATCHES = (1, 16)
MARKS = (
    "<!-- cpu: written by python -m benchmarks.simulating.cpu --calibrate build/machines --write -->",
    "<!-- cpu: end -->",
)
Row = dict[str, Any]


def in_a_child(work: Callable[[], Any]) -> Any:
    """The answer of some work that is done in a copy of this process, which has used no threads yet."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            with os.fdopen(writing, "w") as file:
                json.dump(work(), file)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def measured(case: Case, threads: int, batches: tuple[int, ...], seconds: float) -> list[Row]:
    """The least seconds of a run, by batch."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = case.build().eval().requires_grad_(False)
    rows = []
    for batch in batches:
        args, kwargs = call_of(case, batch, torch.float32, "cpu")
        times: list[float] = []
        with torch.no_grad():
            model(*args, **kwargs)
            while len(times) < 2 or (sum(times) < seconds and len(times) < 200):
                start = time.perf_counter()
                model(*args, **kwargs)
                times.append(time.perf_counter() - start)
        rows.append({"model": case.name, "kind": case.kind, "batch": batch, "threads": threads, "seconds": min(times)})
    return rows


def simulated(case: Case, batch: int, machine: Machine) -> float:
    """What `simulate` says of the same run, on a model without data."""
    try:
        with torch.device("meta"):
            model = case.build()
    except NotImplementedError:  # it looks at values to know its sizes
        model = case.build().to("meta")
    model = model.eval().requires_grad_(False)
    args, kwargs = call_of(case, batch, torch.float32, "meta")
    return simulate(model, args, kwargs, machine=machine).seconds


def ranks(values: list[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    for place, at in enumerate(order):
        found[at] = float(place)
    return found


def correlation(first: list[float], second: list[float]) -> float:
    """Spearman's: how alike two orders are."""
    a, b = torch.tensor(ranks(first)), torch.tensor(ranks(second))
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) / (a.norm() * b.norm()))


def mean_error(rows: list[Row]) -> float:
    return sum(abs(row["simulated"] / row["seconds"] - 1) for row in rows) / max(len(rows), 1)


def table(rows: list[Row]) -> str:
    """One line for each model, and the errors below."""
    keys = sorted({(row["threads"], row["batch"]) for row in rows})
    lines = [
        "| model | " + " | ".join(f"{t} thread{'s' * (t > 1)}, batch {b}: measured, simulated" for t, b in keys) + " |"
    ]
    lines.append("|---|" + "---|" * len(keys))
    for name in dict.fromkeys(row["model"] for row in rows):
        cells = []
        for key in keys:
            row = next((row for row in rows if row["model"] == name and (row["threads"], row["batch"]) == key), None)
            if row is None:
                cells.append("")
                continue
            off = row["simulated"] / row["seconds"] - 1
            cells.append(f"{row['seconds'] * 1e3:.1f} ms, {row['simulated'] * 1e3:.1f} ms ({off:+.0%})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    errors = [mean_error([row for row in rows if (row["threads"], row["batch"]) == key]) for key in keys]
    lines.append("| mean error | " + " | ".join(f"{error:.1%}" for error in errors) + " |")
    whole = correlation([row["seconds"] for row in rows], [row["simulated"] for row in rows])
    names = len({row["model"] for row in rows})
    lines += [
        "",
        f"{len(rows)} cases of {names} models: mean absolute error {mean_error(rows):.1%}, rank correlation {whole:.3f}",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--machine", action="append", default=[], help="a file of graft calibrate; once for each number of threads"
    )
    parser.add_argument("--calibrate", type=Path, metavar="FOLDER", help="make such files there first")
    parser.add_argument("--threads", type=lambda text: tuple(map(int, text.split(","))), default=(1, 2))
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE}")
    parser.add_argument("--models", type=lambda text: text.split(","), default=MODELS)
    parser.add_argument("--batch", type=lambda text: tuple(map(int, text.split(","))), default=BATCHES)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.4, help="for each model and batch in each round")
    parser.add_argument("--save", type=Path, help="add what was measured to a file of JSON; the least counts")
    parser.add_argument("--measured", type=Path, help="take what was measured from such a file")
    options = parser.parse_args()
    if options.calibrate is not None:
        options.machine += [str(calibrated(options.calibrate, threads)) for threads in options.threads]
    if not options.machine:
        parser.error("give --machine or --calibrate")
    machines = [Machine.named(name) for name in options.machine]
    cases = [case for case in CASES if case.name in options.models]
    rows = json.loads(options.measured.read_text()) if options.measured else measure_all(cases, machines, options)
    if options.save:
        known = json.loads(options.save.read_text()) if options.save.exists() else []
        rows = least([*known, *rows])
        options.save.write_text(json.dumps(rows, indent=1))
    by_name = {case.name: case for case in cases}
    rows = [row for row in rows if row["model"] in by_name]
    for row in rows:
        machine = next(one for one in machines if one.units == row["threads"])
        row["simulated"] = simulated(by_name[row["model"]], row["batch"], machine)
    text = table(rows)
    sys.stdout.write(text)
    if options.write:
        PAGE.write_text(with_section(PAGE.read_text(), text.strip(), MARKS))


def calibrated(folder: Path, threads: int) -> Path:
    """The file of this machine with so many threads, made by another process, as a user makes it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{threads}.toml"
    command = [sys.executable, "-m", "torchgraft", "calibrate", "-o", str(path), "--threads", str(threads)]
    subprocess.run(command, check=True)
    return path


def measure_all(cases: list[Case], machines: list[Machine], options: argparse.Namespace) -> list[Row]:
    """All models in turn, some times over."""
    found: list[Row] = []
    import transformers  # noqa: F401 (once, not in every child)

    import_torchvision()

    for _ in range(options.rounds):
        for threads in sorted({machine.units for machine in machines}):
            for case in cases:
                work = partial(measured, case, threads, options.batch, options.seconds)
                found += in_a_child(work) or []
    return least(found)


def least(rows: list[Row]) -> list[Row]:
    """Of each case the row with the least time."""
    best: dict[Any, Row] = {}
    for row in rows:
        key = row["model"], row["batch"], row["threads"]
        if key not in best or row["seconds"] < best[key]["seconds"]:
            best[key] = row
    return list(best.values())


if __name__ == "__main__":
    main()
