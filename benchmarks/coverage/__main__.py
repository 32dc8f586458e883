"""The command `python -m benchmarks.coverage`: picks collections and models, sweeps over them and writes the page.
What is done with one model is in `examination`.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import importlib
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.coverage import report, rows
from benchmarks.coverage.cases import Case
from benchmarks.coverage.rows import Row
from benchmarks.coverage.sweep import examine_apart
from benchmarks.report import Environment

COLLECTIONS = {
    "torchvision": "torchvision_models",
    "timm": "timm_models",
    "transformers": "language_models",
    "masked": "language_models",
    "transformers-other": "other_models",
    "transformers-heads": "other_models",
    "large": "large_models",
}
# Where a file has several lists of cases.
OTHER_LISTS = {"masked": "masked_cases", "transformers-heads": "head_cases"}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.coverage", description="which models are captured, and how well"
    )
    names = ", ".join(COLLECTIONS)
    parser.add_argument("collections", nargs="*", metavar="COLLECTION", help=f"of {names} (default: all)")
    parser.add_argument("--only", metavar="NAME", action="append", help="models whose name holds or matches this")
    parser.add_argument(
        "--rows", metavar="FILE", type=Path, help="keep what is found here, a line a model, and go on from it"
    )
    parser.add_argument("--again", action="store_true", help="examine what the file has once more, unless all was well")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write the summary and the tables as a page")
    parser.add_argument(
        "--remark", metavar="TEXT", default="", help="a sentence for the page: what was left out, how busy"
    )
    parser.add_argument(
        "--without-export", action="store_true", help="leave torch.export out: it takes most of the time"
    )
    parser.add_argument(
        "--part", metavar="K/N", type=_part, default=(1, 1), help="the K-th of N parts: a sample, or one of N processes"
    )
    parser.add_argument("--limit", metavar="S", type=float, default=180.0, help="seconds for one model (default 180)")
    options = parser.parse_args(arguments)
    unknown = set(options.collections) - set(COLLECTIONS)
    if unknown:
        parser.error(f"unknown collection {', '.join(sorted(unknown))}; there are {names}")
    return options


def _part(text: str) -> tuple[int, int]:
    which, _, parts = text.partition("/")
    if not (which.isdecimal() and parts.isdecimal() and 1 <= int(which) <= int(parts)):
        raise argparse.ArgumentTypeError(f"expected K/N with K from 1 to N, such as 1/6, got {text!r}")
    return int(which), int(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {(row.collection, row.name): row for row in (rows.read(options.rows) if options.rows else [])}
    cases = chosen(options.collections or list(COLLECTIONS), options.only, options.part)
    if not cases:
        print(f"no model matches {options.only}", file=sys.stderr)
        return 2
    due = [
        case
        for case in cases
        if is_due(found.get((case.collection, case.name)), options.again, not options.without_export)
    ]
    started = time.perf_counter()
    prepare(not options.without_export)
    for number, case in enumerate(due, 1):
        row = examine_apart(case, options.limit, not options.without_export)
        found[row.collection, row.name] = row
        if options.rows:
            rows.append(options.rows, [row])
        show(row, number, len(due))
    taken = list(found.values())
    print(
        f"{CLEARED if sys.stdout.isatty() else ''}{report.summary(taken)}\nTook {time.perf_counter() - started:.0f} s."
    )
    if options.markdown:
        options.markdown.write_text(report.markdown(taken, Environment.current(), command(options), options.remark))
    return 0


def chosen(collections: Sequence[str], patterns: Sequence[str] | None, part: tuple[int, int] = (1, 1)) -> list[Case]:
    """A part of the cases of some collections, where their names fit one of the patterns."""
    cases: list[Case] = []
    for collection in collections:
        module = importlib.import_module(f"benchmarks.coverage.{COLLECTIONS[collection]}")
        cases += list(getattr(module, OTHER_LISTS.get(collection, "cases"))())
    which, parts = part
    cases = cases[which - 1 :: parts]
    return [case for case in cases if not patterns or any(_fits(case.name, pattern) for pattern in patterns)]


def _fits(name: str, pattern: str) -> bool:
    return pattern in name or fnmatch.fnmatch(name, pattern)


def is_due(known: Row | None, again: bool, with_export: bool = False) -> bool:
    """Whether a model is to be examined: it is new, or torch.export was left out of it, or something about it was not well and
    it is to be tried again."""
    if known is None or (again and not report.is_settled(known)):
        return True
    return with_export and not known.eager and known.collection != report.LARGE and rows.EXPORT not in known.attempts


def prepare(with_export: bool) -> None:
    """Load what every examination needs, once, before the process is copied for each of them."""
    import torchgraft

    model, value = torch.nn.Linear(1, 1), torch.ones(2, 1)
    program = torchgraft.capture(model, (value,), level="function")
    torchgraft.lower(program, (value,), level="core_aten")(value)
    torchgraft.capture_training(program, (value,)).run(value)
    if with_export:
        from torch.export import export

        export(model, (value,)).run_decompositions().module()
    # What is loaded by now stays: left out of collections, which every measurement begins with.
    gc.collect()
    gc.freeze()


CLEARED = "\r\033[K"


def show(row: Row, number: int, total: int) -> None:
    """One line a model; on a terminal, what went well is written over by the next."""
    text = f"[{number}/{total}] {report.line(row)}"
    if not sys.stdout.isatty():
        print(text, flush=True)
    elif report.is_settled(row):
        print(f"{CLEARED}{text[:110]}", end="", flush=True)
    else:
        print(f"{CLEARED}{text}", flush=True)


def command(options: argparse.Namespace) -> str:
    words = ["python -m benchmarks.coverage", *options.collections]
    words += [f"--only '{pattern}'" for pattern in options.only or ()]
    which, parts = options.part
    words += [f"--part {which}/{parts}"] if parts > 1 else []
    words += ["--without-export"] if options.without_export else []
    return " ".join([*words, f"--markdown {options.markdown}"])


if __name__ == "__main__":
    raise SystemExit(main())
