"""`graft capture MODEL`: capture a program, say what is in it, and keep it as a file or as a Python package.
The work is done by `torchgraft.capture`; what is in a program is shown by `graft show`.
"""

from __future__ import annotations

import argparse
import time

from torchgraft.cli.models import add_model_arguments, chosen_model
from torchgraft.cli.programs import add_json, add_level, add_output, captured, json_text

NAME = "capture"
SUMMARY = "capture a program, say what is in it, and keep it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_model_arguments(parser)
    add_level(parser)
    add_output(parser, "where to keep the program: a .pt file for torch.load, or else a folder that Python can import")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print what was captured."""
    chosen = chosen_model(arguments)
    started = time.perf_counter()
    program = captured(arguments, chosen)
    seconds = time.perf_counter() - started

    from torchgraft.recording.doctor import specialised
    from torchgraft.reporting.levels import counts_of
    from torchgraft.results.tables import seconds_text

    counts = counts_of(program)
    guards = [f"{finding.what} at {finding.where}" for finding in specialised(program)]
    kept = program.meta.get("kept_whole", {})
    if arguments.output is not None:
        _keep(program, arguments.output)
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
        f"{chosen.name}: {counts.nodes} nodes, {counts.calls} calls of {counts.different_calls} kinds, {seconds_text(seconds)}"
    )
    for call, count in counts.by_call.items():
        print(f"{count:>6}  {call}")
    for guard in guards:
        print(f"checked on every run: {guard}")
    for path, reason in kept.items():
        print(f"kept whole: {path or 'the model'}, because {reason}")
    if arguments.output is not None:
        print(f"written: {arguments.output}")
    return 0


def _keep(program: object, place: str) -> None:
    if place.endswith(".pt"):
        import torch

        from torchgraft.results.files import whole_file

        with whole_file(place) as file:
            torch.save(program, file)
    else:
        program.to_folder(place, "Program")  # type: ignore[attr-defined]
