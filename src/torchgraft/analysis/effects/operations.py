"""Reading Python's operators: truth, logic, arithmetic, comparison, and the methods by which classes define them.
The other expressions are in `expressions.py`.
"""

from __future__ import annotations

import ast
import functools
import operator
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torchgraft.analysis.effects.calls import Calls
from torchgraft.analysis.effects.values import MISSING, WRAPPERS, Value, contents, is_plain_data, join

_BINARY: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any] | None]] = {
    ast.Add: ("add", operator.add),
    ast.Sub: ("sub", operator.sub),
    ast.Mult: ("mul", operator.mul),
    ast.Div: ("truediv", operator.truediv),
    ast.FloorDiv: ("floordiv", operator.floordiv),
    ast.Mod: ("mod", operator.mod),
    # Not computed: a power or a shift of two small numbers can be too large to hold.
    ast.Pow: ("pow", None),
    ast.LShift: ("lshift", None),
    ast.RShift: ("rshift", None),
    ast.MatMult: ("matmul", None),
    ast.BitOr: ("or", None),
    ast.BitXor: ("xor", None),
    ast.BitAnd: ("and", None),
}
_UNARY: dict[type[ast.unaryop], str] = {ast.USub: "__neg__", ast.UAdd: "__pos__", ast.Invert: "__invert__"}
_COMPARE: dict[type[ast.cmpop], tuple[str, str, Callable[[Any, Any], bool]]] = {
    ast.Eq: ("__eq__", "__eq__", operator.eq),
    ast.NotEq: ("__ne__", "__ne__", operator.ne),
    ast.Lt: ("__lt__", "__gt__", operator.lt),
    ast.LtE: ("__le__", "__ge__", operator.le),
    ast.Gt: ("__gt__", "__lt__", operator.gt),
    ast.GtE: ("__ge__", "__le__", operator.ge),
}


class Operations(ABC):
    """The operators in one function body."""

    def __init__(self, machine: Calls, path: Any) -> None:
        self.machine = machine
        self.path = path

    @abstractmethod
    def evaluate(self, tree: ast.expr) -> Value:
        """The value of an expression."""

    def site(self, tree: ast.AST) -> Any:
        return (self.path, tree)

    # ---- truth and logic ----

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
        return self.truth(tree, self.evaluate(tree))

    def truth(self, tree: ast.expr, value: Value) -> bool | None:
        known = value.known
        if known is not MISSING and is_plain_data(known):
            return bool(known)
        if isinstance(known, list | dict | tuple | set):
            return self.machine.length_of(value) != 0
        if isinstance(known, type | types.FunctionType | types.BuiltinFunctionType):
            return True
        if contents(value) is not None and value.cls in (list, tuple, dict):
            length = self.machine.length_of(value)
            return None if length is None else length > 0
        answer = self.machine.call_special(self.site(tree), value, ("__bool__", "__len__"))
        return bool(answer.known) if answer is not None and type(answer.known) in (bool, int) else None

    def read_BoolOp(self, tree: ast.BoolOp) -> Value:
        decisive = isinstance(tree.op, ast.Or)
        candidates: list[Value] = []
        for operand in tree.values:
            value = self.evaluate(operand)
            truth = self.truth(operand, value)
            if truth is None or truth is decisive or operand is tree.values[-1]:
                candidates.append(value)
            if truth is decisive:
                break
        return functools.reduce(join, candidates)

    def read_IfExp(self, tree: ast.IfExp) -> Value:
        truth = self.condition(tree.test)
        if truth is not None:
            return self.evaluate(tree.body if truth else tree.orelse)
        return join(self.evaluate(tree.body), self.evaluate(tree.orelse))

    # ---- arithmetic ----

    def read_UnaryOp(self, tree: ast.UnaryOp) -> Value:
        if isinstance(tree.op, ast.Not):
            truth = self.condition(tree)
            return Value() if truth is None else Value(truth)
        value = self.evaluate(tree.operand)
        if isinstance(tree.op, ast.USub) and type(value.known) in (int, float):
            return Value(-value.known)
        defined = self.machine.call_special(self.site(tree), value, (_UNARY[type(tree.op)],))
        if defined is not None:
            return defined
        # `+x` of a tensor is the tensor.
        return value if isinstance(tree.op, ast.UAdd) else self._computed(tree, value)

    def read_BinOp(self, tree: ast.BinOp) -> Value:
        left, right = self.evaluate(tree.left), self.evaluate(tree.right)
        return self.binary(tree, tree.op, left, right)

    def binary(self, tree: ast.AST, op: ast.operator, left: Value, right: Value) -> Value:
        name, function = _BINARY[type(op)]
        if function is not None and type(left.known) in (int, float) and type(right.known) in (int, float):
            try:
                return Value(function(left.known, right.known))
            except ArithmeticError:
                return Value()
        defined = [
            self.machine.call_special((self.path, tree, "left"), left, (f"__{name}__",), right),
            self.machine.call_special((self.path, tree, "right"), right, (f"__r{name}__",), left),
        ]
        results = [result for result in defined if result is not None]
        if results:
            return functools.reduce(join, [*results, self._computed(tree, left, right)])
        return self._computed(tree, left, right)

    def _computed(self, tree: ast.AST, *operands: Value) -> Value:
        """Arithmetic on tensors makes a tensor, on lists a list that holds what they held, on numbers a number."""
        if not any(operand.places for operand in operands):
            return Value()
        return self.machine.make(self.site(tree), operands)

    # ---- comparison ----

    def read_Compare(self, tree: ast.Compare) -> Value:
        left = self.evaluate(tree.left)
        truths: list[bool | None] = []
        for number, (op, comparator) in enumerate(zip(tree.ops, tree.comparators, strict=True)):
            right = self.evaluate(comparator)
            truths.append(self._compare((self.path, tree, number), op, left, right))
            left = right
        if False in truths:
            return Value(False)
        return Value() if None in truths else Value(True)

    def _compare(self, site: Any, op: ast.cmpop, left: Value, right: Value) -> bool | None:
        if isinstance(op, ast.Is | ast.IsNot):
            same = _is_same(left, right)
            return None if same is None else same == isinstance(op, ast.Is)
        if isinstance(op, ast.In | ast.NotIn):
            found = self._contains(site, right, left)
            return None if found is None else found == isinstance(op, ast.In)
        name, mirrored, function = _COMPARE[type(op)]
        if left.is_known and right.is_known and is_plain_data(left.known) and is_plain_data(right.known):
            try:
                return bool(function(left.known, right.known))
            except TypeError:
                return None
        self.machine.call_special((site, "left"), left, (name,), right)
        self.machine.call_special((site, "right"), right, (mirrored,), left)
        if (
            isinstance(op, ast.Eq | ast.NotEq)
            and left.known is right.known
            and isinstance(left.known, types.FunctionType)
        ):
            return isinstance(op, ast.Eq)
        return None

    def _contains(self, site: Any, container: Value, item: Value) -> bool | None:
        if self.machine.call_special(site, container, ("__contains__", "__iter__"), item) is not None:
            return None
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


def _is_same(left: Value, right: Value) -> bool | None:
    if left.is_known and right.is_known:
        if isinstance(left.known, WRAPPERS) or isinstance(right.known, WRAPPERS):
            return None
        if left.known is right.known:
            return True
        # Equal numbers and texts may or may not be one object.
        equal = type(left.known) is type(right.known) and is_plain_data(left.known) and left.known == right.known
        return None if equal else False
    one, other = (left, right) if left.is_known else (right, left)
    if one.is_known and one.known is None and other.cls is not None:
        return False
    return None
