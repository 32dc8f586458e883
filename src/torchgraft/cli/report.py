"""`graft report MODEL -o DIR`: everything that can be seen of a model, as a folder with a page that opens from disk.
The work is done by `torchgraft.report`; here is its progress and the end of it on a terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torchgraft.cli.models import add_model_arguments, chosen_model
from torchgraft.cli.programs import add_json, json_text, needs_inputs

if TYPE_CHECKING:
    from torchgraft.reporting import Report

NAME = "report"
SUMMARY = "write a folder with a page about a model: programs at every level, drawings, calls, statistics"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_model_arguments(parser)
    parser.add_argument("-o", "--output", metavar="DIR", default="report", help="the folder (default: report)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the report, and say where the page is and what is most interesting in it; fails if the program is wrong."""
    chosen = chosen_model(arguments)
    args, kwargs = needs_inputs(arguments, chosen, "a report is made by running the model")

    from torchgraft.reporting import report

    started = time.perf_counter()
    with warnings.catch_warnings(), _progress() as say:
        warnings.simplefilter("ignore")  # about torch's own calls and what models do; failures are on the page
        made = report(chosen.model, args, kwargs, folder=arguments.output, name=chosen.name, progress=say)
    if arguments.json:
        facts = [{"headline": fact.headline, "text": fact.text} for fact in made.facts]
        failures = [failure._asdict() for failure in made.failures]
        print(json_text({"model": chosen.name, "page": str(made.page), "facts": facts, "failures": failures}))
    else:
        _say_end(chosen.name, made, time.perf_counter() - started)
    diagnosis = made.seen.diagnosis
    is_wrong = diagnosis is not None and diagnosis.program is not None and not diagnosis.ok
    return 1 if is_wrong else 0


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line that changes on a terminal; nothing where errors go to a file."""
    if not sys.stderr.isatty():
        yield lambda step: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("starting") as status:
        yield lambda step: status.update(step)


def _say_end(name: str, made: Report, seconds: float) -> None:
    """The facts, what is missing and where the page is: in columns and colours on a terminal, else a line each."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from torchgraft.reporting.facts import short

    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(f"The {len(made.facts)} most interesting facts about {name}", style="bold"))
    if console.is_terminal:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for place, fact in enumerate(made.facts, 1):
            table.add_row(f"{place}.", Text(fact.headline, style="cyan"), Text(fact.text))
        console.print(table, soft_wrap=False)
    else:
        for place, fact in enumerate(made.facts, 1):
            print(f"{place}. {fact.headline}: {fact.text}")
    for failure in made.failures:
        console.print(Text(f"unavailable: {failure.what}: {short(failure.reason)}", style="yellow"))
    console.print(Text(f"made in {seconds:.0f} s; open the page in a browser:"))
    console.print(Text(str(made.page.absolute()), style="bold"))
