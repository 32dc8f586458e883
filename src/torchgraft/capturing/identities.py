"""`mode is True`, `dtype is torch.half`: what stands in for a mode or a dtype during a watched run is another object, and Python
lets nobody answer for it. So functions that compare by identity run again with code that calls ours.
"""

from __future__ import annotations

import ast
import dis
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any, ClassVar

import torch

from torchgraft.capturing.active import CodePatch
from torchgraft.capturing.changed_code import Change, changed_patch
from torchgraft.capturing.dtypes import FlowingDtype
from torchgraft.capturing.mentions import codes_in
from torchgraft.capturing.module_patches import TrainingFlag
from torchgraft.ir.origin import asked_once

_SAME = "torchgraft's is"
_DTYPES = frozenset(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))


def same(one: Any, other: Any) -> bool:
    """`one is other`, of what the two stand for."""
    return _plain(one) is _plain(other)


def _plain(value: Any) -> Any:
    if type(value) is TrainingFlag:
        return bool(value)
    return value.decide() if type(value) is FlowingDtype else value


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
    return any(map(_compares, codes_in(code)))


def _compares(code: CodeType) -> bool:
    listing = [item for item in dis.get_instructions(code) if item.opname not in ("CACHE", "PUSH_NULL", "PRECALL")]
    for place, item in enumerate(listing):
        if item.opname == "IS_OP":
            last, first = listing[place - 1], listing[place - 2]
            if any(operand.opname == "LOAD_CONST" and type(operand.argval) is bool for operand in (last, first)):
                return True
            if last.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) or _is_name_of_one(last.argval):
                return True
    return False


def _is_name_of_one(name: Any) -> bool:
    return isinstance(name, str) and (name in _DTYPES or "dtype" in name or name == "training")


@asked_once
def compares_with_bool(code: CodeType) -> bool:
    """Whether a function asks if something is True or False itself."""
    for current in codes_in(code):
        listing = [item for item in dis.get_instructions(current) if item.opname != "CACHE"]
        for place, item in enumerate(listing):
            if item.opname == "IS_OP" and any(type(before.argval) is bool for before in listing[place - 2 : place]):
                return True
    return False


_LOADS = frozenset({"LOAD_FAST", "LOAD_DEREF", "LOAD_FAST_BORROW"})
_TWO_LOADS = frozenset({"LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"})


@asked_once
def compares_variables(code: CodeType) -> bool:
    """Whether a function asks if two of its variables are the same object: tensors that it was given, perhaps."""
    for current in codes_in(code):
        names = [item.opname for item in dis.get_instructions(current) if item.opname != "CACHE"]
        for place, name in enumerate(names):
            if name == "IS_OP" and (names[place - 1] in _TWO_LOADS or _LOADS.issuperset(names[place - 2 : place])):
                return True
    return False


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
