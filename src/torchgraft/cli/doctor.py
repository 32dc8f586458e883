"""`graft doctor MODEL`: capture a model, verify the program, and say what to know about it, with file, line and remedy.
The work is done by `torchgraft.recording.doctor`; MODEL and --input are read in `models.py`.
"""

from __future__ import annotations

import argparse
import json

from torchgraft.cli.models import add_model_arguments, chosen_model

NAME = "doctor"
SUMMARY = "capture a model, verify the program, and list what was fixed, kept whole or cannot be traced"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_model_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; fails if the model could not be captured, or the program is not right."""
    chosen = chosen_model(arguments)

    from torchgraft.recording.doctor import doctor

    has_inputs = chosen.args is not None or chosen.kwargs
    diagnosis = doctor(chosen.model, chosen.args or (), chosen.kwargs) if has_inputs else doctor(chosen.model)
    print(json.dumps(diagnosis.to_dict(), indent=2) if arguments.json else diagnosis)
    return 0 if diagnosis.ok else 1
