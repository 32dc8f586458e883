"""`mode is True`, `dtype is torch.half`: what stands in for a mode or a dtype during a watched run is another object, and Python
lets nobody answer for it. So functions that compare by identity run again with code that calls ours.
"""

from __future__ import annotations

import ast
import dis
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, ClassVar, NamedTuple

import torch

from torchgraft.capturing.active import CodePatch
from torchgraft.capturing.changed_code import Change, changed_patch
from torchgraft.capturing.dtypes import FlowingDtype
from torchgraft.capturing.mentions import codes_in
from torchgraft.capturing.module_patches import TrainingFlag
from torchgraft.ir.bytecode import instructions, may_contain
from torchgraft.ir.origin import SourceLine, asked_once, source_line

_SAME = "torchgraft's is"
_DTYPES = frozenset(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))


def same(one: Any, other: Any) -> bool:
    """`one is other`, of what the two stand for."""
    if type(one) is FlowingDtype:
        return one == other
    return other == one if type(other) is FlowingDtype else _plain(one) is _plain(other)


def _plain(value: Any) -> Any:
    return bool(value) if type(value) is TrainingFlag else value


class Identities(Change):
    """Turns `A is B` into a call of ours."""

    places: ClassVar[dict[str, Callable[..., Any]]] = {_SAME: same}

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """A comparison; one with None is as good as it is."""
        self.generic_visit(node)
        is_identity = len(node.ops) == 1 and isinstance(node.ops[0], (ast.Is, ast.IsNot))
        if not self.is_within or not is_identity or _is_none(node.comparators[0]) or _is_none(node.left):
            return node
        self.found = True
        place = ast.copy_location(ast.Constant(_SAME), node)
        call = ast.copy_location(ast.Call(place, [node.left, node.comparators[0]], []), node)
        return call if isinstance(node.ops[0], ast.Is) else ast.copy_location(ast.UnaryOp(ast.Not(), call), node)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


@asked_once
def compares_identity(code: CodeType) -> bool:
    """Whether a function compares by identity what may be a mode or a dtype, as far as names and constants show."""
    return any(_is_of_bool(item) or _is_named_as_one(item) for item in _comparisons(code))


@asked_once
def compares_with_bool(code: CodeType) -> bool:
    """Whether a function asks if something is True or False itself."""
    return any(map(_is_of_bool, _comparisons(code)))


@asked_once
def compares_variables(code: CodeType) -> bool:
    """Whether a function asks if two of its variables are the same object: tensors that it was given, perhaps."""
    return any(map(_is_of_variables, _comparisons(code)))


def line_of_comparison(code: CodeType) -> SourceLine | None:
    """Where a function asks that first."""
    return next((source_line(item.code, item.offset) for item in _comparisons(code) if _is_of_variables(item)), None)


class _Comparison(NamedTuple):
    """An `A is B`: where it is, and the two instructions before it, which load A and B where those are names or constants."""

    code: CodeType
    offset: int
    first: dis.Instruction
    last: dis.Instruction


def _comparisons(code: CodeType) -> Iterator[_Comparison]:
    """All in a function and the functions inside it."""
    for current in codes_in(code):
        if not may_contain(current, "IS_OP"):
            continue
        listing = [item for item in instructions(current) if item.opname not in _NO_LOADS]
        for place, item in enumerate(listing):
            if item.opname == "IS_OP":
                yield _Comparison(current, item.offset, *listing[place - 2 : place])


_NO_LOADS = frozenset({"PUSH_NULL", "PRECALL"})
_LOADS = frozenset({"LOAD_FAST", "LOAD_DEREF", "LOAD_FAST_BORROW"})
_TWO_LOADS = frozenset({"LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"})


def _is_of_bool(item: _Comparison) -> bool:
    return type(item.first.argval) is bool or type(item.last.argval) is bool


def _is_named_as_one(item: _Comparison) -> bool:
    """Whether B is a variable, or has the name of a mode or a dtype."""
    name = item.last.argval
    if item.last.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
        return True
    return isinstance(name, str) and (name in _DTYPES or "dtype" in name or name == "training")


def _is_of_variables(item: _Comparison) -> bool:
    return item.last.opname in _TWO_LOADS or (item.first.opname in _LOADS and item.last.opname in _LOADS)


# By identity of the function: it, and its patch, if there can be one.
_known: dict[int, tuple[FunctionType, CodePatch | None]] = {}


def identity_patches() -> list[CodePatch]:
    """Patches of the functions that compare by identity."""
    return [patch for _, patch in _known.values() if patch is not None]


def compare_ours(functions: Iterable[FunctionType]) -> bool:
    """Have functions compare by ours in the runs to come; whether all of them will."""
    for function in functions:
        if id(function) not in _known:
            _known[id(function)] = function, changed_patch(function, Identities)
    return all(_known[id(function)][1] is not None for function in functions)
