"""Expressions that choose a value by the mode, such as `0.0 if not self.training else self.dropout`, and stay a choice in the
program. Python itself would take one branch and forget the other, so the methods that have such expressions run, for the time
of a capture, with code in which they are calls. Other branches on the mode become guards (`Watcher._training_decides`).
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterable
from types import CodeType, FunctionType
from typing import Any, ClassVar

from torchgraft.capturing.active import CodePatch
from torchgraft.capturing.changed_code import Change, changed_patch
from torchgraft.capturing.mentions import reached
from torchgraft.capturing.module_patches import TrainingFlag

_PLACE = "torchgraft chooses"


def choose(flag: Any, in_training: Any, otherwise: Any) -> Any:
    """`in_training if flag else otherwise`; for the flag of a model that is being captured, a value that stays a choice."""
    if type(flag) is TrainingFlag and flag._tracer._runs_for_real:
        return flag._tracer._choose(flag, in_training, otherwise)
    return in_training if flag else otherwise


_patches: dict[int, tuple[CodePatch | None, FunctionType, CodeType]] = {}
_lock = threading.Lock()


def choice_patches(classes: Iterable[type]) -> list[CodePatch]:
    """Patches of the methods of some module classes that choose by the mode; no others."""
    found: dict[int, CodePatch] = {}
    for cls in classes:
        for function in reached(cls).functions:
            patch = (
                _patch_of(function) if "training" in function.__code__.co_names or id(function) in _patches else None
            )
            if patch is not None:
                found[id(patch)] = patch
    return list(found.values())


def _patch_of(function: FunctionType) -> CodePatch | None:
    with _lock:
        known = _patches.get(id(function))
        if (
            known is not None
            and known[1] is function
            and (known[2] is function.__code__ or (known[0] and known[0].users))
        ):
            return known[0]
        patch = changed_patch(function, Choices)
        _patches[id(function)] = patch, function, function.__code__
        return patch


class Choices(Change):
    """Turns `A if self.training else B` into a call where A and B are only looked up, and lets the mode be asked last in
    `self.training and A`, where A may say that it does not matter."""

    places: ClassVar = {_PLACE: choose}

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """A conditional expression."""
        self.generic_visit(node)
        is_negated = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
        test: ast.expr = node.test.operand if is_negated else node.test  # type: ignore[attr-defined]
        if not (self.is_within and _is_mode(test) and _is_looked_up(node.body) and _is_looked_up(node.orelse)):
            return node
        self.found = True
        values = [node.orelse, node.body] if is_negated else [node.body, node.orelse]
        return ast.copy_location(ast.Call(ast.Constant(_PLACE), [test, *values], []), node)

    def visit_If(self, node: ast.If) -> ast.AST:
        """A statement; only what it asks may change."""
        self.generic_visit(node)
        test = node.test
        is_and = self.is_within and isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)
        if is_and and _is_mode(test.values[0]) and all(map(_is_question, test.values[1:])):  # type: ignore[attr-defined]
            self.found = True
            test.values = [*test.values[1:], test.values[0]]  # type: ignore[attr-defined]
        return node


def _is_mode(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "training" and isinstance(node.value, ast.Name)


def _is_looked_up(node: ast.expr) -> bool:
    """Whether looking at a value does nothing else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, (ast.Constant, ast.Name))


def _is_question(node: ast.expr) -> bool:
    if isinstance(node, ast.Compare):
        return _is_looked_up(node.left) and all(map(_is_looked_up, node.comparators))
    return _is_looked_up(node)
