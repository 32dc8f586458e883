"""Expressions that choose a value by the mode, such as `0.0 if not self.training else self.dropout`, and stay a choice in the
program. Python itself would take one branch and forget the other, so the methods that have such expressions run, for the time
of a capture, with code in which they are calls. Other branches on the mode become guards (`Watcher._training_decides`).
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import linecache
import threading
import warnings
from collections.abc import Iterable
from types import CodeType, FunctionType
from typing import Any

from torchgraft.capturing.active import CodePatch
from torchgraft.capturing.module_patches import TrainingFlag
from torchgraft.capturing.outside_state import codes_in, reached
from torchgraft.ir.origin import is_user_code

# Stands in the changed syntax tree for the function below, and is replaced by it among the constants of the code: so
# nothing has to be added to the namespace of the user's file.
_PLACE = "torchgraft chooses"
_FUTURES = functools.reduce(
    int.__or__, [getattr(__future__, name).compiler_flag for name in __future__.all_feature_names]
)


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
        for function in reached(cls)[0]:
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
        changed = _changed(function)
        patch = None
        if changed is not None:
            patch = CodePatch(function)
            patch.lend(_like(function, changed))
        _patches[id(function)] = patch, function, function.__code__
        return patch


def _like(function: FunctionType, code: CodeType) -> FunctionType:
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def _changed(function: FunctionType) -> CodeType | None:
    """The code of a function with its choices as calls, or None where there are none, or its text is not what runs."""
    code = function.__code__
    if not is_user_code(code):
        return None
    tree = _tree_of(code.co_filename, tuple(linecache.getlines(code.co_filename, function.__globals__)))
    statement = next((item for item in tree.body if _is_inside(code.co_firstlineno, item)), None) if tree else None
    if tree is None or statement is None:
        return None
    # What is imported makes a difference to the code; what else is defined in the file makes none.
    around = [item for item in tree.body if not isinstance(item, _DEFINITIONS)]
    # The file may have been changed since it was imported, or the code by a tool: then the text says nothing.
    if not _is_same(_compiled([*around, statement], code), code):
        return None
    choices = _Choices(code.co_firstlineno)
    changed = ast.fix_missing_locations(choices.visit(copy.deepcopy(statement)))
    result = _compiled([*around, changed], code) if choices.found else None
    return None if result is None else _with_function(result)


_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.lru_cache(maxsize=8)
def _tree_of(file: str, lines: tuple[str, ...]) -> ast.Module | None:
    try:
        return ast.parse("".join(lines), file)
    except (SyntaxError, ValueError, RecursionError):  # no Python, such as a cell of a notebook with commands in it
        return None


def _is_inside(line: int, statement: ast.stmt) -> bool:
    return isinstance(statement, _DEFINITIONS) and _first_line(statement) <= line <= (statement.end_lineno or 0)


def _first_line(definition: Any) -> int:
    return min([definition.lineno, *[item.lineno for item in definition.decorator_list]])


def _compiled(body: list[ast.stmt], code: CodeType) -> CodeType | None:
    """The code of a function, compiled from some statements of its file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of a text that is called
        whole = compile(ast.Module(body, []), code.co_filename, "exec", code.co_flags & _FUTURES, dont_inherit=True)
    found = [item for item in codes_in(whole) if _place(item) == _place(code)]
    return found[0] if len(found) == 1 else None


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno


_COMPARED = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_flags")


def _is_same(compiled: CodeType | None, running: CodeType) -> bool:
    if compiled is None or any(getattr(compiled, name) != getattr(running, name) for name in _COMPARED):
        return False
    pairs = list(zip(compiled.co_consts, running.co_consts, strict=False))
    return len(compiled.co_consts) == len(running.co_consts) and all(
        _is_same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else type(a) is type(b) and a == b
        for a, b in pairs
    )


def _with_function(code: CodeType) -> CodeType:
    """The code with `choose` in its place, in the functions inside it too."""
    constants = [
        choose if item == _PLACE else _with_function(item) if isinstance(item, CodeType) else item
        for item in code.co_consts
    ]
    return code.replace(co_consts=tuple(constants))


class _Choices(ast.NodeTransformer):
    """Turns `A if self.training else B` into a call where A and B are only looked up, and lets the mode be asked last in
    `self.training and A`, where A may say that it does not matter."""

    def __init__(self, line: int) -> None:
        self.found = False
        self._line = line
        self._is_within = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """A function: only the one that begins at the line changes."""
        outer, self._is_within = self._is_within, self._is_within or _first_line(node) == self._line
        self.generic_visit(node)
        self._is_within = outer
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """A conditional expression."""
        self.generic_visit(node)
        is_negated = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
        test: ast.expr = node.test.operand if is_negated else node.test  # type: ignore[attr-defined]
        if not (self._is_within and _is_mode(test) and _is_looked_up(node.body) and _is_looked_up(node.orelse)):
            return node
        self.found = True
        values = [node.orelse, node.body] if is_negated else [node.body, node.orelse]
        return ast.copy_location(ast.Call(ast.Constant(_PLACE), [test, *values], []), node)

    def visit_If(self, node: ast.If) -> ast.AST:
        """A statement; only what it asks may change."""
        self.generic_visit(node)
        test = node.test
        is_and = self._is_within and isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)
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
