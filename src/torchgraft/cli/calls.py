"""`graft calls MODEL`: every torch call of one run, with arguments, result, module, line and time.
The work is done by `torchgraft.log_calls`.
"""

from __future__ import annotations

import argparse

from torchgraft.cli.models import add_model_arguments, chosen_model
from torchgraft.cli.programs import add_json, add_output, needs_inputs, put_out, put_out_result

NAME = "calls"
SUMMARY = "log every torch call of one run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--level",
        choices=("function", "dispatch"),
        default="function",
        help="function (what Python calls) or dispatch (the operators that run below) (default: function)",
    )
    parser.add_argument("--name", metavar="PATTERN", help="only calls of this name, such as relu or 'aten.conv*'")
    parser.add_argument(
        "--module", metavar="PATTERN", help="only calls inside this module, such as layer1 or 'layer*.0'"
    )
    parser.add_argument("--counts", action="store_true", help="only how often each function is called")
    parser.add_argument("--trace", action="store_true", help="as a trace for chrome://tracing and Perfetto")
    add_output(parser, "a file for the log (default: print it)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the log."""
    chosen = chosen_model(arguments)
    args, kwargs = needs_inputs(arguments, chosen, "calls are logged by running the model")

    import torch

    from torchgraft.recording.calls import log_calls

    with torch.no_grad():
        log = log_calls(chosen.model, args, kwargs, level=arguments.level)
    log = log.filter(name=arguments.name, module=arguments.module)
    if arguments.trace:
        put_out(arguments, log.to_chrome_trace())
    elif arguments.counts and not arguments.json:
        put_out(arguments, "\n".join([f"{count:>6}  {name}" for name, count in log.counts.items()]))
    else:
        put_out_result(arguments, log)
    return 0
