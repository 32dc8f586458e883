"""The instructions of a function, read once, and quick looks that spare reading them: most functions have none of what is
asked for. What is concluded from them is decided by those who ask.
"""

from __future__ import annotations

import dis
from types import CodeType

from torchgraft.ir.origin import asked_once


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


def unpacked_length(code: CodeType | None, instruction: int) -> int | None:
    """How many names the running instruction unpacks into, or None where it does something else."""
    if code is None:
        return None
    raw = code.co_code
    if dis.opname[raw[instruction]] != "UNPACK_SEQUENCE":
        return None
    length, position, shift = raw[instruction + 1], instruction - 2, 8
    while position >= 0 and dis.opname[raw[position]] == "EXTENDED_ARG":
        length |= raw[position + 1] << shift
        position, shift = position - 2, shift + 8
    return length


def is_assertion(code: CodeType | None, instruction: int) -> bool:
    """Whether the running instruction is the test of an `assert`."""
    if code is None:
        return False
    rest = [item for item in dis.get_instructions(code) if item.offset >= instruction and item.opname != "CACHE"][:4]
    names = [item.opname for item in rest if item.opname not in ("COMPARE_OP", "TO_BOOL", "NOT_TAKEN", "UNARY_NOT")]
    return (
        len(names) > 1
        and "JUMP_IF_TRUE" in names[0].replace("FORWARD_", "")
        and (names[1] == "LOAD_ASSERTION_ERROR" or "AssertionError" in rest[-1].argrepr)
    )
