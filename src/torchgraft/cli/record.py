"""`graft record MODEL`: the values of a program's nodes in one run, as statistics or in a file.
The work is done by `torchgraft.record`.
"""

from __future__ import annotations

import argparse

from torchgraft.cli.models import add_model_arguments, chosen_model, wrong_usage
from torchgraft.cli.programs import add_json, add_level, add_output, captured, needs_inputs, put_out_result

NAME = "record"
SUMMARY = "run a program once and show statistics of every value, or write the values to a file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_level(parser)
    parser.add_argument(
        "--nodes",
        action="append",
        metavar="PATTERN",
        help="only nodes of this name, such as fc or 'layer1_*'; what comes after the last one is not run; may be repeated",
    )
    parser.add_argument(
        "--reduce", metavar="NAMES", help="some of min, max, mean, std, norm, zeros, nan, inf, histogram"
    )
    parser.add_argument("--gradients", action="store_true", help="also the gradients of the sum of the results")
    add_output(parser, "a .safetensors file for the values themselves; any other file gets the table")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the statistics, or write the tensors."""
    chosen = chosen_model(arguments)
    args, kwargs = needs_inputs(arguments, chosen, "values are recorded by running the model")
    if arguments.level == "joint":
        wrong_usage(arguments, "level joint takes parameters and tangents as inputs; record it in Python")
    program = captured(arguments, chosen)

    import torch

    from torchgraft.recording.record import record
    from torchgraft.results.tables import count

    to_file = arguments.output is not None and arguments.output.endswith(".safetensors")
    reduce = None if to_file else [name.strip() for name in arguments.reduce.split(",")] if arguments.reduce else True
    options = {"nodes": arguments.nodes, "reduce": reduce, "gradients": arguments.gradients}
    with torch.set_grad_enabled(arguments.gradients):
        try:
            recording = record(program, args, kwargs, **options, to=arguments.output if to_file else None)
        except (LookupError, ValueError) as error:  # a name of a node or of a statistic that does not exist
            wrong_usage(arguments, str(error.args[0] if error.args else error))
    if to_file and not arguments.json:
        print(f"written: {arguments.output} ({count(len(recording), 'node')})")
        return 0
    if to_file:
        arguments.output = None
    put_out_result(arguments, recording)
    return 0
