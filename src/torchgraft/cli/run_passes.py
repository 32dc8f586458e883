"""`graft run-passes MODEL "a, b{option=1}"`: capture a model, run passes over the program and report what each did.
The work is done by `torchgraft.passes`; MODEL and --input are read in `models.py`.
"""

from __future__ import annotations

import argparse
import inspect
from typing import Any

from torchgraft.cli.models import ChosenModel, add_model_arguments, chosen_model
from torchgraft.cli.programs import add_json, add_level, captured, json_text, pipeline_of

NAME = "run-passes"
SUMMARY = "capture a model, run passes over the program and report what each did"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "passes",
        metavar="PASSES",
        help='names and commas, with options in braces, such as "fuse-conv-norm, fold-constants{max_bytes=4096}"',
    )
    add_level(parser)
    parser.add_argument("--check", action="store_true", help="run the program before and after each pass and compare")
    parser.add_argument("--code", action="store_true", help="print the code of the program afterwards")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the report; a text that names no pipeline ends with the code of wrong usage."""
    pipeline = pipeline_of(arguments)
    chosen = chosen_model(arguments)
    program = captured(arguments, chosen)

    from torchgraft.passes import Pipeline

    args = _arguments(chosen)
    if args is not None and not arguments.check:
        pipeline = Pipeline([edit.with_example(args) for edit in pipeline.passes])
    report = pipeline(program, check=args if arguments.check else None)
    if arguments.json:
        counts = {"nodes": len(program.graph.nodes), "changes": report.changes}
        print(json_text({"passes": report.rows(), **counts}))
        return 0
    print(report)
    if arguments.check:
        print("checked: the program computes the same after every pass")
    if arguments.code:
        print(program.code.strip("\n"))
    return 0


def _arguments(chosen: ChosenModel) -> tuple[Any, ...] | None:
    """The example inputs in the order in which the program takes them."""
    if not chosen.has_inputs:
        return None
    bound = inspect.signature(chosen.model.forward).bind(*(chosen.args or ()), **chosen.kwargs)
    bound.apply_defaults()  # an input that is left out stands before others
    return bound.args
