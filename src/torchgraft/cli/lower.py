"""`graft lower MODEL -o FILE`: lower a model with a backend, say what it took, and write it to a file for `load_lowered`.
The work is done by `torchgraft.lower`; MODEL and --input are read in `models.py`.
"""

from __future__ import annotations

import argparse

from torchgraft.cli.models import add_model_arguments, chosen_model
from torchgraft.cli.programs import add_output, needs_inputs, seconds_above_zero

NAME = "lower"
SUMMARY = "lower a model to the quickest runtime of this machine, or to one that you name, and write it to a file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--backend",
        default="auto",
        metavar="NAME",
        help="auto (the quickest of those installed), native, inductor, cudagraphs, openvino, onnxruntime, or one of your own",
    )
    parser.add_argument(
        "--precision", choices=("fp32", "tf32", "bf16", "fp16"), help="what to compute in (default: as the model)"
    )
    parser.add_argument("--choice", metavar="FILE", help="a file in which auto keeps what it measured, to use it again")
    parser.add_argument("--time-limit", type=seconds_above_zero, metavar="SECONDS", help="how long compiling may take")
    add_output(parser, "a file for the lowered module (default: only say what was taken)")


def run(arguments: argparse.Namespace) -> int:
    """Lower, and say what was done."""
    chosen = chosen_model(arguments)
    args, kwargs = needs_inputs(arguments, chosen, "a model is lowered for example inputs")

    import torchgraft

    module = torchgraft.lower(
        chosen.model,
        args,
        kwargs,
        backend=arguments.backend,
        precision=arguments.precision,
        choice=arguments.choice,
        time_limit=arguments.time_limit,
    )
    if module.choice is not None:
        module.choice.show()
    print(module.explain())
    if arguments.output:
        module.save(arguments.output)
        print(f"wrote {arguments.output}")
    return 0
