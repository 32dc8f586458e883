"""Measures a GPU for simulations, within a time: models, steps of training, calls on the host, probes, names of kernels.

    PYTHONPATH=src python -m benchmarks.simulating.measure_gpu OUT --seconds 560

writes files of JSON lines to OUT, each below 2.1 MB, row by row: it may be killed at any moment. Started again with the same OUT
it goes on where it was; what is in benchmarks/simulating/measured (or in what --known names) is not measured again either, so
that a second machine goes on where the first was given back. What a case does to the device is survived: another process
measures, and is started anew when it ends or hangs. `--device cpu` measures the same on the CPU, without CUDA graphs.
`python -m benchmarks.simulating` compares the files with simulations, on any machine, and keeps them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.simulating.gpu_times import host_seconds, measure_on_gpu
from benchmarks.simulating.host_calls import host_calls
from benchmarks.simulating.kernel_names import profile_models, profile_probes
from benchmarks.simulating.log import NOW, Log, Row, all_rows, rows_of
from benchmarks.simulating.measured_models import TRAINED, measure_runs, measure_training, synchronize
from benchmarks.simulating.models import BATCHES, CASES, PRECISIONS, Case
from benchmarks.simulating.more_probes import more_probes
from torchgraft.analysis.simulate.calibration.measuring import measure_on_cpu
from torchgraft.analysis.simulate.calibration.probes import Probe, probes

COUNTS = {
    "linear": 110, "bmm": 30, "convolution": 230, "grouped": 70, "other_convolution": 50, "attention": 60,
    "recurrent": 14, "elementwise": 60, "norm": 80, "memory": 130, "gradient": 50,
}  # fmt: skip
SECTIONS = ("models", "training", "host", "probes", "profiles")  # what matters most first
MEASURED = Path(__file__).parent / "measured"
LOST = 4  # the exit code of a process whose device does not answer any more
MOST_SECONDS = 90.0  # without a sign of the process that measures, after which it hangs


def main() -> None:
    """Start processes that measure until one is through, or the time is up."""
    options = _options()
    if options.worker:
        return measure(options)
    options.out.mkdir(parents=True, exist_ok=True)
    for path in options.out.glob(f"*{NOW}"):
        path.unlink()  # all was ended from outside while this was measured: it is measured again
    end = time.monotonic() + options.seconds
    while (left := end - time.monotonic()) > 3:
        before = _state(options.out)
        rest = [*sys.argv[1:], "--seconds", f"{left:.0f}", "--worker"]  # of an option given twice the last counts
        code = _watched([sys.executable, "-m", "benchmarks.simulating.measure_gpu", *rest], options.out, end)
        if code == 0:
            break
        print(f"the process that measured ended with {code}", flush=True)
        if _state(options.out) == before:
            print("nothing was measured before it ended: giving up", flush=True)
            break
    for path in options.out.glob(f"*{NOW}"):
        path.unlink()
    for path in sorted(options.out.glob("*.jsonl")):
        rows = rows_of(path)
        failed = sum("error" in row for row in rows)
        print(f"{path.name}: {len(rows)} rows, {failed} of them errors, {path.stat().st_size / 1e6:.1f} MB")


def _watched(command: Sequence[str], out: Path, end: float) -> int:
    """Run a process that writes to a folder; one that hangs, or goes on long after its time, is ended."""
    process = subprocess.Popen(command)
    sign, since = _state(out), time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(1.0)
        now = time.monotonic()
        if (state := _state(out)) != sign:
            sign, since = state, now
        if now - since > MOST_SECONDS or now > end + MOST_SECONDS / 3:
            process.kill()
            return process.wait()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=1100, help="for everything (default: 1100)")
    parser.add_argument(
        "--known",
        nargs="*",
        type=Path,
        default=[MEASURED],
        help=f"files whose rows are there (default: {MEASURED.name})",
    )
    parser.add_argument(
        "--only", type=_words(SECTIONS), default=SECTIONS, help=f"some of {','.join(SECTIONS)} (default: all)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    names = tuple(case.name for case in CASES)
    parser.add_argument("--models", type=_words(names), default=names, help="some by name, with commas (default: all)")
    parser.add_argument("--batches", type=lambda text: tuple(map(int, text.split(","))), default=BATCHES)
    parser.add_argument("--precisions", type=_words(PRECISIONS), default=PRECISIONS)
    parser.add_argument("--probes", type=int, help="so many of each kind (default: many)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.known == [MEASURED] and not MEASURED.exists():
        options.known = []  # nothing was kept yet
    if missing := [str(path) for path in options.known if not path.exists()]:
        parser.error(f"--known {', '.join(missing)}: there is no such file or folder")
    return options


def _words(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Reads words with commas, all of which must be known."""

    def read(text: str) -> tuple[str, ...]:
        words = tuple(text.split(","))
        if unknown := [word for word in words if word not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(known)}")
        return words

    return read


def _state(out: Path) -> Any:
    found = []
    for path in sorted(out.iterdir()):
        with contextlib.suppress(FileNotFoundError):
            found.append((path.name, path.stat().st_size, path.stat().st_mtime_ns))
    return found


def measure(options: argparse.Namespace) -> None:
    """All sections in order, until the time is up; a section that fails does not keep the next one from its turn."""
    begin = time.perf_counter()
    end = begin + options.seconds
    options.rows = all_rows(options.known)
    gc.freeze()  # each recording of a graph looks for garbage: not among what was imported
    about = Log(options.out / "about.jsonl", "device", "torch")
    row = _about(options.device)
    if not about.has(row):
        about.add(row)
    print(row, flush=True)
    for name in SECTIONS:
        if name not in options.only or time.perf_counter() > end:
            continue
        try:
            _MEASURES[name](options, end)
        except Exception:
            traceback.print_exc()
        print(f"{name}: done after {time.perf_counter() - begin:.0f} s", flush=True)


def _about(device: str) -> dict[str, Any]:
    row = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    if device == "cpu":
        return {"device": torch.backends.cpu.get_cpu_capability(), **row}
    versions = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {"device": torch.cuda.get_device_name(), **row, **versions}


# ---- sections ----


def measure_host(options: argparse.Namespace, end: float) -> None:
    """What the host takes for calls of one operator."""
    log = _log(options, "host.jsonl", "host")
    if options.device == "cpu":
        return
    with torch.no_grad():
        for name, call in host_calls().items():
            row: dict[str, Any] = {"host": name}
            if log.has(row) or time.perf_counter() > end:
                continue
            log.begin(row)
            try:
                call()
                row["seconds"] = host_seconds(call)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            log.add(row)
            if "error" in row:
                _survive(options.device)


def measure_models(options: argparse.Namespace, end: float) -> None:
    """The models, at all batches and precisions."""
    log = _log(options, "models.jsonl", "model", "batch", "precision")
    for case in _chosen(options):
        if time.perf_counter() < end:
            started, before = time.perf_counter(), len(log.rows)
            measure_runs(case, log, options.batches, options.precisions, options.device, end)
            _stop_if_lost(log)
            if len(log.rows) > before:
                print(
                    f"{case.name}: {len(log.rows) - before} cases in {time.perf_counter() - started:.1f} s", flush=True
                )


def measure_steps(options: argparse.Namespace, end: float) -> None:
    """Steps of training of some models."""
    log = _log(options, "training.jsonl", "training", "batch", "precision")
    for case in _chosen(options):
        if case.name in TRAINED and time.perf_counter() < end:
            measure_training(case, log, options.precisions, options.device, end)
            _stop_if_lost(log)


def measure_probes(options: argparse.Namespace, end: float) -> None:
    """Probes of all kinds in turn."""
    log = _log(options, "probes.jsonl", "probe")
    measured = measure_on_gpu if options.device == "cuda" else measure_on_cpu
    chosen, count = _probes(options), 0
    for probe in chosen:
        row: dict[str, Any] = {"probe": probe.to_dict()}
        if log.has(row):
            continue
        if time.perf_counter() > end:
            print(f"time is up after {len(log.rows)} of {len(chosen)} probes", flush=True)
            break
        log.begin(row)
        try:
            row = measured(probe).to_dict()
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        log.add(row)
        count += 1
        if "error" in row:
            _survive(options.device)
    print(f"{count} probes measured", flush=True)


def measure_names(options: argparse.Namespace, end: float) -> None:
    """The kernels of models and probes, by name."""
    if options.device == "cuda":
        profile_models(_log(options, "model_kernels.jsonl", "model", "batch", "precision"), end)
        profile_probes(_log(options, "probe_kernels.jsonl", "probe"), _probes(options), end)


_MEASURES = {
    "host": measure_host,
    "models": measure_models,
    "training": measure_steps,
    "probes": measure_probes,
    "profiles": measure_names,
}


def _log(options: argparse.Namespace, name: str, *names: str) -> Log:
    """A file of rows, with those of earlier runs that are of the same sort."""
    of_kernels = name.endswith("kernels.jsonl")
    known: list[Row] = [row for row in options.rows if names[0] in row and ("kernels" in row) == of_kernels]
    return Log(options.out / name, *names, known=known)


def _chosen(options: argparse.Namespace) -> list[Case]:
    """One model of each kind first: whenever the end comes, many kinds were measured. Those held out come before others."""
    cases = sorted((case for case in CASES if case.name in options.models), key=lambda case: case.fit)
    kinds: dict[str, int] = {}
    places = {}
    for case in cases:
        places[case.name] = kinds[case.kind] = kinds.get(case.kind, 0) + 1
    return sorted(cases, key=lambda case: places[case.name])


def _probes(options: argparse.Namespace) -> list[Probe]:
    counts = dict.fromkeys(COUNTS, options.probes) if options.probes is not None else COUNTS
    chosen = list(probes(counts, options.precisions))
    if options.probes is None:
        chosen += [probe for probe in more_probes() if probe.precision in options.precisions]
    return [chosen[place] for offset in range(7) for place in range(offset, len(chosen), 7)]  # all kinds soon


def _stop_if_lost(log: Log) -> None:
    if log.rows and "lost" in log.rows[-1]:
        sys.exit(LOST)


def _survive(device: str) -> None:
    """After an error: whether the device still answers."""
    try:
        synchronize(device)
    except Exception:
        sys.exit(LOST)


if __name__ == "__main__":
    main()
