"""`graft pipeline MODEL --stages N`: cut a model into stages for several processes, simulate them, or run them here for a try.
The work is done by `torchgraft.distributed.pipeline`; MODEL and --input are read in `models.py`.
"""

from __future__ import annotations

import argparse
from typing import Any

from torchgraft.cli.models import add_model_arguments, chosen_model, wrong_usage
from torchgraft.cli.programs import add_json, add_output, needs_inputs, positive, put_out_result, refuse_other_files

NAME = "pipeline"
SUMMARY = "cut a model into the stages of a pipeline, simulate them on other machines, or run them here for a try"
SCHEDULES = ("gpipe", "1f1b", "interleaved")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--stages", type=positive, default=2, metavar="N", help="how many (default: 2)")
    parser.add_argument(
        "--cost",
        choices=("flops", "simulated", "measured"),
        default="flops",
        help="what is balanced (default: flops)",
    )
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="default: 1f1b")
    parser.add_argument("--microbatches", type=positive, default=8, metavar="N", help="of a batch (default: 8)")
    parser.add_argument(
        "--simulate", action="store_true", help="say how long a step would take, the bubble and the memory"
    )
    parser.add_argument(
        "--machine", default="h200", metavar="NAME", help="with --simulate: one for each stage (default: h200)"
    )
    parser.add_argument("--training", action="store_true", help="with --simulate: a training step (sets --train)")
    parser.add_argument(
        "--run", dest="try_it", action="store_true", help="start the processes here, and compare with one process"
    )
    add_output(
        parser,
        "an .svg of the timeline (with --simulate), an .html or .json file, or one for the text (default: print it)",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the stages, the simulation or the trial; 1 if a trial does not compute what one process does."""
    if arguments.simulate and arguments.try_it:
        wrong_usage(arguments, "--simulate and --run are two questions\ngive one of them")
    if (arguments.output or "").lower().endswith(".svg") and not arguments.simulate:
        wrong_usage(arguments, "a timeline is of a simulation\nadd --simulate")
    refuse_other_files(arguments)
    if arguments.training:
        arguments.train = True
    chosen = chosen_model(arguments, computes=arguments.try_it or arguments.cost == "measured")
    args, kwargs = needs_inputs(arguments, chosen, "a pipeline is cut for example inputs, those of one micro-batch")

    from torchgraft.distributed import pipeline, try_pipeline

    plan = pipeline(chosen.model, args, kwargs, stages=arguments.stages, cost=arguments.cost)
    result: Any = plan
    options = {"schedule": arguments.schedule, "microbatches": arguments.microbatches}
    if arguments.try_it:
        result = try_pipeline(plan, args, kwargs, processes=arguments.stages // _chunks(arguments), **options)
    elif arguments.simulate:
        result = _simulated(arguments, plan, args, kwargs, options)
    if result is not plan and not arguments.json:
        plan.show()
        print()
    if (arguments.output or "").lower().endswith(".svg"):
        result.show()
    put_out_result(arguments, result)
    return 1 if arguments.try_it and result.same is False else 0


def _simulated(arguments: argparse.Namespace, plan: Any, args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
    from torchgraft.analysis.simulate import simulate
    from torchgraft.codegen.calling import batch_of, of_batch

    args, kwargs = of_batch(args, kwargs, (batch_of(args, kwargs) or 1) * arguments.microbatches)
    chunks = _chunks(arguments)
    machines = [arguments.machine] * (arguments.stages // chunks)
    return simulate(plan.split, args, kwargs, machines=machines, training=arguments.training, chunks=chunks, **options)


def _chunks(arguments: argparse.Namespace) -> int:
    """How many stages each process has."""
    return 2 if arguments.schedule == "interleaved" and arguments.stages % 2 == 0 else 1
