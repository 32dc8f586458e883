"""Numbers that stay symbolic during a watched run: sizes of tensors, scalars read out of them, and arithmetic on both.
They are handed to the model as torch.SymInt, SymFloat and SymBool over the small object defined here, which torch asks the moment
Python forces a plain number; that is where a guard belongs. Which numbers are symbolic is decided in `watcher.py`.
"""

from __future__ import annotations

import functools
import linecache
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from torchgraft.capturing.flowing.memos import is_remembered
from torchgraft.ir.node import Node
from torchgraft.ir.origin import current_source_line

Number = int | float | bool


class SymbolicNumber:
    """A number with the value it has in this run, and the way to compute it in the program.

    The methods below are torch's interface for such objects (what a `SymNode` has); there is no public one.
    """

    __slots__ = ("_description", "_make", "_node", "decides", "is_branch", "is_size", "operation", "value", "watcher")

    def __init__(
        self,
        watcher: Any,
        value: Number,
        make: Callable[[], Any] | None,
        description: str | Callable[[], str] = "",
        decides: bool = True,
        is_size: bool = False,
    ) -> None:
        self.watcher = watcher
        self.value = value
        # Whether what is decided by it needs a guard, and whether it is known not to be negative.
        self.decides = decides
        self.is_size = is_size
        # Whether Python has decided something by it, and not only torch's own code.
        self.is_branch = False
        # The function and the operands that it was computed from, if it was.
        self.operation: tuple[Callable[..., Any], tuple[SymbolicNumber, ...]] | None = None
        self._make = make
        self._node: Any = None
        self._description = description

    def argument(self) -> Any:
        """The node that computes the number, made when it is first needed; the number itself where it is a constant."""
        if self._make is None or self.watcher.is_over:
            return self.value
        if self._node is None or (isinstance(self._node, Node) and self._node._erased):
            self._node = self._make()
            if isinstance(self._node, Node):
                self.watcher.plain[self._node] = self.value
        return self._node

    def __str__(self) -> str:
        if callable(self._description):
            self._description = self._description()
        return self._description or str(self.value)

    def _graph_repr(self) -> str:
        # A number in a text is a number that Python has read, unless the text is only for the case that something fails.
        return str(self.value if is_in_message() else self._decide())

    str = _graph_repr

    # ---- questions torch asks ----

    def is_int(self) -> bool:
        return type(self.value) is int

    def is_float(self) -> bool:
        return type(self.value) is float

    def is_bool(self) -> bool:
        return type(self.value) is bool

    def is_nested_int(self) -> bool:
        return False

    def is_constant(self) -> bool:
        return self._make is None

    def is_symbolic(self) -> bool:
        return True

    has_hint = is_symbolic

    def maybe_as_int(self) -> None:
        return None

    constant_int = constant_bool = nested_int = maybe_as_int

    def clone(self) -> SymbolicNumber:
        return self

    def wrap_int(self, value: int) -> SymbolicNumber:
        return SymbolicNumber(self.watcher, value, None)

    wrap_float = wrap_bool = wrap_int

    def sym_ite(self, one: SymbolicNumber, other: SymbolicNumber) -> SymbolicNumber:
        return combine(torch.sym_ite, "sym_ite", self, one, other)

    # ---- Python forces a number: this decides something, so it becomes a guard ----

    def _decide(self) -> Any:
        if self._make is not None and self.decides and not self.watcher.is_over:
            self.watcher.guard_number(self)
        return self.value

    def guard_int(self, *place: Any) -> Any:
        return self._decide()

    guard_float = guard_bool = guard_size_oblivious = expect_true = expect_size = int_ = guard_int

    # Where torch asks like this, what it does for the usual answer is right for the other one, too, or it asks again.

    def guard_or_false(self, *place: Any) -> Any:
        return False if not self.value or self.watcher.takes_usual_case(self) else self._decide()

    def guard_or_true(self, *place: Any) -> Any:
        return True if self.value or self.watcher.takes_usual_case(self) else self._decide()

    statically_known_true = guard_or_false

    def bool_(self) -> Any:
        self.is_branch = True
        return self._decide()


# Python makes the text of `assert` and `raise` only where something has failed; what is in one else is in its condition.
# What is given to people is a statement of its own: nobody goes by what the call returns.
_LEVELS = "debug|info|warning|warn|error|exception|critical|log|warning_once|info_once|warning_advice"
_MESSAGE = re.compile(
    rf"^[ \t]*(?:[\w.]*\b(?:_assert|torch_compilable_check)|(?:logger|logging)\.(?:{_LEVELS})|warnings\.warn|print)\(",
    re.MULTILINE,
)
_QUOTED = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'")


def is_in_message() -> bool:
    """Whether the user's line, or a call that begins a few lines above it, gives a text to an assertion, or to people."""
    line = current_source_line()
    if line is None:
        return False
    text = "".join([linecache.getline(line.file, number) for number in range(max(line.line - 4, 1), line.line + 1)])
    text = _QUOTED.sub("''", text)
    found = list(_MESSAGE.finditer(text))
    if not found:
        return False
    depth, rest = 1, text[found[-1].end() :]
    for place, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:  # the call ends on this line, and so does its statement
            after = rest[place + 1 :]
            return "\n" not in after.rstrip() and not after.partition("#")[0].strip()
    return True


class _Int(torch.SymInt):
    """A symbolic number as the model sees it: for `isinstance` an int, which cannot be inherited from and stay symbolic."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int


class _Float(torch.SymFloat):
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return float


class _Bool(torch.SymBool):
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return bool


_SEEN_AS: dict[type, type] = {int: _Int, float: _Float, bool: _Bool}
_SYMBOLIC = frozenset({_Int, _Float, _Bool, torch.SymInt, torch.SymFloat, torch.SymBool})


def wrapped(number: SymbolicNumber) -> Any:
    """The number as the model sees it."""
    return number.value if number._make is None else _SEEN_AS[type(number.value)](number)


def unwrapped(value: Any) -> SymbolicNumber | None:
    """The number behind what the model sees, if it is one of ours."""
    if type(value) in _SYMBOLIC:
        node = value.node
        return node if type(node) is SymbolicNumber else None
    return None


def combine(function: Callable[..., Any], symbol: str, *operands: SymbolicNumber) -> SymbolicNumber:
    """The result of a function of numbers, itself symbolic if any operand is."""
    watcher = operands[0].watcher
    same = _unchanged(function, operands)
    if same is not None:
        return same
    known = getattr(watcher, "combined", None)
    key = (
        function,
        *[(operand.value, type(operand.value)) if operand._make is None else operand for operand in operands],
    )
    if known is not None and key in known:
        return known[key]
    value = function(*[operand.value for operand in operands])
    if all(operand._make is None for operand in operands) or _is_certain(function, operands):
        return SymbolicNumber(watcher, value, None)

    def make() -> Node:
        return watcher.create_node("call_function", function, tuple([operand.argument() for operand in operands]), {})

    decides = all(operand.decides for operand in operands)
    is_size = function in _KEEP_SIZES and all(operand.is_size or _is_natural(operand) for operand in operands)
    result = SymbolicNumber(watcher, value, make, functools.partial(_text, symbol, operands), decides, is_size)
    result.operation = function, operands
    if known is not None:
        known[key] = result
    return result


def factors(number: SymbolicNumber) -> list[SymbolicNumber]:
    """The numbers whose product a number is."""
    if number.operation is None or number.operation[0] is not operator.mul:
        return [number]
    return [factor for operand in number.operation[1] for factor in factors(operand)]


def _unchanged(function: Callable[..., Any], operands: tuple[SymbolicNumber, ...]) -> SymbolicNumber | None:
    """The number that comes out as it is: `1 * n`, `n + 0`, `n // 1`."""
    if function is not operator.mul and function is not operator.add and function is not operator.floordiv:
        return None
    first, second = operands
    neutral = 0 if function is operator.add else 1
    if type(first.value) is int and type(second.value) is int:
        if second._make is None and second.value == neutral:
            return first
        if first._make is None and first.value == neutral and function is not operator.floordiv:
            return second
    return None


_KEEP_SIZES = frozenset({operator.add, operator.mul, operator.floordiv, min, max})
_COMPARISONS = frozenset({operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge})


def _is_natural(number: SymbolicNumber) -> bool:
    return number._make is None and number.value >= 0


def _is_certain(function: Callable[..., Any], operands: tuple[SymbolicNumber, ...]) -> bool:
    """Whether a comparison gives the same answer in every run: a number with itself, or a size with a negative number."""
    if function not in _COMPARISONS:
        return False
    first, second = operands
    if first is second or (first._node is not None and first._node is second._node):
        return True
    if first.is_size and second._make is None:
        return (
            second.value < 0 or second.value > 2**60 or (second.value == 0 and function in (operator.ge, operator.lt))
        )
    return False


def _text(symbol: str, operands: tuple[SymbolicNumber, ...]) -> str:
    texts = [str(operand) for operand in operands]
    is_infix = len(texts) == 2 and not symbol.isidentifier()
    return f"({texts[0]} {symbol} {texts[1]})" if is_infix else f"{symbol}({', '.join(texts)})"


# Python's operators by the names of the module `operator`, and how they read. torch has further names for some of them.
_ARITHMETIC = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "floordiv": "//",
    "truediv": "/",
    "mod": "%",
    "pow": "**",
    "and_": "&",
    "or_": "|",
    "xor": "^",
    "lshift": "<<",
    "rshift": ">>",
}
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_FURTHER_NAMES = {
    "floordiv": ("int_floordiv",),
    "truediv": ("int_truediv", "float_truediv"),
    "pow": ("pow_by_natural", "float_pow"),
    "xor": ("bitwise_xor",),
    "and_": ("bitwise_and", "sym_and"),
    "or_": ("bitwise_or", "sym_or"),
}
_ONE_SIDED: dict[str, tuple[Callable[..., Any], str]] = {
    "neg": (operator.neg, "-"),
    "pos": (operator.pos, "+"),
    "abs": (operator.abs, "abs"),
    **{function.__name__: (function, function.__name__) for function in (math.ceil, math.floor, math.trunc)},
}
# What only torch asks for.
_UNARY: dict[str, tuple[Callable[..., Any], str]] = {
    "round": (round, "round"),
    "sym_float": (float, "float"),
    "sym_int": (int, "int"),
    "sym_not": (operator.not_, "not"),
    "sym_sqrt": (math.sqrt, "sqrt"),
    "is_integer": (float.is_integer, "is_integer"),
}


def _add_binary(name: str, function: Callable[..., Any], symbol: str) -> None:
    setattr(SymbolicNumber, name, lambda self, other: combine(function, symbol, self, other))


def _add_unary(name: str, function: Callable[..., Any], symbol: str) -> None:
    setattr(SymbolicNumber, name, lambda self, *ignored: combine(function, symbol, self))


def _add_operator(name: str, function: Callable[..., Any], symbol: str, is_swapped: bool = False) -> None:
    """Python's operator; torch's own would go a long way round, and lose what the classes above are for."""

    def apply(self: Any, other: Any) -> Any:
        mine = self.node
        theirs = unwrapped(other)
        if theirs is None:
            if type(other) not in _SEEN_AS:
                return NotImplemented
            theirs = SymbolicNumber(mine.watcher, other, None)
        result = combine(function, symbol, theirs, mine) if is_swapped else combine(function, symbol, mine, theirs)
        # A comparison is there to decide something; and where it flows on, torch wants a plain bool.
        return result.bool_() if type(result.value) is bool else wrapped(result)

    for cls in (_Int, _Float, _Bool):
        setattr(cls, name, apply)


def _add_one_sided(name: str, function: Callable[..., Any], symbol: str) -> None:
    for cls in (_Int, _Float, _Bool):
        setattr(cls, name, lambda self, *ignored: wrapped(combine(function, symbol, self.node)))


for _name, _symbol in {**_ARITHMETIC, **_COMPARED}.items():
    for _torch_name in (_name, *_FURTHER_NAMES.get(_name, ())):
        _add_binary(_torch_name, getattr(operator, _name), _symbol)
    _add_operator(f"__{_name.strip('_')}__", getattr(operator, _name), _symbol)
    if _name in _ARITHMETIC:
        _add_operator(f"__r{_name.strip('_')}__", getattr(operator, _name), _symbol, is_swapped=True)
for _function in (min, max):
    _add_binary(f"sym_{_function.__name__}", _function, _function.__name__)
for _name, (_function, _symbol) in {**_ONE_SIDED, **_UNARY}.items():
    _add_unary(_name, _function, _symbol)
    if _name in _ONE_SIDED:
        _add_one_sided(f"__{_name}__", _function, _symbol)


def _hash(self: Any) -> int:
    number = self.node
    if not number.watcher.is_over and is_remembered(number.watcher.remembering):
        # A key like no other: the function answers anew, and nothing of the run is taken for a number's answer.
        return id(self)
    if not number.watcher.is_over:
        number.watcher.before_key(self)
    return hash(number._decide())


def _plain(kind: type) -> Callable[[Any], Any]:
    def convert(self: Any) -> Any:
        number = self.node
        if not number.watcher.is_over:
            number.watcher.before_plain(kind.__name__)
        return kind(number._decide())

    return convert


def _divmod(self: Any, other: Any) -> Any:
    return self // other, self % other


def _swapped_divmod(self: Any, other: Any) -> Any:
    return other // self, other % self


for _class in (_Int, _Float, _Bool):
    for _name, _method in {"__hash__": _hash, "__divmod__": _divmod, "__rdivmod__": _swapped_divmod}.items():
        setattr(_class, _name, _method)
    for _kind in (int, float):
        setattr(_class, f"__{_kind.__name__}__", _plain(_kind))
