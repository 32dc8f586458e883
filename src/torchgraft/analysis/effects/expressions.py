"""Reading expressions: their values as far as they are certain, and the effects of evaluating them.
Statements and the flow between them are in `statements.py`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import torch

from torchgraft.analysis.effects.calls import Calls
from torchgraft.analysis.effects.machine import STEP_LIMIT, Arguments
from torchgraft.analysis.effects.values import (
    MISSING,
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

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


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


class Expressions:
    """The expressions of one function body."""

    def __init__(self, machine: Calls, scope: Scope, path: Any) -> None:
        self.machine = machine
        self.scope = scope
        self.path = path

    def evaluate(self, tree: ast.expr) -> Value:
        machine = self.machine
        machine.steps += 1
        if machine.steps > STEP_LIMIT:
            machine.give_up("there is too much code to read")
        reader = _READERS.get(type(tree))
        if reader is None:
            machine.give_up(f"line {tree.lineno}: {type(tree).__name__} is not understood")
        return reader(self, tree)

    def site(self, tree: ast.AST) -> Any:
        return (self.path, tree)

    def store_name(self, name: str, value: Value) -> None:
        self.scope.names[name] = value

    # ---- truth ----

    def condition(self, tree: ast.expr) -> bool | None:
        """Whether the expression is true, or None where that depends on the run."""
        if isinstance(tree, ast.BoolOp):
            decisive = isinstance(tree.op, ast.Or)
            truths = []
            for operand in tree.values:
                truths.append(self.condition(operand))
                if truths[-1] is decisive:
                    return decisive
            return None if None in truths else not decisive
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not):
            truth = self.condition(tree.operand)
            return None if truth is None else not truth
        return self.truth(self.evaluate(tree))

    def truth(self, value: Value) -> bool | None:
        known = value.known
        if known is MISSING:
            local = contents(value)
            if local is not None and value.cls in (list, tuple, dict):
                length = self.machine.length_of(value)
                return None if length is None else length > 0
            return None
        if is_plain_data(known):
            return bool(known)
        if isinstance(known, list | dict | tuple | set):
            return self.machine.length_of(value) != 0
        if isinstance(known, type | types.FunctionType | types.BuiltinFunctionType):
            return True
        return None

    # ---- names, constants, containers ----

    def read_Constant(self, tree: ast.Constant) -> Value:
        return Value(tree.value)

    def read_Name(self, tree: ast.Name) -> Value:
        return self.scope.find(self.machine, tree.id)

    def read_NamedExpr(self, tree: ast.NamedExpr) -> Value:
        value = self.evaluate(tree.value)
        self.store_name(tree.target.id, value)
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
        self.evaluate(tree.value)
        return Value(cls=str)

    def read_Starred(self, tree: ast.Starred) -> Value:
        return element_of(self.evaluate(tree.value))

    # ---- operators ----

    def read_BoolOp(self, tree: ast.BoolOp) -> Value:
        decisive = isinstance(tree.op, ast.Or)
        candidates: list[Value] = []
        for operand in tree.values:
            value = self.evaluate(operand)
            truth = self.truth(value)
            if truth is None or truth is decisive or operand is tree.values[-1]:
                candidates.append(value)
            if truth is decisive:
                break
        return functools.reduce(join, candidates)

    def read_UnaryOp(self, tree: ast.UnaryOp) -> Value:
        if isinstance(tree.op, ast.Not):
            truth = self.condition(tree)
            return Value() if truth is None else Value(truth)
        value = self.evaluate(tree.operand)
        if isinstance(tree.op, ast.USub) and type(value.known) in (int, float):
            return Value(-value.known)
        # `+x` of a tensor is the tensor.
        return value if isinstance(tree.op, ast.UAdd) else self.result_of_operator(tree, value)

    def read_BinOp(self, tree: ast.BinOp) -> Value:
        left, right = self.evaluate(tree.left), self.evaluate(tree.right)
        return self.binary(tree, tree.op, left, right)

    def binary(self, tree: ast.AST, op: ast.operator, left: Value, right: Value) -> Value:
        function = _BINARY.get(type(op))
        if function is not None and type(left.known) in (int, float) and type(right.known) in (int, float):
            try:
                return Value(function(left.known, right.known))
            except ArithmeticError:
                return Value()
        if left.is_known and right.is_known and not left.places and not right.places:
            return Value()
        return self.result_of_operator(tree, left, right)

    def result_of_operator(self, tree: ast.AST, *operands: Value) -> Value:
        """Arithmetic on tensors makes a tensor, on lists a list that holds what they held."""
        for number, operand in enumerate(operands):
            cls = type(operand.known) if operand.is_known else operand.cls
            method = None if cls is None else self._operator_method(cls)
            if method is not None:
                self.machine.give_up(
                    f"line {getattr(tree, 'lineno', 0)}: operator of {cls.__name__ if cls else number}"
                )
        if not any(operand.places for operand in operands):
            return Value()
        return self.machine.make(self.site(tree), operands)

    @staticmethod
    def _operator_method(cls: type) -> Any:
        # Operators that a class of the user's defines in Python could do anything; tensors and builtins cannot.
        if cls.__module__ == "builtins" or issubclass(cls, torch.Tensor) or not cls.__flags__ & (1 << 9):
            return None
        return next(
            (m for name in ("__add__", "__mul__", "__or__", "__truediv__") if (m := getattr(cls, name, None))), None
        )

    def read_Compare(self, tree: ast.Compare) -> Value:
        left = self.evaluate(tree.left)
        truths: list[bool | None] = []
        for op, comparator in zip(tree.ops, tree.comparators, strict=True):
            right = self.evaluate(comparator)
            truths.append(self._compare(op, left, right))
            left = right
        if False in truths:
            return Value(False)
        return Value() if None in truths else Value(True)

    def _compare(self, op: ast.cmpop, left: Value, right: Value) -> bool | None:
        if isinstance(op, ast.Is | ast.IsNot):
            same = _is_same(left, right)
            return None if same is None else same == isinstance(op, ast.Is)
        if isinstance(op, ast.In | ast.NotIn):
            found = self._contains(right, left)
            return None if found is None else found == isinstance(op, ast.In)
        if left.is_known and right.is_known and is_plain_data(left.known) and is_plain_data(right.known):
            try:
                return bool(_COMPARE[type(op)](left.known, right.known))
            except TypeError:
                return None
        if isinstance(op, ast.Eq | ast.NotEq) and left.is_known and left.known is right.known and callable(left.known):
            return isinstance(op, ast.Eq)
        return None

    def _contains(self, container: Value, item: Value) -> bool | None:
        if not item.is_known or not is_plain_data(item.known):
            return None
        if isinstance(container.known, str) and isinstance(item.known, str):
            return item.known in container.known
        local = contents(container)
        if local is not None and container.cls is dict:
            return None if local.entries is None else item.known in local.entries
        items = self.machine.items_of(container)
        if items is None or not all(one.is_known and is_plain_data(one.known) for one in items):
            return None
        return any(type(one.known) is type(item.known) and one.known == item.known for one in items)

    def read_IfExp(self, tree: ast.IfExp) -> Value:
        truth = self.condition(tree.test)
        if truth is not None:
            return self.evaluate(tree.body if truth else tree.orelse)
        return join(self.evaluate(tree.body), self.evaluate(tree.orelse))

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
    for name, method in vars(Expressions).items()
    if name.startswith("read_")
}


def _is_same(left: Value, right: Value) -> bool | None:
    if left.is_known and right.is_known:
        if isinstance(left.known, WRAPPERS) or isinstance(right.known, WRAPPERS):
            return None
        if left.known is right.known:
            return True
        # Equal numbers and texts may or may not be one object.
        return (
            None
            if type(left.known) is type(right.known) and is_plain_data(left.known) and left.known == right.known
            else False
        )
    one, other = (left, right) if left.is_known else (right, left)
    if one.is_known and one.known is None and other.cls is not None:
        return False
    return None
