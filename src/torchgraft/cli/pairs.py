"""The two programs of `graft compare` and `graft diff`: two models, or one model at two levels or before and after passes.
What is done with them is in the files of the commands.
"""

from __future__ import annotations

import argparse
import copy
from typing import TYPE_CHECKING

from torchgraft.cli.models import ChosenModel, add_model_arguments, chosen_model, wrong_usage
from torchgraft.cli.programs import LEVELS, add_level, captured, pipeline_of

if TYPE_CHECKING:
    from torchgraft.codegen.graph_module import GraphModule


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
