"""The instructions of a function, read once, and quick looks that spare reading them: most functions have none of what is
asked for. What is concluded from them is decided by those who ask.
"""

from __future__ import annotations

import dis
from types import CodeType
from typing import NamedTuple

from torchgraft.ir.origin import asked_once

_EXTENDED = dis.opmap["EXTENDED_ARG"]
_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
_READING = frozenset({_LOAD_GLOBAL, dis.opmap["LOAD_NAME"]})
_ON_GLOBALS = _READING | {dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]}


@asked_once
def instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    """The instructions of a function, without those that only keep room."""
    return tuple([item for item in dis.get_instructions(code) if item.opname != "CACHE"])


def may_contain(code: CodeType, operation: str) -> bool:
    """False if there is no such operation in a function; the functions inside it are not looked at.

    >>> may_contain((lambda x: x is True).__code__, "IS_OP"), may_contain((lambda x: x + 1).__code__, "IS_OP")
    (True, False)
    """
    return dis.opmap[operation] in code.co_code[::2]


class GlobalName(NamedTuple):
    """A global variable that a function mentions, and where."""

    name: str
    is_assigned: bool
    offset: int


def global_names(code: CodeType) -> list[GlobalName]:
    """The global variables in a function, in order; the functions inside it are not looked at.

    >>> [item.name for item in global_names((lambda x: len(x) + abs(x[0])).__code__)]
    ['len', 'abs']
    """
    found, raw, names, high = [], code.co_code, code.co_names, 0
    for offset in range(0, len(raw), 2):
        operation = raw[offset]
        if operation == _EXTENDED:
            high = (high | raw[offset + 1]) << 8
            continue
        if operation in _ON_GLOBALS:
            number = high | raw[offset + 1]
            # The lowest bit of LOAD_GLOBAL says whether a call follows.
            name = names[number >> 1] if operation == _LOAD_GLOBAL else names[number]
            found.append(GlobalName(name, operation not in _READING, offset))
        high = 0
    return found
