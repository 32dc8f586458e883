"""`graft capture MODEL`: capture a program, say what is in it, and keep it as a file or as a Python package.
The work is done by `torchgraft.capture`; what is in a program is shown by `graft show`.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

from torchgraft.cli.models import add_model_arguments, chosen_model
from torchgraft.cli.programs import add_json, add_level, add_output, captured, json_text
from torchgraft.errors import GraphError, WriteError
from torchgraft.results.files import refuse_unwritable
from torchgraft.results.progress import stage

if TYPE_CHECKING:
    from torchgraft.codegen.graph_module import GraphModule

NAME = "capture"
SUMMARY = "capture a program, say what is in it, and keep it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_level(parser)
    add_place(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print what was captured."""
    chosen = chosen_model(arguments)
    started = time.perf_counter()
    program = captured(arguments, chosen)
    seconds = time.perf_counter() - started

    from torchgraft.recording.doctor import specialised
    from torchgraft.reporting.levels import counts_of
    from torchgraft.results.tables import count, seconds_text

    counts = counts_of(program)
    guards = [f"{finding.what} at {finding.where}" for finding in specialised(program)]
    kept = program.meta.get("kept_whole", {})
    written = None if arguments.output is None else keep(program, arguments.output)
    if arguments.json:
        found = {
            "nodes": counts.nodes,
            "calls": counts.by_call,
            "guards": guards,
            "kept_whole": kept,
            "seconds": seconds,
        }
        print(json_text({"model": chosen.name, "output": arguments.output, **found}))
        return 0
    print(
        f"{chosen.name}: {count(counts.nodes, 'node')}, {count(counts.calls, 'call')} of "
        f"{count(counts.different_calls, 'kind')}, {seconds_text(seconds)}"
    )
    for call, number in counts.by_call.items():
        print(f"{number:>6}  {call}")
    for guard in guards:
        print(f"checked on every run: {guard}")
    for path, reason in kept.items():
        print(f"kept whole: {path or 'the model'}, because {reason}")
    if written is not None:
        print(f"written: {written}")
    return 0


def add_place(parser: argparse.ArgumentParser) -> None:
    """-o, for where to keep a program."""
    add_output(parser, "where to keep the program: a .pt file for torch.load, or else a folder that Python can import")
    parser.set_defaults(refuse_output=refuse_place)


def refuse_place(place: str) -> None:
    """Raise where nothing can be written, before the work; files that are no program of an earlier capture are not touched."""
    if place.endswith(".pt"):
        refuse_unwritable(place)
    elif os.path.isdir(place) and os.listdir(place) and not os.path.isfile(os.path.join(place, "modules.pt")):
        raise WriteError(
            f"cannot write '{place}': it is a folder with other files in it\ngive the name of a new folder"
        )
    elif os.path.isfile(place):
        raise WriteError(f"cannot write '{place}': it is a file\ngive a .pt file or the name of a new folder")


def keep(program: GraphModule, place: str) -> str:
    """Write the program; says what was written and how it is read again."""
    if place.endswith(".pt"):
        import torch

        from torchgraft.results.files import whole_file

        with stage("writing"), whole_file(place) as file:
            torch.save(program, file)
        return place
    from torchgraft.results.files import named_errors

    name = type(program).__name__
    with stage("writing"), named_errors(place):
        try:
            program.to_folder(place, name)
        except GraphError:  # the code uses that name for something else
            name = f"{name}Program"
            program.to_folder(place, name)
    folder = os.path.basename(os.path.normpath(place))
    return f"{place} (from {folder} import {name})" if folder.isidentifier() else f"{place} (class {name})"
