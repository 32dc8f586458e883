"""`graft quantize MODEL --data FILE.py:NAME -o FILE.pt`: make a program of integers, keep it, and say what became of each layer.
The work is done by `torchgraft.quantize`.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from torchgraft.cli.capture import add_place, keep
from torchgraft.cli.models import add_model_arguments, chosen_model, load_object, wrong_usage
from torchgraft.cli.programs import add_json, json_text
from torchgraft.errors import GraftError

NAME = "quantize"
SUMMARY = "make a program of integers, keep it, and say what became of each layer"
BACKENDS = ("native", "reference", "onnxruntime", "openvino", "cuda")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--data",
        metavar="FILE.py:NAME",
        help="calibration data: an iterable of batches, or a function that returns one (default: the inputs of the model)",
    )
    parser.add_argument("--batches", type=int, default=32, metavar="N", help="how many batches are used (default 32)")
    parser.add_argument(
        "--config", metavar="FILE.toml", help="a TOML file, or the name of a scheme such as dynamic-int8"
    )
    parser.add_argument(
        "--backend", choices=BACKENDS, default="native", help="what the program is for (default: native)"
    )
    add_place(parser)
    parser.add_argument("--html", metavar="FILE", help="also write the report as a page")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the report."""
    chosen = chosen_model(arguments)

    from torchgraft.quantize import calibrate, prepare, report
    from torchgraft.quantize.calibrating import inputs_of
    from torchgraft.quantize.flow import finish

    data = _batches(arguments, chosen)
    args, kwargs = inputs_of(data[0])
    prepared = prepare(chosen.model, args, kwargs, config=arguments.config, backend=arguments.backend)
    calibrate(prepared, data)
    program = finish(prepared, arguments.backend)
    found = report(prepared, data)
    if arguments.output is not None:
        keep(program, arguments.output)
    if arguments.html is not None:
        found.to_html(arguments.html)
    if arguments.json:
        print(json_text({"model": chosen.name, "output": arguments.output, **found.to_dict()}))
        return 0
    print(found)
    for place in (arguments.output, arguments.html):
        if place is not None:
            print(f"written: {place}")
    return 0


def _batches(arguments: argparse.Namespace, chosen: Any) -> list[Any]:
    """The batches of --data, or the one that is known for the model."""
    from torchgraft.quantize.calibrating import batches

    if arguments.batches < 1:
        wrong_usage(arguments, f"cannot calibrate with {arguments.batches} batches\ngive --batches 1 or more")
    if arguments.data is None:
        if not chosen.has_inputs:
            wrong_usage(
                arguments, "quantizing needs data, and none is known for this model\ngive it with --data FILE.py:NAME"
            )
        return [chosen.kwargs or chosen.args]
    try:
        value = load_object(arguments.data)
    except GraftError as error:
        wrong_usage(arguments, error)
    given = value() if callable(value) else value
    try:
        found = list(itertools.islice(batches(given), arguments.batches))
    except GraftError as error:
        wrong_usage(arguments, f"{arguments.data}: {error}")
    if not found:
        wrong_usage(arguments, f"{arguments.data} has no batches")
    return found
