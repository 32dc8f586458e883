"""`graft summary MODEL`: the tree of modules with outputs, parameters and FLOPs.
The work is done by `torchgraft.summary`.
"""

from __future__ import annotations

import argparse

from torchgraft.cli.models import add_model_arguments, chosen_model, wrong_usage
from torchgraft.cli.programs import add_json, add_output, positive_or_zero, put_out_result
from torchgraft.errors import GraftError

NAME = "summary"
SUMMARY = "show the tree of modules with their outputs, parameters and FLOPs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--depth", type=positive_or_zero, metavar="N", help="how far down to go (default: everything)")
    parser.add_argument(
        "--columns",
        default="output,parameters,share,flops",
        metavar="NAMES",
        help="some of input, output, parameters, trainable, share, bytes, flops, flops_share, calls, with commas",
    )
    parser.add_argument(
        "--no-fold", action="store_true", help="show every layer, also those that are as the one before"
    )
    add_output(parser, "a file for the text (default: print it)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the tree; a column that does not exist is wrong usage."""
    from torchgraft.view.module_summary import COLUMNS, summary

    unknown = [name for name in arguments.columns.split(",") if name.strip() not in COLUMNS]
    if unknown:
        wrong_usage(arguments, GraftError(f"there is no column {unknown[0]!r}\nchoose some of {', '.join(COLUMNS)}"))
    chosen = chosen_model(arguments, computes=False)
    options = {"depth": arguments.depth, "columns": arguments.columns, "fold": not arguments.no_fold}
    result = summary(chosen.model, chosen.args or (), chosen.kwargs, **options)
    put_out_result(arguments, result)
    return 0
