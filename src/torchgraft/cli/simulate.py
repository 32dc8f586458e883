"""`graft simulate MODEL`: how long a model takes on machines that need not be here, how much memory, and what if.
The work is done by `torchgraft.simulate` and `torchgraft.what_if`; MODEL and --input are read in `models.py`.
"""

from __future__ import annotations

import argparse
from typing import Any

from torchgraft.cli.models import ChosenModel, add_model_arguments, chosen_model, wrong_usage
from torchgraft.cli.programs import (
    add_json,
    add_output,
    counts,
    needs_inputs,
    number_above_zero,
    put_out_result,
    refuse_other_files,
)
from torchgraft.errors import GraftError
from torchgraft.results.files import refuse_unwritable

NAME = "simulate"
SUMMARY = "simulate a model on machines that need not be here: time, memory, what bounds it, what if"
CHANGES = ("bandwidth", "compute", "host", "passes", "quantize")
MODES = ("eager", "graph", "lowered")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--machine",
        type=_names,
        default=("h200",),
        metavar="NAMES",
        help="machines that come with torchgraft, or .toml files, with commas (default: h200)",
    )
    parser.add_argument("--batch", type=counts, metavar="SIZES", help="with commas (default: that of the inputs)")
    parser.add_argument(
        "--precision",
        type=_names,
        metavar="NAMES",
        help="some of fp64, fp32, tf32, bf16, fp16, with commas (default: that of the model)",
    )
    parser.add_argument(
        "--mode",
        type=_modes,
        default=("eager",),
        metavar="NAMES",
        help="eager (wall time), graph (the device alone) or lowered, with commas (default: eager)",
    )
    parser.add_argument("--training", action="store_true", help="a training step: forward and backward (sets --train)")
    parser.add_argument("--optimizer", metavar="NAME", help="of torch.optim, such as AdamW: the step updates, too")
    parser.add_argument(
        "--what-if",
        type=_change,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="bandwidth=2, compute=2 or host=2 (so many times as fast), passes=fuse-conv-norm, quantize=static-int8; "
        "once for each",
    )
    parser.add_argument(
        "--price",
        type=_price,
        metavar="PRICES",
        help="an hour: one number, or h200=3.5,a100=2: adds what a million examples cost",
    )
    parser.add_argument("--trace", metavar="FILE", help="also write the timeline, for Perfetto (one case only)")
    add_output(parser, "an .svg, .html or .json file, or one for the text (default: print it)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print one simulation, or a table where there are several cases."""
    _refuse_mixtures(arguments)
    _check(arguments)
    optimizer = _optimizer(arguments)
    if arguments.training or arguments.optimizer:
        arguments.train = True
    chosen = chosen_model(arguments, computes=False)
    args, kwargs = needs_inputs(arguments, chosen, "a model is simulated on example inputs")
    show = _table if _is_table(arguments) else _one
    result = show(arguments, chosen, args, kwargs, optimizer)
    put_out_result(arguments, result)
    return 0


def _is_table(arguments: argparse.Namespace) -> bool:
    several = [arguments.machine, arguments.mode, arguments.batch or (), arguments.precision or ()]
    return any(len(values) > 1 for values in several) or bool(arguments.what_if) or arguments.price is not None


def _refuse_mixtures(arguments: argparse.Namespace) -> None:
    if (arguments.output or "").lower().endswith(".svg") and not _is_table(arguments):
        wrong_usage(arguments, "a plot is of several cases\nname several batches or machines, or use --what-if")
    if arguments.trace is not None and _is_table(arguments):
        wrong_usage(
            arguments, "a timeline is of one case\nname one machine, batch, precision and mode, and no --what-if"
        )
    if arguments.trace is not None:
        refuse_unwritable(arguments.trace)
    refuse_other_files(arguments)
    names = [name for name, _ in arguments.what_if]
    for name in names:
        if names.count(name) > 1:
            wrong_usage(arguments, f"--what-if {name} is given twice\ngive it once")


def _one(arguments: argparse.Namespace, chosen: ChosenModel, args: Any, kwargs: Any, optimizer: Any) -> Any:
    from torchgraft.analysis.simulate import simulate
    from torchgraft.codegen.calling import of_batch

    if arguments.batch:
        args, kwargs = of_batch(args, kwargs, arguments.batch[0])
    options = {"precision": (arguments.precision or (None,))[0], "mode": arguments.mode[0], "optimizer": optimizer}
    machine = arguments.machine[0]
    result = simulate(chosen.model, args, kwargs, machine=machine, training=arguments.training, **options)
    if arguments.trace is not None:
        result.to_chrome_trace(arguments.trace)
    return result


def _table(arguments: argparse.Namespace, chosen: ChosenModel, args: Any, kwargs: Any, optimizer: Any) -> Any:
    from torchgraft.analysis.simulate import what_if

    return what_if(
        chosen.model,
        args,
        kwargs,
        machine=arguments.machine,
        batch=arguments.batch,
        precision=arguments.precision,
        mode=arguments.mode,
        training=arguments.training,
        optimizer=optimizer,
        price_per_hour=arguments.price,
        **dict(arguments.what_if),
    )


def _optimizer(arguments: argparse.Namespace) -> Any:
    if arguments.optimizer is None:
        return None
    import torch

    found = getattr(torch.optim, arguments.optimizer, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        wrong_usage(arguments, f"torch.optim has no optimizer {arguments.optimizer!r}\nname one such as AdamW or SGD")
    return found


def _check(arguments: argparse.Namespace) -> None:
    """Machines, precisions, passes and schemes that do not exist are wrong usage, said before the model is made."""
    from torchgraft.analysis.simulate.changes import changes_of
    from torchgraft.analysis.simulate.kernels import DTYPES
    from torchgraft.analysis.simulate.machine import Machine

    options = dict(arguments.what_if)
    try:
        for name in arguments.machine:
            Machine.named(name)
        changes_of({}, options.get("passes"), options.get("quantize"))
    except GraftError as error:
        wrong_usage(arguments, error)
    for name in arguments.precision or ():
        if name not in DTYPES:
            wrong_usage(arguments, f"there is no precision {name!r}\nchoose one of {', '.join(DTYPES)}")
    for name in arguments.price if isinstance(arguments.price, dict) else ():
        if name not in arguments.machine:
            wrong_usage(arguments, f"there is a price for {name!r}, which is not simulated\nname it with --machine")


# ---- texts of options ----


def _names(text: str) -> tuple[str, ...]:
    names = tuple(item.strip() for item in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"give names with commas, not '{text}'")
    return names


def _modes(text: str) -> tuple[str, ...]:
    for name in _names(text):
        if name not in MODES:
            raise argparse.ArgumentTypeError(f"there is no mode '{name}' (choose from {', '.join(MODES)})")
    return _names(text)


def _change(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if name not in CHANGES or not equals or not value:
        raise argparse.ArgumentTypeError(f"give NAME=VALUE with one of {', '.join(CHANGES)}, not '{text}'")
    return (name, value) if name in ("passes", "quantize") else (name, number_above_zero(value))


def _price(text: str) -> float | dict[str, float]:
    if "=" not in text:
        return number_above_zero(text)
    found = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        found[name.strip()] = number_above_zero(value)
    return found
