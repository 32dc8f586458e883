"""Reading expressions: their values as far as they are certain, and the effects of evaluating them.
Operators are in `operations.py`, statements and the flow between them in `statements.py`.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from typing import Any

from torchgraft.analysis.effects.calls import Calls
from torchgraft.analysis.effects.machine import STEP_LIMIT, Arguments
from torchgraft.analysis.effects.operations import Operations
from torchgraft.analysis.effects.values import (
    OUTSIDE,
    WRAPPERS,
    Closure,
    Super,
    Value,
    contents,
    element_of,
    is_plain_data,
    join,
    lift,
    reachable,
)


class Scope:
    """Where the names of a function body are looked up."""

    def __init__(
        self,
        namespace: dict[str, Any],
        cells: dict[str, Any],
        parent: Scope | None = None,
    ) -> None:
        self.names: dict[str, Value] = {}
        self.namespace = namespace
        self.cells = cells
        self.parent = parent
        self.receiver: Value | None = None

    def find(self, machine: Calls, name: str) -> Value:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        if name in self.cells:
            try:
                content = self.cells[name].cell_contents
            except ValueError:
                return Value(places=frozenset((OUTSIDE,)))
            machine.reads.append((_Cell(self.cells[name]), name, content))
            return lift(content, OUTSIDE)
        if name in self.namespace:
            machine.reads.append((self.namespace, name, self.namespace[name]))
            return lift(self.namespace[name], OUTSIDE)
        machine.reads.append((self.namespace, name, None))
        if hasattr(builtins, name):
            return lift(getattr(builtins, name), OUTSIDE)
        return Value(places=frozenset((OUTSIDE,)))


class _Cell(dict[str, Any]):
    """A captured variable as a namespace, so that an answer that depends on it can be checked again."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.cell = cell

    def get(self, name: str, default: Any = None) -> Any:
        return self.cell.cell_contents


class Expressions(Operations):
    """The expressions of one function body."""

    def __init__(self, machine: Calls, scope: Scope, path: Any) -> None:
        super().__init__(machine, path)
        self.scope = scope
        # The names around each comprehension that we are in.
        self.around: list[dict[str, Value]] = []

    def evaluate(self, tree: ast.expr) -> Value:
        machine = self.machine
        machine.steps += 1
        if machine.steps > STEP_LIMIT:
            machine.give_up("there is too much code to read")
        reader = _READERS.get(type(tree))
        if reader is None:
            machine.give_up(f"line {tree.lineno}: {type(tree).__name__} is not understood")
        return reader(self, tree)

    def store_name(self, name: str, value: Value) -> None:
        self.scope.names[name] = value

    # ---- names, constants, containers ----

    def read_Constant(self, tree: ast.Constant) -> Value:
        return Value(tree.value)

    def read_Name(self, tree: ast.Name) -> Value:
        return self.scope.find(self.machine, tree.id)

    def read_NamedExpr(self, tree: ast.NamedExpr) -> Value:
        value = self.evaluate(tree.value)
        self.store_name(tree.target.id, value)
        for names in self.around:
            # In a comprehension the name is bound outside it, if the element is reached at all.
            names[tree.target.id] = join(names[tree.target.id], value) if tree.target.id in names else value
        return value

    def read_Tuple(self, tree: ast.Tuple) -> Value:
        return self._sequence(tree, tree.elts, tuple)

    def read_List(self, tree: ast.List) -> Value:
        return self._sequence(tree, tree.elts, list)

    def read_Set(self, tree: ast.Set) -> Value:
        return self._sequence(tree, tree.elts, set)

    def _sequence(self, tree: ast.expr, elements: list[ast.expr], cls: type) -> Value:
        items: list[Value] = []
        certain = True
        for element in elements:
            if isinstance(element, ast.Starred):
                value = self.evaluate(element.value)
                inner = self.machine.items_of(value)
                certain = certain and inner is not None
                items += [element_of(value)] if inner is None else inner
            else:
                items.append(self.evaluate(element))
        if not certain:
            return self.machine.make(self.site(tree), items, cls)
        if cls is tuple and all(
            item.is_known and not item.places and not isinstance(item.known, WRAPPERS) for item in items
        ):
            return Value(tuple(item.known for item in items))
        return self.machine.make_sequence(self.site(tree), items, cls)

    def read_Dict(self, tree: ast.Dict) -> Value:
        keys = [None if key is None else self.evaluate(key) for key in tree.keys]
        values = [self.evaluate(value) for value in tree.values]
        if all(key is not None and isinstance(key.known, str) for key in keys):
            entries = {key.known: value for key, value in zip(keys, values, strict=True) if key is not None}
            return self.machine.make_mapping(self.site(tree), entries, dict)
        return self.machine.make(self.site(tree), [Value(places=reachable(values))], dict)

    def read_Slice(self, tree: ast.Slice) -> Value:
        parts = [Value(None) if part is None else self.evaluate(part) for part in (tree.lower, tree.upper, tree.step)]
        if all(part.is_known and is_plain_data(part.known) for part in parts):
            return Value(slice(*[part.known for part in parts]))
        return Value()

    def read_JoinedStr(self, tree: ast.JoinedStr) -> Value:
        for part in tree.values:
            self.evaluate(part)
        return Value(cls=str)

    def read_FormattedValue(self, tree: ast.FormattedValue) -> Value:
        value = self.evaluate(tree.value)
        self.machine.call_special(self.site(tree), value, ("__format__", "__str__", "__repr__"))
        return Value(cls=str)

    def read_Starred(self, tree: ast.Starred) -> Value:
        return element_of(self.evaluate(tree.value))

    # ---- attributes, items, calls ----

    def read_Attribute(self, tree: ast.Attribute) -> Value:
        return self.machine.read_attribute(self.site(tree), self.evaluate(tree.value), tree.attr)

    def read_Subscript(self, tree: ast.Subscript) -> Value:
        owner = self.evaluate(tree.value)
        return self.machine.read_item(self.site(tree), owner, self.evaluate(tree.slice))

    def read_Call(self, tree: ast.Call) -> Value:
        site = self.site(tree)
        if isinstance(tree.func, ast.Attribute):
            owner = self.evaluate(tree.func.value)
            return self.machine.call_method(site, owner, tree.func.attr, self._arguments(tree))
        callee = self.evaluate(tree.func)
        if callee.known is super:
            return self._super(tree)
        return self.machine.call(site, callee, self._arguments(tree))

    def _super(self, tree: ast.Call) -> Value:
        if tree.args:
            cls, receiver = (self.evaluate(argument) for argument in tree.args[:2])
            if isinstance(cls.known, type):
                return Value(Super(cls.known, receiver))
        cell, first = self.scope.cells.get("__class__"), self.scope.receiver
        if cell is None or first is None or tree.args:
            self.machine.give_up("super() outside a method")
        return Value(Super(cell.cell_contents, first))

    def _arguments(self, tree: ast.Call) -> Arguments:
        result = Arguments()
        for argument in tree.args:
            if isinstance(argument, ast.Starred):
                value = self.evaluate(argument.value)
                items = self.machine.items_of(value)
                if items is not None and result.rest is None:
                    result.positional += items
                    continue
                value = element_of(value)
            else:
                value = self.evaluate(argument)
                if result.rest is None:
                    result.positional.append(value)
                    continue
            result.rest = value if result.rest is None else join(result.rest, value)
        for keyword in tree.keywords:
            value = self.evaluate(keyword.value)
            if keyword.arg is not None:
                result.keyword[keyword.arg] = value
                continue
            local = contents(value)
            if local is not None and local.entries is not None:
                result.keyword.update(local.entries)
            else:
                result.rest = element_of(value) if result.rest is None else join(result.rest, element_of(value))
        return result

    # ---- functions inside functions, comprehensions ----

    def read_Lambda(self, tree: ast.Lambda) -> Value:
        return self.closure(tree)

    def closure(self, tree: ast.Lambda | ast.FunctionDef) -> Value:
        defaults = tuple(self.evaluate(default) for default in tree.args.defaults)
        keyword_defaults = tuple(None if d is None else self.evaluate(d) for d in tree.args.kw_defaults)
        return Value(Closure(tree, self, defaults, keyword_defaults))

    def read_ListComp(self, tree: ast.ListComp) -> Value:
        return self._comprehension(tree, tree.generators, [tree.elt], list)

    def read_SetComp(self, tree: ast.SetComp) -> Value:
        return self._comprehension(tree, tree.generators, [tree.elt], set)

    def read_GeneratorExp(self, tree: ast.GeneratorExp) -> Value:
        return self._comprehension(tree, tree.generators, [tree.elt], list)

    def read_DictComp(self, tree: ast.DictComp) -> Value:
        return self._comprehension(tree, tree.generators, [tree.key, tree.value], dict)

    def _comprehension(
        self, tree: ast.expr, generators: list[ast.comprehension], elements: list[ast.expr], cls: type
    ) -> Value:
        """One round over the generators with elements of which nothing is known, or over the certain items of one."""
        outer = self.scope.names
        self.scope.names = dict(outer)
        self.around.append(outer)
        try:
            first = self.machine.items_of(self.evaluate(generators[0].iter))
            if first is not None and len(generators) == 1 and not generators[0].ifs and cls is list:
                return self._unrolled(tree, generators[0], first, elements[0])
            for generator in generators:
                self.assign(generator.target, element_of(self.evaluate(generator.iter)))
                for test in generator.ifs:
                    self.condition(test)
            found = [self.evaluate(element) for element in elements]
            return self.machine.make(self.site(tree), [Value(places=reachable(found))], cls)
        finally:
            self.around.pop()
            self.scope.names = outer

    def _unrolled(self, tree: ast.expr, generator: ast.comprehension, items: list[Value], element: ast.expr) -> Value:
        found = []
        for number, item in enumerate(items):
            self.assign(generator.target, item)
            path, self.path = self.path, (self.path, tree, number)
            found.append(self.evaluate(element))
            self.path = path
        return self.machine.make_sequence(self.site(tree), found, list)

    def read_Yield(self, tree: ast.Yield) -> Value:
        self.give(Value(None) if tree.value is None else self.evaluate(tree.value))
        return Value(places=frozenset((OUTSIDE,)))

    def read_YieldFrom(self, tree: ast.YieldFrom) -> Value:
        self.give(element_of(self.evaluate(tree.value)))
        return Value(places=frozenset((OUTSIDE,)))

    def assign(self, target: ast.expr, value: Value) -> None:
        raise NotImplementedError

    def give(self, value: Value) -> None:
        raise NotImplementedError


_READERS: dict[type[ast.AST], Callable[[Expressions, Any], Value]] = {
    getattr(ast, name.removeprefix("read_")): method
    for name, method in {**vars(Operations), **vars(Expressions)}.items()
    if name.startswith("read_")
}
