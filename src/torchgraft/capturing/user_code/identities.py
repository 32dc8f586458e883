"""Comparisons of two variables by identity (`query is key`), which Python makes without asking the values, in the bytecode of
functions that ran. What follows from one is decided by those who ask.
"""

from __future__ import annotations

from types import CodeType

from torchgraft.ir.bytecode import instructions, may_contain
from torchgraft.ir.origin import SourceLine, asked_once, source_line

_NO_LOADS = frozenset({"PUSH_NULL", "PRECALL"})
_LOADS = frozenset({"LOAD_FAST", "LOAD_DEREF", "LOAD_FAST_BORROW"})
_TWO_LOADS = frozenset({"LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"})


def compares_variables(code: CodeType) -> bool:
    """Whether a function asks if two of its variables are the same object: tensors that it was given, perhaps."""
    return _first_comparison(code) is not None


def line_of_comparison(code: CodeType) -> SourceLine | None:
    """Where a function asks that first."""
    offset = _first_comparison(code)
    return None if offset is None else source_line(code, offset)


@asked_once
def _first_comparison(code: CodeType) -> int | None:
    if not may_contain(code, "IS_OP"):
        return None
    listing = [item for item in instructions(code) if item.opname not in _NO_LOADS]
    for place, item in enumerate(listing):
        names = [before.opname for before in listing[max(place - 2, 0) : place]]
        if item.opname == "IS_OP" and (names[-1] in _TWO_LOADS or _LOADS.issuperset(names)):
            return item.offset
    return None
