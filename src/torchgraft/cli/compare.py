"""`graft compare MODEL [OTHER]`: run two programs on the same inputs and name the first node that differs.
The work is done by `torchgraft.compare`; which two programs is decided in `programs.py`.
"""

from __future__ import annotations

import argparse

from torchgraft.cli.programs import add_json, add_output, add_pair_arguments, chosen_pair, needs_inputs, put_out_result

NAME = "compare"
SUMMARY = "run two programs on the same inputs and name the first node that differs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    parser.add_argument(
        "--rtol", type=float, metavar="NUMBER", help="how far apart values may be, as a part of themselves"
    )
    parser.add_argument("--atol", type=float, metavar="NUMBER", help="how far apart values may be in any case")
    add_output(parser, "a file for the table (default: print it)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table; fails if there is a difference."""
    (chosen, first), (_, second) = chosen_pair(arguments)
    args, kwargs = needs_inputs(arguments, chosen, "programs are compared by running them")

    import torch

    from torchgraft.recording.program_comparison import compare

    with torch.no_grad():
        comparison = compare(first, second, args, kwargs, rtol=arguments.rtol, atol=arguments.atol)
    put_out_result(arguments, comparison)
    return 0 if comparison.ok else 1
