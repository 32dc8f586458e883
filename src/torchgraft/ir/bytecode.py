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
