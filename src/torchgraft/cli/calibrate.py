"""`graft calibrate -o my-machine.toml`: measures kernels on the CPU at hand and writes a machine for `graft simulate --machine`.
The work is done by `torchgraft.calibrate_machine`.
"""

from __future__ import annotations

import argparse

from torchgraft.cli.models import wrong_usage
from torchgraft.cli.programs import add_json, add_output, positive, show_result, whole_number

NAME = "calibrate"
SUMMARY = "measure the CPU at hand, and write it as a machine that models can be simulated on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output(parser, "the .toml file of the machine: there whole when all is done, or not at all", required=True)
    parser.add_argument(
        "--seconds",
        type=lambda text: whole_number(text, 5),
        default=170,
        metavar="N",
        help="how long to measure at most (default: 170); nothing else should run meanwhile",
    )
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help="a machine of so many threads (default: as many as torch has); libraries do other things with one than with two",
    )
    parser.add_argument("--name", help="what to call it (default: what the system calls the CPU)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, fit, write, and say how well the figures fit."""
    if not arguments.output.lower().endswith(".toml"):
        wrong_usage(arguments, f"a machine is a .toml file, not '{arguments.output}'\nfor example -o my-machine.toml")
    from torchgraft.analysis.simulate import calibrate_machine

    options = {"seconds": arguments.seconds, "threads": arguments.threads, "name": arguments.name}
    found = calibrate_machine(arguments.output, **options)
    show_result(arguments, found)
    if not arguments.json:
        print(f"written: {arguments.output}")
    return 0
