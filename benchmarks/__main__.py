"""The command `python -m benchmarks`: picks experiments, runs them and prints the table.
The measuring is in `measure`, the experiments in `core`, `rewriting`, `passes`, `propagation`, `captures`, `recording` and
`drawing`, the texts in `report`.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import captures, core, drawing, passes, propagation, recording, report, rewriting
from benchmarks.measure import Figure, Plan, figures, measure

# Everything measured runs in one thread, where the two clocks agree, except that only one counts other programs.
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="torchgraft in ratios to torch.fx, torch.export"
    )
    parser.add_argument(
        "--only", metavar="PATTERN", action="append", help="experiments whose name holds or matches this"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the experiments and stop")
    parser.add_argument("--repeat", metavar="N", type=int, help="exactly N rounds (default: what fits in 1 s, 3 to 25)")
    parser.add_argument(
        "--full", action="store_true", help="also measure torch.fx where it takes longest (a minute more)"
    )
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="time of the process (default) or of the wall")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures as data")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write the table as a page")
    parser.add_argument(
        "--calibrate", action="store_true", help="torch.fx on both sides: shows the noise of the machine"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    theirs = importlib.import_module("torch.fx")
    ours = importlib.import_module("torch.fx" if options.calibrate else "torchgraft")
    known = core.experiments(theirs, ours)
    if not options.calibrate:
        known += [*rewriting.experiments(theirs, ours), *passes.experiments(theirs, ours)]
        known += propagation.experiments(theirs, ours)
        known += [*captures.experiments(ours), *recording.experiments(theirs, ours)]
        known += drawing.experiments(theirs, ours)
    chosen = [experiment for experiment in known if _wanted(experiment.name, options.only)]
    if options.calibrate and not options.full:
        chosen = [experiment for experiment in chosen if not any(arm.slow for arm in experiment.arms)]
    if options.list:
        print("\n".join(experiment.name for experiment in chosen))
        return 0
    if not chosen:
        print(f"no experiment matches {options.only}; --list prints the names", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    environment = report.Environment.current()
    plan = Plan(repeat=options.repeat, full=options.full, clock=CLOCKS[options.clock])
    print(environment)
    print(report.header_line())
    started = time.perf_counter()
    taken: list[Figure] = []
    for experiment in chosen:
        for figure in figures(experiment, measure(experiment, plan)):
            taken.append(figure)
            print(report.line(figure), flush=True)
    for figure in captures.medians(taken):
        taken.append(figure)
        print(report.line(figure))
    print(f"\n{report.NOTES}\n\nTook {time.perf_counter() - started:.0f} s. {report.summary(taken)}")
    if options.json:
        options.json.write_text(json.dumps(report.data(environment, taken), indent=2) + "\n")
    if options.markdown:
        options.markdown.write_text(report.markdown(environment, _command(options), taken))
    return 0


def _wanted(name: str, patterns: list[str] | None) -> bool:
    if not patterns:
        return True
    lowered = name.lower()
    return any(pattern.lower() in lowered or fnmatch.fnmatch(lowered, pattern.lower()) for pattern in patterns)


def _command(options: argparse.Namespace) -> str:
    words = ["python -m benchmarks"]
    words += [f"--only '{pattern}'" for pattern in options.only or ()]
    words += [f"--repeat {options.repeat}"] if options.repeat else []
    words += ["--full"] if options.full else []
    words += [f"--clock {options.clock}"] if options.clock != "cpu" else []
    words += [f"--markdown {options.markdown}"]
    return " ".join(words)


if __name__ == "__main__":
    raise SystemExit(main())
