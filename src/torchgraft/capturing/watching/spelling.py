"""How each of torch's functions is written in a program, and what its name says about what it does; worked out once for each.
What is done about it during a watched run is decided in `watcher.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from torchgraft.capturing.symbolic.inplace import writes_by_schema
from torchgraft.capturing.watching.reads import SPECIAL
from torchgraft.ir.names import wish_of

_LEAVES_TORCH = frozenset(
    {"numpy", "__array__", "__array_wrap__", "storage", "__dlpack__", "share_memory_", "pin_memory", "data_ptr"}
    | {"untyped_storage", "__reduce_ex__", "__deepcopy__"}
)
# Calls that return as many tensors as the sizes of their input say.
_OF_ANY_LENGTH = frozenset(
    {"unbind", "split", "tensor_split", "hsplit", "vsplit", "dsplit", "chunk", "__iter__", "nonzero", "where"}
    | {"unsafe_split", "unsafe_chunk"}
)
_ON_NUMBERS = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith(("sym_", "_sym_")))
# In-place forms of Python's operators; every other name with two underscores at its end leaves its operands alone.
_WRITING_OPERATORS = frozenset(
    {"__setitem__", "__set__", *[f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")]}
    | {f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift", "div")}
)
_WRITING_FUNCTIONS = frozenset({"setattr", "batch_norm", "instance_norm", "native_batch_norm"})
_RENORMALISING = frozenset({"embedding", "embedding_bag"})
# How torch names the methods behind Python's operators, which read better in a program; with the number of operands.
_OPERATORS: dict[str, tuple[Callable[..., Any], int]] = {
    **{
        name: (getattr(operator, name), 2)
        for name in ("add", "sub", "mul", "matmul", "pow", "eq", "ne", "lt", "le", "gt", "ge")
    },
    **{
        f"__{name}__": (getattr(operator, name), 2)
        for name in ("eq", "ne", "lt", "le", "gt", "ge", "getitem", "xor", "floordiv", "lshift", "rshift")
    },
    "div": (operator.truediv, 2),
    "neg": (operator.neg, 1),
    "bitwise_not": (operator.invert, 1),
    "__invert__": (operator.invert, 1),
    "__and__": (operator.and_, 2),
    "__or__": (operator.or_, 2),
    "__setitem__": (operator.setitem, 3),
}
# Those behind `2 - x`, whose operands change places.
_REFLECTED: dict[str, Callable[..., Any]] = {
    **{
        f"__r{name}__": getattr(operator, name)
        for name in ("sub", "truediv", "floordiv", "mod", "pow", "lshift", "rshift")
    },
    "__rdiv__": operator.truediv,
}


class Spelling:
    """What there is to know about a torch function before it is called."""

    __slots__ = (
        "is_reflected",
        "is_usual",
        "is_written_back",
        "leaves_torch",
        "may_write",
        "name",
        "of_any_length",
        "on_numbers",
        "opcode",
        "operands",
        "operator",
        "operator_wish",
        "property",
        "special",
        "target",
        "wish",
    )

    def __init__(self, function: Any) -> None:
        name = getattr(function, "__name__", "")
        self.name = name
        # The property that is read or written, where the function is one of a property's two.
        self.property = _name_of(function.__self__) if name in ("__get__", "__set__") else ""
        self.special = SPECIAL.get(name)
        self.on_numbers = function in _ON_NUMBERS
        self.leaves_torch = name in _LEAVES_TORCH
        self.of_any_length = name in _OF_ANY_LENGTH or _gives_a_list(function)
        self.is_written_back = name.endswith("_") and not name.endswith("__")
        self.may_write = self.is_written_back or name in _WRITING_OPERATORS or name in _WRITING_FUNCTIONS
        self.may_write |= writes_by_schema(function)
        self.is_reflected = name in _REFLECTED
        known = (_REFLECTED[name], 2) if self.is_reflected else _OPERATORS.get(name)
        self.operator: Any = None if known is None else known[0]
        self.operands = -1 if known is None else known[1]
        is_method = _is_method(function, name)
        self.opcode = "call_method" if is_method else "call_function"
        self.target = name if is_method else function
        self.wish, self.operator_wish = wish_of(self.target), wish_of(self.operator)
        is_odd = self.special or self.property or self.on_numbers or self.leaves_torch or name == "_set_grad_enabled"
        self.is_usual = not is_odd

    def writes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call may write into what it is given."""
        if self.may_write:
            return True
        if self.name in _RENORMALISING:  # the weight, where its rows may be no longer than a number
            return (args[3] if len(args) > 3 else kwargs.get("max_norm")) is not None
        return bool(kwargs) and ("out" in kwargs or "inplace" in kwargs)


def _gives_a_list(function: Any) -> bool:
    """Whether an overload of an operator returns a list, as `aten.split.Tensor` does."""
    returns = function._schema.returns if isinstance(function, torch._ops.OpOverload) else ()
    return any(isinstance(item.type, torch.ListType) for item in returns)


def _name_of(described: Any) -> str:
    """The name of a property, whether C or Python has made it."""
    return described.fget.__name__ if isinstance(described, property) else described.__name__  # type: ignore[union-attr]


_METHODS = frozenset(
    id(value) for base in torch.Tensor.__mro__[:-1] for value in vars(base).values() if callable(value)
)


def _is_method(function: Any, name: str) -> bool:
    """What `torch.overrides.is_tensor_method_or_property` says, which looks through all of torch when it is first asked."""
    return name == "__get__" or id(function) in _METHODS


SPELLINGS: dict[Any, Spelling] = {}


def spelling_of(function: Any) -> Spelling:
    """What there is to know about a function."""
    known = SPELLINGS.get(function)
    if known is None:
        if len(SPELLINGS) > 10_000:
            SPELLINGS.clear()
        known = SPELLINGS[function] = Spelling(function)
    return known
