"""How code that chooses by the mode is changed so that both choices are seen: `A if self.training else B`, `self.training and A`,
and `if self.training:` where the branches only give names to values and count. What the changed code calls is in
`mode_choices.py`.

    if self.training:               mode = self.training
        rate = self.rate            if is_open(mode):
        self.seen.add_(1)    →          rate_1 = self.rate
    else:                               is_added(mode, self.seen, 1) or (self.seen.add_(1) if mode)
        rate = 0.0                      rate_2 = 0.0
                                        rate = choose(mode, rate_1, rate_2)
                                    elif mode: … as it was
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any, ClassVar

import torch

from torchgraft.capturing.patching.active import CodePatch
from torchgraft.capturing.user_code import mode_choices
from torchgraft.capturing.user_code.changed_code import Change, changed_patch, codes_in

_CHOOSE, _NEGATED, _BOTH, _EITHER = "torchgraft chooses", "torchgraft negates", "torchgraft's and", "torchgraft's or"
_TRUTH, _ASKED, _IS_OPEN, _IS_ADDED = "torchgraft's truth", "torchgraft asks", "torchgraft is open", "torchgraft adds"


class Choices(Change):
    """Turns choices by the mode into calls where looking at both sides does nothing else."""

    places: ClassVar[dict[str, Callable[..., Any]]] = {
        _CHOOSE: mode_choices.choose,
        _NEGATED: mode_choices.negated,
        _BOTH: mode_choices.both,
        _EITHER: mode_choices.either,
        _TRUTH: mode_choices.truth,
        _ASKED: mode_choices.asked,
        _IS_OPEN: mode_choices.is_open,
        _IS_ADDED: mode_choices.is_added,
    }

    def __init__(self, line: int) -> None:
        super().__init__(line)
        # Names that have values by now, and those whose values may be modes.
        self._bound: set[str] = set()
        self._modes: set[str] = set()
        self._number = 0
        self._is_caught = False

    # ---- expressions ----

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """A conditional expression."""
        mode = self._mode(node.test, is_test=True)
        node.test = node.test if mode is None else mode
        self.generic_visit(node)
        if mode is None or not (_is_looked_up(node.body) and _is_looked_up(node.orelse)):
            return node
        return _call(_CHOOSE, mode, node.body, node.orelse, at=node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """`and`, `or`."""
        return self._mode(node) or self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """`not`, or a sign."""
        return self._mode(node) or self.generic_visit(node)

    def _mode(self, node: ast.expr, is_test: bool = False) -> ast.expr | None:
        """An expression made of modes and of questions that may be asked in any order, with calls of ours; else None."""
        if not self.is_within or not any(map(self._is_mode, ast.walk(node))):
            return None
        changed = self._opened(node, is_test)
        self.found = self.found or changed is not None
        return changed

    def _is_mode(self, node: ast.AST) -> bool:
        return _is_attribute(node) or (isinstance(node, ast.Name) and node.id in self._modes)

    def _opened(self, node: ast.expr, is_test: bool) -> ast.expr | None:
        if self._is_mode(node):
            return node
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._opened(node.operand, is_test=True)
            return None if inner is None else _call(_NEGATED, inner, at=node)
        if isinstance(node, ast.BoolOp):
            parts = [self._opened(item, is_test) for item in node.values]
            result, *rest = parts
            for part in rest:
                if result is None or part is None:
                    return None
                result = _call(_BOTH if isinstance(node.op, ast.And) else _EITHER, result, part, at=node)
            return result
        if not _is_question(node):
            return None
        return _call(_TRUTH, node, at=node) if is_test else node

    # ---- statements ----

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """A function: its arguments have values. Where it looks at all of its names, no others may be added."""
        outer = self._bound, self._modes, self._is_caught
        names = {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
        self._is_caught = self._is_caught or not names.isdisjoint(("locals", "vars", "dir", "eval", "exec"))
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self._bound, self._modes = {item.arg for item in arguments}, set()
        result = super().visit_FunctionDef(node)
        self._bound, self._modes, self._is_caught = outer
        return result

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Names for a value, which may be a mode."""
        if self._mode(node.value) is not None:
            self._modes.update([item.id for item in node.targets if isinstance(item, ast.Name)])
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """A name that is given a value here."""
        if isinstance(node.ctx, ast.Store):
            self._bound.add(node.id)
        return node

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """Statements whose errors may be caught, those too that looking at both sides may raise: there they stay branches."""
        outer, self._is_caught = self._is_caught, True
        self.generic_visit(node)
        self._is_caught = outer
        return node

    def visit_If(self, node: ast.If) -> Any:
        """A statement. If it cannot be a choice, what it asks may still say that the mode does not matter."""
        mode = self._mode(node.test, is_test=True)
        if mode is None:
            return self.generic_visit(node)
        if not self._is_caught and _is_plain_block(node.body) and _is_plain_block(node.orelse):
            sides = _Side(node.body, self._place("then")), _Side(node.orelse, self._place("else"))
            names = [name for side in sides for name in side.assigned]
            if all(name in self._bound or all(name in side.certain for side in sides) for name in names):
                known = self._bound.copy()
                self._bound.update(names)
                self._modes.update(names)
                return self._both_ways(node, mode, known, *sides)
        node.test = mode
        return self.generic_visit(node)

    def _place(self, side: str) -> str:
        self._number += 1
        return f"_torchgraft_{side}_{self._number}"

    def _both_ways(
        self, node: ast.If, mode: ast.expr, known: set[str], then: _Side, otherwise: _Side
    ) -> list[ast.stmt]:
        flag, opposite = self._place("mode"), self._place("mode")
        names = dict.fromkeys([*then.assigned, *otherwise.assigned])
        both = [
            *then.statements(flag, known),
            _assign(opposite, _call(_NEGATED, _name(flag), at=node)),
            *otherwise.statements(opposite, known),
            *[
                _assign(name, _call(_CHOOSE, *map(_name, (flag, then[name], otherwise[name])), at=node))
                for name in names
            ],
        ]
        as_it_was = ast.If(_name(flag), node.body, node.orelse)
        choice = [_assign(flag, mode), ast.If(_call(_IS_OPEN, _name(flag), at=node), both, [as_it_was])]
        return [ast.copy_location(statement, node) for statement in choice]


class _Side:
    """One branch, in which names are given values under other names, so that both branches can run."""

    def __init__(self, block: list[ast.stmt], prefix: str) -> None:
        self._block = block
        self._prefix = prefix
        names = [item for statement in block for item in ast.walk(statement) if isinstance(item, ast.Name)]
        self.assigned = dict.fromkeys([item.id for item in names if isinstance(item.ctx, ast.Store)])
        self._read = {item.id for item in names if isinstance(item.ctx, ast.Load)}
        self.certain = _certainly_assigned(block)

    def __getitem__(self, name: str) -> str:
        return f"{self._prefix}_{name}" if name in self.assigned else name

    def statements(self, flag: str, known: set[str]) -> list[ast.stmt]:
        """The statements of the branch where its flag may or may not be set; `known` names have values before it."""
        kept = [name for name in self.assigned if name not in self.certain or (name in self._read and name in known)]
        return [*[_assign(self[name], _name(name)) for name in kept], *self._converted(self._block, flag)]

    def _converted(self, block: list[ast.stmt], flag: str) -> list[ast.stmt]:
        return [converted for statement in block for converted in self._convert(statement, flag)]

    def _convert(self, statement: ast.stmt, flag: str) -> list[ast.stmt]:
        if isinstance(statement, (ast.Pass, ast.Assign)) and _is_plain_statement(statement):
            return [self._renamed(statement)]
        counted = _counted(statement)
        if counted is not None:
            is_added = _call(_IS_ADDED, _name(flag), *map(self._renamed, counted), at=statement)
            otherwise = ast.BoolOp(ast.And(), [ast.UnaryOp(ast.Not(), is_added), _name(flag)])
            return [ast.If(otherwise, [self._renamed(statement)], [])]
        if isinstance(statement, ast.If) and _is_question(statement.test):
            test = _call(_ASKED, _name(flag), self._renamed(statement.test), at=statement)
            body = self._converted(statement.body, flag)
            return [ast.If(test, body, self._converted(statement.orelse, flag))]
        return [ast.Pass()] if _is_text(statement) else [ast.If(_name(flag), [self._renamed(statement)], [])]

    def _renamed(self, node: Any) -> Any:
        return _Renaming({name: self[name] for name in self.assigned}).visit(copy.deepcopy(node))


class _Renaming(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """A name, read or written."""
        return ast.copy_location(ast.Name(self._names.get(node.id, node.id), node.ctx), node)


# ---- what may be asked and done on both sides ----


def _is_attribute(node: ast.AST) -> bool:
    """Whether this is `self.training`, or the mode of another."""
    return isinstance(node, ast.Attribute) and node.attr == "training" and isinstance(node.value, ast.Name)


def _is_looked_up(node: ast.expr) -> bool:
    """Whether looking at a value does nothing else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, (ast.Constant, ast.Name))


def _is_question(node: ast.expr) -> bool:
    """Whether a value is looked up, or computed from such by comparing; and says nothing of the mode."""
    if isinstance(node, ast.Compare):
        return _is_looked_up(node.left) and all(map(_is_looked_up, node.comparators))
    if isinstance(node, ast.UnaryOp):
        return _is_question(node.operand)
    if isinstance(node, ast.BoolOp):
        return all(map(_is_question, node.values))
    return _is_looked_up(node) and not _is_attribute(node)


def _is_plain_block(block: list[ast.stmt]) -> bool:
    """Whether a branch only gives names to values and counts; where it asks further, there may be anything with plain names."""
    return all(map(_is_plain_statement, block))


def _is_plain_statement(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        is_named = len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name)
        return is_named and _is_question(statement.value)
    if isinstance(statement, ast.If) and _is_question(statement.test):
        inside = [item for part in (*statement.body, *statement.orelse) for item in ast.walk(part)]
        return not any(isinstance(item, _NAMING_OTHERWISE) for item in inside)
    return isinstance(statement, ast.Pass) or _is_text(statement) or _counted(statement) is not None


# What gives names to values in a way of its own, so that they could not be renamed.
_NAMING_OTHERWISE = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.comprehension, ast.Import, ast.ImportFrom),
    *(ast.Global, ast.Nonlocal, ast.ExceptHandler, ast.Delete, ast.Match),
)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _counted(statement: ast.stmt) -> tuple[ast.expr, ast.expr] | None:
    """The tensor and the number of `self.seen.add_(1)` and `self.seen += 1`, if that is what a statement may be."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
        target, amount = copy.deepcopy(statement.target), statement.value
        if not isinstance(target, ast.Attribute):
            return None
        target.ctx = ast.Load()
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        is_addition = isinstance(call.func, ast.Attribute) and call.func.attr == "add_" and not call.keywords
        if not is_addition or len(call.args) != 1:
            return None
        target, amount = call.func.value, call.args[0]  # type: ignore[attr-defined]
    else:
        return None
    return (target, amount) if _is_looked_up(target) and isinstance(amount, ast.Constant) else None


def _certainly_assigned(block: list[ast.stmt]) -> set[str]:
    """The names that have values after a branch has run on both sides."""
    found: set[str] = set()
    for statement in block:
        if isinstance(statement, ast.Assign) and _is_plain_statement(statement):
            found.add(statement.targets[0].id)  # type: ignore[attr-defined]
        elif isinstance(statement, ast.If) and _is_question(statement.test):
            found |= _certainly_assigned(statement.body) & _certainly_assigned(statement.orelse)
    return found


# ---- syntax ----


def _call(place: str, *arguments: ast.expr, at: ast.AST) -> ast.expr:
    return ast.copy_location(ast.Call(ast.copy_location(ast.Constant(place), at), list(arguments), []), at)


def _name(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


def _assign(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value)


# ---- the methods of a model that choose ----

_patches: dict[int, tuple[CodePatch | None, FunctionType, CodeType]] = {}
_lock = threading.Lock()


def choice_patches(classes: Iterable[type]) -> list[CodePatch]:
    """Patches of the methods of some module classes that choose by the mode; no others."""
    found: dict[int, CodePatch] = {}
    for cls in classes:
        for function in (*_methods_of_user(cls), *methods_of_torch(cls)):
            patch = (
                _patch_of(function) if "training" in function.__code__.co_names or id(function) in _patches else None
            )
            if patch is not None:
                found[id(patch)] = patch
    return list(found.values())


# Methods that Python calls when nobody mentions them.
_ENTRIES = ("forward", "__call__", "__getattr__", "__getitem__", "__iter__", "__len__")


@functools.lru_cache(maxsize=4096)
def _methods_of_user(cls: type) -> tuple[FunctionType, ...]:
    """The methods, in classes that are not torch's, that a call of a module may come to, as far as names show."""
    found: dict[FunctionType, None] = {}
    names: set[str] = set()
    pending = list(_ENTRIES)
    while pending:
        name = pending.pop()
        base = next((base for base in cls.__mro__ if name in vars(base)), None)
        if name in names or base is None or base.__module__.startswith(("torch.", "torchgraft.", "builtins")):
            continue
        names.add(name)
        value = vars(base)[name]
        function = getattr(value, "fget", None) or inspect.unwrap(getattr(value, "__func__", value))
        if isinstance(function, FunctionType):
            found[function] = None
            pending += [mentioned for code in codes_in(function.__code__) for mentioned in code.co_names]
    return tuple(found)


@functools.cache
def methods_of_torch(cls: type) -> tuple[FunctionType, ...]:
    """What a call of a module may come through in classes of torch.nn that ask for their mode."""
    homes = [base for base in cls.__mro__ if base.__module__.startswith("torch.nn.") and base is not torch.nn.Module]
    methods = [item for base in homes for item in vars(base).values() if isinstance(item, FunctionType)]
    return tuple([item for item in methods if "training" in item.__code__.co_names])


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
