"""`graft run-passes MODEL "a, b{option=1}"`: capture a model, run passes over the program and report what each did.
The work is done by `torchgraft.passes`; MODEL and --input are read in `models.py`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from typing import TYPE_CHECKING, Any

from torchgraft.cli.models import WRONG_USAGE, ChosenModel, add_model_arguments, chosen_model

if TYPE_CHECKING:
    from torchgraft.codegen.graph_module import GraphModule
    from torchgraft.passes import PipelineReport

NAME = "run-passes"
SUMMARY = "capture a model, run passes over the program and report what each did"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_model_arguments(parser)
    parser.add_argument(
        "passes",
        metavar="PASSES",
        help='names and commas, with options in braces, such as "fuse-conv-norm, fold-constants{max_bytes=4096}"',
    )
    parser.add_argument(
        "--level",
        choices=("symbolic", "module", "function"),
        help="how to capture: without inputs, or watched, down to modules or to functions (default: module with inputs, "
        "symbolic without)",
    )
    parser.add_argument("--check", action="store_true", help="run the program before and after each pass and compare")
    parser.add_argument("--code", action="store_true", help="print the code of the program afterwards")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; a text that names no pipeline ends with the code of wrong usage."""
    from torchgraft.errors import PassError
    from torchgraft.passes import Pipeline

    try:
        pipeline = Pipeline(arguments.passes)
    except PassError as error:
        if getattr(arguments, "traceback", False):
            raise
        print(f"{arguments.prog}: {error}", file=sys.stderr)
        return WRONG_USAGE
    chosen = chosen_model(arguments)
    program = _captured(chosen, arguments.level)
    args = _arguments(chosen)
    if args is not None and not arguments.check:
        pipeline = Pipeline([edit.with_example(args) for edit in pipeline.passes])
    report = pipeline(program, check=args if arguments.check else None)
    print(_json(report, program) if arguments.json else _text(report, arguments, program))
    return 0


def _captured(chosen: ChosenModel, level: str | None) -> GraphModule:
    import torchgraft
    from torchgraft.errors import GraftError

    has_inputs = chosen.args is not None or bool(chosen.kwargs)
    level = level or ("module" if has_inputs else "symbolic")
    if level == "symbolic":
        return torchgraft.symbolic_trace(chosen.model)
    if not has_inputs:
        raise GraftError(f"--level {level} captures by running the model; give its inputs with --input")
    return torchgraft.capture(chosen.model, chosen.args or (), chosen.kwargs, level=level)


def _arguments(chosen: ChosenModel) -> tuple[Any, ...] | None:
    """The example inputs in the order in which the program takes them."""
    if chosen.args is None and not chosen.kwargs:
        return None
    bound = inspect.signature(chosen.model.forward).bind(*(chosen.args or ()), **chosen.kwargs)
    return bound.args


def _text(report: PipelineReport, arguments: argparse.Namespace, program: GraphModule) -> str:
    lines = [str(report)]
    if arguments.check:
        lines.append("checked: the program computes the same after every pass")
    if arguments.code:
        lines.append(program.code.strip("\n"))
    return "\n".join(lines)


def _json(report: PipelineReport, program: GraphModule) -> str:
    return json.dumps({"passes": report.rows(), "nodes": len(program.graph.nodes), "changes": report.changes}, indent=2)
