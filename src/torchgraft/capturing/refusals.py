"""Errors that end a symbolic trace although we did not raise them, and errors of ours that the model caught.
What is refused on purpose, and in what words, is said where it is noticed.
"""

from __future__ import annotations

import dis
import os
import re
import sysconfig
from types import TracebackType

from torchgraft.errors import GraftError, TraceError
from torchgraft.ir.origin import SourceLine, is_user_code, line_of_error

# How torch, Python and other libraries call proxies.
_PROXIES = re.compile(r"\b(Parameter)?Proxy\b|\bTrainingFlag\b|torchgraft\.capturing|\b(not|type|of) '?Attribute\b")


# What helps against every refusal.
LEAF = "keep the surrounding module or function as a leaf (Tracer.is_leaf_module, torchgraft.wrap)"

# How Python says that a function was called with too few or too many arguments.
_ARGUMENTS = re.compile(r"positional argument|keyword argument|multiple values for|takes no arguments")
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep


class ConversionError(TraceError, TypeError):
    """A traced value was to become a number, or something else that it is not (torch.fx raises TypeError)."""


class UnsupportedArgument(TraceError, NotImplementedError):
    """A value that cannot be an argument of a node (torch.fx raises NotImplementedError)."""


def in_lines(what: str, line: SourceLine | None, *rest: str) -> str:
    """The text of an error: what happened on one line; where, and what to do, each on a line of its own.

    >>> print(in_lines("cannot trace shuffle()", None, "use torch.randperm"))
    cannot trace shuffle()
      use torch.randperm
    """
    where = [] if line is None else [f"at {line}"]
    return "\n  ".join([what, *where, *filter(None, rest)])


def refusal_of(error: Exception) -> TraceError | None:
    """What to raise for an error of torch or Python that complains about a proxy; None for any other error."""
    if isinstance(error, GraftError) or is_raised_by_user(error):
        return None
    # A library that is given something of the wrong type seldom says what it was.
    is_about_types = isinstance(error, TypeError) and not _ARGUMENTS.search(str(error))
    if not is_about_types and not _PROXIES.search(str(error)):
        return None
    line = line_of_error(error)
    kind = (
        ConversionError
        if isinstance(error, TypeError)
        else UnsupportedArgument
        if isinstance(error, NotImplementedError)
        else TraceError
    )
    return kind(
        in_lines(
            "cannot trace a call that does not take a proxy",
            line,
            f"it raised {type(error).__name__}: {error}",
            f"use tensor operations, fix the value with concrete_args, {LEAF}, or use torchgraft.capture(model, args)",
        )
    )


def was_caught_by_user(error: BaseException) -> bool:
    """Whether an error came as far as the user's code. C code that clears one leaves no trace of that."""
    return any(is_user_code(entry.tb_frame.f_code) for entry in _entries(error))


def _entries(error: BaseException) -> list[TracebackType]:
    entries, entry = [], error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    return entries


def is_raised_by_user(error: BaseException) -> bool:
    """Whether a `raise` of the user's own made the error, and not torch or a built-in function."""
    entries = _entries(error)
    if not entries or not is_user_code(entries[-1].tb_frame.f_code):
        return False
    if entries[-1].tb_frame.f_code.co_filename.startswith(_STANDARD_LIBRARY):
        return False
    return dis.opname[entries[-1].tb_frame.f_code.co_code[entries[-1].tb_lasti]] == "RAISE_VARARGS"
