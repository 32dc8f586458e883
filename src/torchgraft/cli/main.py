"""The entry point of `graft`: reads the command line, runs one command, turns errors into a few lines and an exit code.
Exit codes are 0 for success, 1 for a command that failed and 2 for a command line that makes no sense.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from torchgraft.cli.progress import progress_line
from torchgraft.errors import GraftError
from torchgraft.version import __version__

if TYPE_CHECKING:
    from torchgraft.ir.origin import SourceLine

# In the order in which the help lists them; each is a file of this folder.
_FILES = (
    *(
        "capture",
        "show",
        "summary",
        "draw",
        "calls",
        "record",
        "compare",
        "graph",
        "diff",
        "doctor",
        "report",
        "run_passes",
    ),
    *("lower", "bench", "simulate", "calibrate", "quantize", "pipeline", "list_models", "demo"),
)
COMMANDS: tuple[Any, ...] = tuple([importlib.import_module(f"torchgraft.cli.{name}") for name in _FILES])

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130  # what shells report for a program ended by Ctrl-C


class OneLineParser(argparse.ArgumentParser):
    """A parser that answers a mistake with one line, not with the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    anywhere = OneLineParser(add_help=False)
    # Without SUPPRESS the command's own parser would set the flag given before the command back to False.
    anywhere.add_argument(
        "--traceback", action="store_true", default=argparse.SUPPRESS, help="show where an error came from"
    )
    parser = OneLineParser(
        prog="graft",
        description="Capture PyTorch programs as graphs, see what is inside them, change them and run the result.",
        parents=[anywhere],
    )
    parser.add_argument("--version", action="version", version=f"torchgraft {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = commands.add_parser(
            command.NAME, help=command.SUMMARY, description=command.SUMMARY, parents=[anywhere]
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, prog=subparser.prog)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the result is the exit code."""
    exit_code = _run(argv)
    backends: Any = sys.modules.get("torchgraft.backends.parts")
    # A thread that took too long and comes back while Python ends would abort the process.
    if argv is None and backends is not None and backends.is_work_left_behind():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code


def _run(argv: Sequence[str] | None) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        refuse = getattr(arguments, "refuse_output", None)
        if refuse is not None and arguments.output is not None:
            refuse(arguments.output)
        with progress_line():
            exit_code: int = arguments.run(arguments)
        sys.stdout.flush()
        return exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has left; stdout must not be flushed again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if getattr(arguments, "traceback", False):
            raise
        print(f"{arguments.prog}: {_explain(error)}", file=sys.stderr)
        return FAILED


def _explain(error: Exception) -> str:
    """What happened on the first line; where, and what to do, on lines below it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, GraftError | OSError):
        return "\n  ".join(lines)
    what = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    line = _model_line(error)
    found = [f"unexpected {what}"] if line is None else [f"the code of the model raised {what}", f"at {line}"]
    return "\n  ".join([*found, "run again with --traceback to see more"])


def _model_line(error: Exception) -> SourceLine | None:
    """The line of the model that raised; where torch was not needed yet, no model ran."""
    if "torch" not in sys.modules:
        return None
    from torchgraft.ir.origin import line_of_error

    return line_of_error(error)
