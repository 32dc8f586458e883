"""What commands that look at a program share: --level, -o, --json, capturing at a level, and where the result goes.
What the commands show is in their own files; MODEL and --input are read in `models.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from torchgraft.cli.input_options import advice
from torchgraft.cli.models import ChosenModel, add_model_arguments, chosen_model, wrong_usage
from torchgraft.results.files import refuse_unwritable

if TYPE_CHECKING:
    from torchgraft.codegen.graph_module import GraphModule


LEVELS = ("symbolic", "module", "function", "aten", "core_aten", "joint")


def add_level(parser: argparse.ArgumentParser) -> None:
    """--level, for programs."""
    parser.add_argument(
        "--level",
        choices=LEVELS,
        help="symbolic (captured without inputs), module, function, aten, core_aten, or joint (forward and backward) "
        "(default: module where inputs are known, symbolic where not; a .pt2 file as it is)",
    )


def add_output(parser: argparse.ArgumentParser, what: str, required: bool = False) -> None:
    """-o, for where to write."""
    parser.add_argument("-o", "--output", metavar="PATH", required=required, help=what)
    parser.set_defaults(refuse_output=refuse_unwritable)  # before the work, not after


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json, for machines."""
    parser.add_argument("--json", action="store_true", help="as JSON")


def positive_or_zero(text: str) -> int:
    """A depth from the command line."""
    return whole_number(text, 0)


def positive(text: str) -> int:
    """A count from the command line."""
    return whole_number(text, 1)


def counts(text: str) -> tuple[int, ...]:
    """Several of them, with commas."""
    return tuple(positive(item.strip()) for item in text.split(","))


def whole_number(text: str, smallest: int) -> int:
    """A number from the command line that is not smaller than one; argparse says the rest in its one line."""
    if not text.isdecimal() or int(text) < smallest:
        raise argparse.ArgumentTypeError(f"give a whole number, {smallest} or more, not '{text}'")
    return int(text)


def seconds_above_zero(text: str) -> float:
    """A time from the command line."""
    return number_above_zero(text, "seconds above 0")


def number_above_zero(text: str, what: str = "a positive number") -> float:
    """A number from the command line that is more than nothing, and finite."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"give {what}, not '{text}'")
    return value


def needs_inputs(
    arguments: argparse.Namespace, chosen: ChosenModel, why: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a model; without any the command ends, because it cannot be guessed what the model takes."""
    if not chosen.has_inputs:
        wrong_usage(arguments, f"{why}, and the inputs of {chosen.name} are not known\n{advice(chosen.model)}")
    return chosen.args or (), chosen.kwargs


def captured(arguments: argparse.Namespace, chosen: ChosenModel, level: str | None = None) -> GraphModule:
    """The program of a model at the level asked for."""
    import torchgraft

    level = level or getattr(arguments, "level", None)
    if level is None and isinstance(chosen.model, torchgraft.GraphModule):
        return chosen.model
    if level == "symbolic":
        return torchgraft.symbolic_trace(chosen.model)
    if level is None and not chosen.has_inputs:
        try:
            return torchgraft.symbolic_trace(chosen.model)
        except torchgraft.TraceError as error:
            remedy = f"or {advice(chosen.model)}, and the model is captured by running it"
            raise torchgraft.TraceError(f"{error}\n{remedy}") from error
    args, kwargs = needs_inputs(arguments, chosen, f"level {level} captures by running the model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its own calls
        return torchgraft.capture(chosen.model, args, kwargs, level=level or "module")


def pipeline_of(arguments: argparse.Namespace) -> Any:
    """The passes that the command line names; a text that names none is wrong usage."""
    from torchgraft.errors import PassError
    from torchgraft.passes import Pipeline

    try:
        return Pipeline(arguments.passes)
    except PassError as error:
        wrong_usage(arguments, error)


def with_shapes(program: GraphModule, chosen: ChosenModel) -> GraphModule:
    """The program with the shape of every value noted, where the inputs are known."""
    from torchgraft.passes.propagate_shapes import note_shapes

    if chosen.has_inputs and not any("val" in node.meta for node in program.graph.nodes):
        with contextlib.suppress(Exception):  # shapes are an addition
            note_shapes(program, chosen.args or (), chosen.kwargs)
    return program


def captured_with_shapes(arguments: argparse.Namespace) -> tuple[ChosenModel, GraphModule]:
    """The model of a command at a level, and its program with shapes."""
    chosen = chosen_model(arguments, computes=arguments.level != "symbolic")  # a symbolic trace does not run the model
    return chosen, with_shapes(captured(arguments, chosen), chosen)


def colours_wanted() -> bool:
    """Whether standard output is a terminal, and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def put_out(arguments: argparse.Namespace, text: str) -> None:
    """Print a text, or write it to the file that -o names and say so."""
    if arguments.output is None:
        print(text)
        return
    from torchgraft.results.files import write_text

    write_text(arguments.output, text.rstrip("\n") + "\n")
    print(f"written: {arguments.output}")


_OTHER_FILES = ("png", "jpg", "jpeg", "gif", "webp", "pdf", "csv", "xlsx", "toml")  # in which text would not be found


def refuse_other_files(arguments: argparse.Namespace) -> None:
    """Raise if the file that -o names is of a kind that is not written."""
    suffix = (arguments.output or "").rpartition(".")[2].lower()
    if suffix in _OTHER_FILES:
        wrong_usage(arguments, f"a .{suffix} file cannot be written\ngive an .svg, .html or .json file, or a .txt file")


def show_result(arguments: argparse.Namespace, result: Any) -> None:
    """Show a result on standard output, or print it as JSON."""
    if arguments.json:
        print(result.to_json())
    else:
        result.show()


def put_out_result(arguments: argparse.Namespace, result: Any) -> None:
    """Show a result as a table or as JSON, or write it to the file that -o names, in the form that its ending says."""
    suffix = (arguments.output or "").rpartition(".")[2].lower()
    if suffix == "svg" and hasattr(result, "svg"):
        put_out(arguments, result.svg())
    elif suffix == "html":
        put_out(arguments, result.to_html())
    elif arguments.json or suffix == "json":
        put_out(arguments, result.to_json())
    elif arguments.output is not None:
        put_out(arguments, str(result))
    else:
        result.show()


def json_text(value: Any) -> str:
    """Plain values as JSON."""
    from torchgraft.results.shown import plain

    return json.dumps(plain(value), indent=1)


# ---- two programs ----


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, OTHER, --level, --against and --passes."""
    add_model_arguments(parser)
    parser.add_argument("other", metavar="OTHER", nargs="?", help="another model, in the same forms")
    add_level(parser)
    parser.add_argument("--against", choices=LEVELS, help="the level of the other program")
    parser.add_argument("--passes", metavar="PASSES", help='passes to run on the other, such as "fuse-conv-norm"')


def chosen_pair(
    arguments: argparse.Namespace,
) -> tuple[tuple[ChosenModel, GraphModule], tuple[ChosenModel, GraphModule]]:
    """The model and its program, and the other model, which may be the same, with its program."""
    if arguments.other is None and arguments.against is None and arguments.passes is None:
        wrong_usage(
            arguments, "there is nothing to compare with\nname another model, or use --against LEVEL or --passes PASSES"
        )
    pipeline = None if arguments.passes is None else pipeline_of(arguments)
    chosen = chosen_model(arguments)
    other = chosen if arguments.other is None else chosen_model(arguments, arguments.other)
    first = captured(arguments, chosen)
    second = captured(arguments, other, arguments.against)
    if pipeline is not None:
        from torchgraft.passes import Pipeline

        # Passes may change the modules that a program shares with the model, and so with the first program.
        second = copy.deepcopy(second)
        args = tuple(other.args or ())
        Pipeline([edit.with_example(args) for edit in pipeline.passes] if args else pipeline.passes)(second)
    return (chosen, first), (other, second)
