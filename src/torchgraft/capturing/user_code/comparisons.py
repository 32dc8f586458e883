"""Comparisons that Python makes without asking the values: `x is None`, `x.dtype is torch.half`, `type(x) is int`.
A proxy cannot answer them, so they are found in the bytecode of the functions that run. What follows from one is decided by
those who ask.
"""

from __future__ import annotations

import dis
import os
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch

from torchgraft.ir.bytecode import instructions, may_contain
from torchgraft.ir.origin import asked_once, is_user_code

_NO_LOADS = frozenset({"PUSH_NULL", "PRECALL", "NOT_TAKEN"})
# Newer versions of Python have one instruction for a test for None.
_IDENTITY_TESTS = frozenset(
    number for name, number in dis.opmap.items() if name == "IS_OP" or ("JUMP" in name and "NONE" in name)
)
_TYPE_TESTS = frozenset({"IS_OP", "COMPARE_OP", "CONTAINS_OP"})
_TYPE_NAMES = frozenset(
    name for name in dir(torch) if isinstance(getattr(torch, name), (torch.dtype, torch.layout, torch.memory_format))
)
_LAYERS = os.path.dirname(torch.nn.__file__) + os.sep


class Operand(NamedTuple):
    """One side of a comparison: a constant, a variable or a global with the attributes read of it, or anything else."""

    kind: str  # "constant", "variable", "global" or "other"
    names: tuple[str, ...]
    value: Any
    instruction: dis.Instruction | None  # the one that leaves it on the stack


class Comparison(NamedTuple):
    """`left is right`, and where it is."""

    code: CodeType
    offset: int
    left: Operand
    right: Operand


@asked_once
def identity_comparisons(code: CodeType) -> tuple[Comparison, ...]:
    """Every comparison by identity in a function and the functions inside it.

    >>> [(item.left.names, item.right.value) for item in identity_comparisons((lambda x: x is True).__code__)]
    [(('x',), True)]
    """
    inside = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    own = () if _IDENTITY_TESTS.isdisjoint(code.co_code[::2]) else tuple(_own_comparisons(code))
    return (*own, *[item for inner in inside for item in identity_comparisons(inner)])


def _own_comparisons(code: CodeType) -> Iterator[Comparison]:
    listing = list(_loads(code))
    for place, item in enumerate(listing):
        if item.opname == "IS_OP":
            right, before = _operand(listing, place - 1)
            left, _ = _operand(listing, before)
        elif item.opcode in _IDENTITY_TESTS:
            left, right = _operand(listing, place - 1)[0], Operand("constant", (), None, None)
        else:
            continue
        yield Comparison(code, item.offset, left, right)


def _loads(code: CodeType) -> Iterator[dis.Instruction]:
    """The instructions of a function; one that loads two variables is two."""
    for item in instructions(code):
        if item.opname.startswith("LOAD_FAST") and isinstance(item.argval, tuple):
            for name in item.argval:
                yield item._replace(argval=name)
        elif item.opname not in _NO_LOADS:
            yield item


def _operand(listing: list[dis.Instruction], place: int) -> tuple[Operand, int]:
    """What the instruction at a place leaves on the stack, and the place before everything that loads it."""
    if place < 0:
        return Operand("other", (), None, None), -1
    last = listing[place]
    attributes: list[str] = []
    while place > 0 and listing[place].opname == "LOAD_ATTR":
        attributes.insert(0, str(listing[place].argval))
        place -= 1
    name, value = listing[place].opname, listing[place].argval
    if name.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")):
        kind = "global" if name in ("LOAD_GLOBAL", "LOAD_NAME") else "variable"
        return Operand(kind, (str(value), *attributes), None, last), place - 1
    if name == "LOAD_CONST" and not attributes:
        return Operand("constant", (), value, last), place - 1
    return Operand("other", tuple(attributes), None, last), -1


# ---- what is asked ----


def is_compared_with_none(code: CodeType | None, instruction: int) -> bool:
    """Whether what an instruction takes out of a container or an object is at once asked whether it is None."""
    return code is not None and instruction in _compared_with_none(code)


@asked_once
def _compared_with_none(code: CodeType) -> frozenset[int]:
    sides = [item.left for item in identity_comparisons(code) if item.code is code and _is_none(item.right)]
    return frozenset(
        side.instruction.offset
        for side in sides
        if side.instruction is not None and side.instruction.opname in ("LOAD_ATTR", "BINARY_SUBSCR", "BINARY_OP")
    )


def compared_with_none(code: CodeType, variable: str) -> int | None:
    """The instruction that asks whether a variable is None, if there is one."""
    found = [item for item in identity_comparisons(code) if item.left.names == (variable,) and _is_none(item.right)]
    return found[0].offset if found else None


@asked_once
def compared_variables(code: CodeType) -> int | None:
    """The instruction of a function that asks if two of its variables are the same object: tensors that it was given, perhaps."""
    if not may_contain(code, "IS_OP"):
        return None
    return next((offset for _, offset, *sides in _own_comparisons(code) if all(map(_is_variable, sides))), None)


@asked_once
def compares_variables(code: CodeType) -> bool:
    """Whether a function, or one inside it, asks that."""
    inside = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return compared_variables(code) is not None or any(map(compares_variables, inside))


@asked_once
def compares_with_bool(code: CodeType) -> bool:
    """Whether a function asks if something is True or False itself."""
    return any(
        type(side.value) is bool
        for comparison in identity_comparisons(code)
        for side in (comparison.left, comparison.right)
    )


@asked_once
def compares_element_types(code: CodeType) -> bool:
    """Whether a function compares a dtype or a layout by identity, as far as the names show."""
    return any(
        side.names and (side.names[-1] in _TYPE_NAMES or "dtype" in side.names[-1])
        for comparison in identity_comparisons(code)
        for side in (comparison.left, comparison.right)
        if not _is_none(comparison.right)
    )


@asked_once
def compared_types(code: CodeType) -> dict[str, int]:
    """The variables of which `type(variable)` is compared, and the instruction that asks for it. Only `self` is never traced."""
    found: dict[str, int] = {}
    listing = list(_loads(code)) if "type" in code.co_names else []
    for place, item in enumerate(listing[:-1]):
        if item.opname in ("LOAD_GLOBAL", "LOAD_NAME") and item.argval == "type":
            following = listing[place + 1 : place + 6]
            if following[0].argval != "self" and any(after.opname in _TYPE_TESTS for after in following[1:]):
                found[str(following[0].argval)] = item.offset
    return found


@asked_once
def may_be_given_dtypes(code: CodeType) -> bool:
    """Whether a function that reads a dtype may be given one that flows: the rest of torch compares by identity."""
    return is_user_code(code) or code.co_filename.startswith(_LAYERS)


@asked_once
def is_taken_apart(code: CodeType | None, instruction: int) -> bool:
    """Whether the instruction reads a device that is then compared or asked for its type, as far as one function shows."""
    listing = [] if code is None else list(_loads(code))
    place = next((place for place, item in enumerate(listing) if item.offset == instruction), None)
    if place is None or place + 1 >= len(listing):
        return False
    if _decides(listing, place):
        return True
    following = listing[place + 1]
    if not following.opname.startswith("STORE_"):
        return False
    loads = [
        index
        for index, item in enumerate(listing)
        if item.opname.startswith("LOAD_") and item.argval == following.argval
    ]
    return any(_decides(listing, index) for index in loads)


def _decides(listing: list[dis.Instruction], place: int) -> bool:
    following = listing[place + 1 : place + 3]
    if following and following[0].opname in ("LOAD_ATTR", "LOAD_METHOD") and following[0].argval in ("type", "index"):
        return True
    return any(item.opname in _TYPE_TESTS for item in following)


def _is_none(operand: Operand) -> bool:
    return operand.kind == "constant" and operand.value is None


def _is_variable(operand: Operand) -> bool:
    return operand.kind == "variable" and len(operand.names) == 1


def asks_nearby(question: Callable[[CodeType], bool], frame: FrameType) -> bool:
    """Whether a question holds of the function that runs in a frame, or of one of the user's that it calls by its name."""
    code, scope = frame.f_code, frame.f_globals
    if question(code):
        return True
    named = [scope.get(name) for name in code.co_names]
    return any(type(item) is FunctionType and is_user_code(item.__code__) and question(item.__code__) for item in named)
