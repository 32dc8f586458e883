"""`graft report MODEL -o DIR`: everything that can be seen of a model, as a folder with a page that opens from disk.
The work is done by `torchgraft.report`; here is what is said at the end of it.
"""

from __future__ import annotations

import argparse
import time
import warnings

from torchgraft.cli.models import add_model_arguments, chosen_model
from torchgraft.cli.programs import add_json, needs_inputs, show_result

NAME = "report"
SUMMARY = "write a folder with a page about a model: programs at every level, drawings, calls, statistics"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("-o", "--output", metavar="DIR", default="report", help="the folder (default: report)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the report, and say where the page is and what is most interesting in it; fails if the program is wrong."""
    chosen = chosen_model(arguments)
    args, kwargs = needs_inputs(arguments, chosen, "a report is made by running the model")

    from torchgraft.reporting import report

    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about torch's own calls and what models do; failures are on the page
        made = report(chosen.model, args, kwargs, folder=arguments.output, name=chosen.name)
    show_result(arguments, made)
    if not arguments.json:
        print(f"made in {time.perf_counter() - started:.0f} s; open the page in a browser")
    diagnosis = made.seen.diagnosis
    is_wrong = diagnosis is not None and diagnosis.program is not None and not diagnosis.ok
    return 1 if is_wrong else 0
