"""`graft bench MODEL`: time a model on backends, batches and numbers of threads, beside eager, torch.compile and runtimes alone.
The work is done in `torchgraft.backends.bench`; MODEL and --input are read in `models.py`.
"""

from __future__ import annotations

import argparse

from torchgraft.cli.models import add_model_arguments, chosen_model, wrong_usage
from torchgraft.cli.programs import add_json, add_output, counts, needs_inputs, seconds_above_zero, show_result

NAME = "bench"
SUMMARY = "time a model on backends beside eager, torch.compile and each runtime used directly"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--backends",
        default="all",
        metavar="NAMES",
        help="all that can be used here, or some, with commas (default: all)",
    )
    parser.add_argument("--batch", type=counts, default=(1,), metavar="SIZES", help="with commas (default: 1)")
    parser.add_argument(
        "--threads", type=counts, metavar="NUMBERS", help="with commas (default: as many as torch uses)"
    )
    parser.add_argument(
        "--time-limit",
        type=seconds_above_zero,
        default=120.0,
        metavar="SECONDS",
        help="for one to get ready (default: 120)",
    )
    add_output(parser, "an .svg file with bars, or a .json file")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table; fails where a backend that was named could not run the model."""
    suffix = (arguments.output or "").lower().rpartition(".")[2]
    if arguments.output and suffix not in ("svg", "json"):
        wrong_usage(arguments, f"cannot write '{arguments.output}': give an .svg or a .json file")
    chosen = chosen_model(arguments)
    args, kwargs = needs_inputs(arguments, chosen, "a model is timed on example inputs")

    from torchgraft.backends.bench import bench
    from torchgraft.results.files import write_text

    names = None if arguments.backends == "all" else [item.strip() for item in arguments.backends.split(",")]
    result = bench(
        chosen.model,
        args,
        kwargs,
        backends=names,
        batches=arguments.batch,
        threads=arguments.threads,
        time_limit=arguments.time_limit,
        name=chosen.name,
    )
    show_result(arguments, result)
    if arguments.output:
        write_text(arguments.output, result.svg() if suffix == "svg" else result.to_json() + "\n")
    failed = [
        row for row in result.results if names is not None and row.way.startswith("lower") and row.seconds is None
    ]
    return 1 if failed else 0
