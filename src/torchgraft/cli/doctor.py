"""`graft doctor MODEL`: capture a model, verify the program, and say what to know about it, with file, line and remedy.
The work is done by `torchgraft.recording.doctor`; MODEL and --input are read in `models.py`.
"""

from __future__ import annotations

import argparse

from torchgraft.cli.models import add_model_arguments, chosen_model
from torchgraft.cli.programs import add_json, add_output, put_out_result

NAME = "doctor"
SUMMARY = "capture a model, verify the program, and list what was fixed, kept whole or cannot be traced"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_output(parser, "a file for the diagnosis (default: print it)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; fails if the model could not be captured, or the program is not right."""
    chosen = chosen_model(arguments)

    from torchgraft.recording.doctor import doctor

    diagnosis = doctor(chosen.model, chosen.args or (), chosen.kwargs) if chosen.has_inputs else doctor(chosen.model)
    put_out_result(arguments, diagnosis)
    return 0 if diagnosis.ok else 1
