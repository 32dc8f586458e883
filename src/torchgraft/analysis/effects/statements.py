"""Reading function bodies: the flow from statement to statement, and what each writes.
Which code a call reaches is decided in `calls.py`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._contextlib import _DecoratorContextManager

from torchgraft.analysis.effects.attributes import child_places, is_python_class
from torchgraft.analysis.effects.calls import Calls
from torchgraft.analysis.effects.expressions import Expressions, Scope
from torchgraft.analysis.effects.machine import Arguments
from torchgraft.analysis.effects.values import (
    MISSING,
    OUTSIDE,
    Value,
    contents,
    element_of,
    is_plain_data,
    join,
    join_environments,
    lift,
    reachable,
)

_ROUNDS = 12
# Contexts that put back on exit what they change on entry.
_RESTORING = (_DecoratorContextManager, torch.autocast)


class Body(Expressions):
    """The statements of one function body."""

    def __init__(self, machine: Calls, scope: Scope, path: Any) -> None:
        super().__init__(machine, scope, path)
        self.returned: list[Value] = []
        self.yielded: list[Value] | None = None
        # Names declared global or nonlocal, and the body around this one.
        self.foreign: dict[str, str] = {}
        self.outer: Body | None = None
        self.loops: list[tuple[list[dict[str, Value]], list[dict[str, Value]]]] = []
        # What names were bound to inside the `try` bodies we are in: an exception may come between any two statements.
        self.journals: list[dict[str, Value]] = []

    def run(self, statements: list[ast.stmt]) -> bool:
        """Read statements in order; False if control never gets past them."""
        for statement in statements:
            method: Callable[[Any], bool | None] | None = getattr(self, "run_" + type(statement).__name__, None)
            if method is None:
                self.machine.give_up(f"line {statement.lineno}: {type(statement).__name__} is not understood")
            if method(statement) is False:
                return False
        return True

    def store_name(self, name: str, value: Value) -> None:
        if name in self.foreign:
            self._store_foreign(name, value)
        self.scope.names[name] = value
        for journal in self.journals:
            journal[name] = join(journal[name], value) if name in journal else value

    def _store_foreign(self, name: str, value: Value) -> None:
        """Rebind a name of an enclosing function that is being read too, or else one of the world."""
        body = self.outer
        while body is not None and self.foreign[name] == "nonlocal":
            if name in body.scope.names:
                body.store_name(name, join(body.scope.names[name], value))
                return
            body = body.outer
        self.machine.write_outside(f"writes the outer name {name}")

    def give(self, value: Value) -> None:
        if self.yielded is None:
            self.yielded = []
        self.yielded.append(value)

    # ---- simple statements ----

    def run_Expr(self, statement: ast.Expr) -> None:
        self.evaluate(statement.value)

    def run_Pass(self, statement: ast.Pass) -> None:
        pass

    def run_Return(self, statement: ast.Return) -> bool:
        self.returned.append(Value(None) if statement.value is None else self.evaluate(statement.value))
        return False

    def run_Raise(self, statement: ast.Raise) -> bool:
        if statement.exc is not None:
            self.machine.raised |= reachable([self.evaluate(statement.exc)])
        return False

    def run_Assert(self, statement: ast.Assert) -> bool:
        return self.condition(statement.test) is not False

    def run_Assign(self, statement: ast.Assign) -> None:
        value = self.evaluate(statement.value)
        for target in statement.targets:
            self.assign(target, value)

    def run_AnnAssign(self, statement: ast.AnnAssign) -> None:
        if statement.value is not None:
            self.assign(statement.target, self.evaluate(statement.value))

    def run_AugAssign(self, statement: ast.AugAssign) -> None:
        target = statement.target
        right = self.evaluate(statement.value)
        if isinstance(target, ast.Attribute):
            owner = self.evaluate(target.value)
            left = self.machine.read_attribute(self.site(target), owner, target.attr)
            self._write_attribute(target, owner, join(left, right))
        elif isinstance(target, ast.Subscript):
            owner = self.evaluate(target.value)
            left = self.machine.read_item(self.site(target), owner, self.evaluate(target.slice))
            self.machine.store(owner, right, f"line {statement.lineno}: writes an item")
        else:
            left = self.evaluate(target)
        if left.is_known and is_plain_data(left.known):
            result = self.binary(statement, statement.op, left, right)
        else:
            self.machine.store(left, right, f"line {statement.lineno}: an augmented assignment may write in place")
            result = join(Value(MISSING, left.places), self._computed(statement, left, right))
        if isinstance(target, ast.Name):
            self.store_name(target.id, result)

    def run_Delete(self, statement: ast.Delete) -> None:
        for target in statement.targets:
            if isinstance(target, ast.Attribute | ast.Subscript):
                self.machine.store(self.evaluate(target.value), Value(), f"line {statement.lineno}: deletes a part")

    def run_Global(self, statement: ast.Global) -> None:
        self.foreign |= dict.fromkeys(statement.names, "global")

    def run_Nonlocal(self, statement: ast.Nonlocal) -> None:
        self.foreign |= dict.fromkeys(statement.names, "nonlocal")

    def run_Import(self, statement: ast.Import) -> None:
        for alias in statement.names:
            module = sys.modules.get(alias.name)
            name = alias.asname or alias.name.partition(".")[0]
            self._imported(name, module if alias.asname else sys.modules.get(name), alias.name in sys.modules)

    def run_ImportFrom(self, statement: ast.ImportFrom) -> None:
        package = self.scope.namespace.get("__package__") or ""
        base = ".".join(package.split(".")[: len(package.split(".")) - statement.level + 1]) if statement.level else ""
        path = ".".join(part for part in (base, statement.module) if part)
        module = sys.modules.get(path)
        for alias in statement.names:
            found = getattr(module, alias.name, sys.modules.get(f"{path}.{alias.name}", MISSING))
            self._imported(alias.asname or alias.name, found, found is not MISSING)

    def _imported(self, name: str, found: Any, is_there: bool) -> None:
        if not is_there:
            self.machine.give_up(f"imports {name}, which is not loaded yet")
        self.store_name(name, lift(found, OUTSIDE))

    def run_FunctionDef(self, statement: ast.FunctionDef) -> None:
        value = self.closure(statement)
        for decorator in statement.decorator_list:
            self.evaluate(decorator)
        self.store_name(statement.name, Value(places=frozenset((OUTSIDE,))) if statement.decorator_list else value)

    # ---- targets ----

    def assign(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self.store_name(target.id, value)
        elif isinstance(target, ast.Tuple | ast.List):
            self._unpack(target, value)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, self.machine.make(self.site(target), [element_of(value)], list))
        elif isinstance(target, ast.Attribute):
            self._write_attribute(target, self.evaluate(target.value), value)
        elif isinstance(target, ast.Subscript):
            self.evaluate(target.slice)
            self.machine.store(self.evaluate(target.value), value, f"line {target.lineno}: writes an item")

    def _write_attribute(self, target: ast.Attribute, owner: Value, value: Value) -> None:
        machine, local = self.machine, contents(owner)
        cls = type(owner.known) if owner.is_known else owner.cls
        setter = None if cls is None or not is_python_class(cls) else machine.find_setter(cls, target.attr)
        if setter is not None:
            machine.call(self.site(target), Value(setter), Arguments([owner, value]))
        elif local is not None and local.entries is not None:
            machine.set_entry(local, target.attr, value)
        elif isinstance(owner.known, torch.nn.Module):
            machine.write_places(child_places(owner, target.attr), f"line {target.lineno}: writes .{target.attr}")
        elif local is not None and cls in (None, torch.Tensor) and reachable((value,)) - {local}:
            # `y.data = x` makes y share the memory of x.
            machine.give_up(f"line {target.lineno}: sets .{target.attr} of what may be a tensor")
        else:
            machine.store(owner, value, f"line {target.lineno}: writes .{target.attr}")

    def _unpack(self, target: ast.Tuple | ast.List, value: Value) -> None:
        items = self.machine.items_of(value)
        starred = any(isinstance(element, ast.Starred) for element in target.elts)
        if items is not None and len(items) == len(target.elts) and not starred:
            for element, item in zip(target.elts, items, strict=True):
                self.assign(element, item)
            return
        for element in target.elts:
            self.assign(element, value if isinstance(element, ast.Starred) else element_of(value))

    # ---- flow ----

    def _branches(self, *blocks: list[ast.stmt]) -> bool:
        before = self.scope.names
        ends = []
        for block in blocks:
            self.scope.names = dict(before)
            if self.run(block):
                ends.append(self.scope.names)
        self.scope.names = join_environments(ends) if ends else before
        return bool(ends)

    def run_If(self, statement: ast.If) -> bool:
        truth = self.condition(statement.test)
        if truth is None:
            return self._branches(statement.body, statement.orelse)
        return self.run(statement.body if truth else statement.orelse)

    def run_Break(self, statement: ast.Break) -> bool:
        self.loops[-1][0].append(self.scope.names)
        return False

    def run_Continue(self, statement: ast.Continue) -> bool:
        self.loops[-1][1].append(self.scope.names)
        return False

    def run_For(self, statement: ast.For) -> bool:
        iterable = self.evaluate(statement.iter)
        items = self.machine.items_of(iterable)
        if items is None:
            iterator = self.machine.call_special(self.site(statement.iter), iterable, ("__iter__",)) or iterable
            return self._until_settled(statement, lambda: self.assign(statement.target, element_of(iterator)))
        breaks: list[dict[str, Value]] = []
        path = self.path
        for number, item in enumerate(items):
            self.path = (path, statement, number)
            self.assign(statement.target, item)
            if not self._round(statement.body, breaks):
                self.path = path
                return self._leave(breaks)
        self.path = path
        if not self.run(statement.orelse):
            return self._leave(breaks)
        return self._leave([*breaks, self.scope.names])

    def run_While(self, statement: ast.While) -> bool:
        if self.condition(statement.test) is False:
            return self.run(statement.orelse)
        return self._until_settled(statement, lambda: self.condition(statement.test))

    def _round(self, body: list[ast.stmt], breaks: list[dict[str, Value]]) -> bool:
        """One pass over a loop body; False if no next pass can follow."""
        continues: list[dict[str, Value]] = []
        self.scope.names = dict(self.scope.names)
        self.loops.append((breaks, continues))
        ends = [self.scope.names] if self.run(body) else []
        self.loops.pop()
        ends += continues
        if ends:
            self.scope.names = join_environments(ends)
        return bool(ends)

    def _leave(self, ends: list[dict[str, Value]]) -> bool:
        if ends:
            self.scope.names = join_environments(ends)
        return bool(ends)

    def _until_settled(self, statement: ast.For | ast.While, prepare: Callable[[], object]) -> bool:
        breaks: list[dict[str, Value]] = []
        for _ in range(_ROUNDS):
            before, version = self.scope.names, self.machine.version
            self.scope.names = dict(before)
            prepare()
            again = self._round(statement.body, breaks)
            self.scope.names = join_environments([before, self.scope.names]) if again else before
            if self.machine.version == version and _same_names(before, self.scope.names):
                break
        else:
            self.machine.give_up(f"line {statement.lineno}: the loop does not settle")
        if not self.run(statement.orelse):
            return self._leave(breaks)
        return self._leave([*breaks, self.scope.names])

    def run_Try(self, statement: ast.Try) -> bool:
        before, journal = self.scope.names, dict[str, Value]()
        self.scope.names = dict(before)
        self.journals.append(journal)
        completes = self.run(statement.body)
        self.journals.pop()
        ends = [self.scope.names] if completes and self.run(statement.orelse) else []
        interrupted = join_environments([before, journal])
        for handler in statement.handlers:
            self.scope.names = dict(interrupted)
            if handler.name is not None:
                self.store_name(handler.name, Value(places=frozenset({OUTSIDE, *self.machine.raised})))
            if self.run(handler.body):
                ends.append(self.scope.names)
        self.scope.names = join_environments(ends or [interrupted])
        return self.run(statement.finalbody) and bool(ends)

    run_TryStar = run_Try

    def run_With(self, statement: ast.With) -> bool:
        before, journal = self.scope.names, dict[str, Value]()
        self.scope.names = dict(before)
        self.journals.append(journal)
        may_swallow = False
        for item in statement.items:
            entered, restores = self._enter(item.context_expr)
            may_swallow = may_swallow or not restores
            if item.optional_vars is not None:
                self.assign(item.optional_vars, entered)
        completes = self.run(statement.body)
        self.journals.pop()
        if may_swallow:
            # The context may end an exception from anywhere in the body.
            interrupted = join_environments([before, journal])
            self.scope.names = join_environments([self.scope.names, interrupted] if completes else [interrupted])
        return completes or may_swallow

    def _enter(self, tree: ast.expr) -> tuple[Value, bool]:
        """What `with … as` binds, and whether leaving the context only puts back what entering changed."""
        outside = Value(places=frozenset((OUTSIDE,)))
        if isinstance(tree, ast.Call):
            callee = self.evaluate(tree.func)
            if isinstance(callee.known, type) and issubclass(callee.known, _RESTORING):
                self._arguments(tree)
                return outside, True
        context = self.evaluate(tree)
        cls = type(context.known) if context.is_known else context.cls
        if cls is None:
            self.machine.give_up(f"line {tree.lineno}: enters an unknown context")
        if issubclass(cls, _RESTORING):
            return outside, True
        nothing = [Value(None), Value(None), Value(None)]
        self.machine.call_method((self.path, tree, "exit"), context, "__exit__", Arguments(nothing))
        return self.machine.call_method((self.path, tree, "enter"), context, "__enter__", Arguments()), False


def _same_names(first: dict[str, Value], second: dict[str, Value]) -> bool:
    return first.keys() == second.keys() and all(value.same_as(second[name]) for name, value in first.items())
