"""Python's own functions, operators and methods of containers: which of them have effects, and whose memory they return.
Operators of torch are in `operators.py`. Here there is no schema to ask: the pure ones are named, all others may do anything.
"""

from __future__ import annotations

import functools
import operator
import re
import types
from collections.abc import Callable
from typing import Any

import torch

from torchgraft.analysis.effects.findings import Findings, Places

Memory = Callable[[Any], Places]

# C modules whose functions compute and keep nothing.
_STATELESS_MODULES = frozenset({"math", "cmath"})
_QUESTION = re.compile(r"_?(is|has|get|are|can|len)_")
# The builtins that only compute; what is missing here (print, open, exec, setattr, next, …) may do anything.
_PURE_BUILTINS: frozenset[Any] = frozenset({
    abs, all, any, ascii, bin, bool, bytes, callable, chr, complex, dict, dir, divmod, enumerate, float, format, frozenset,
    getattr, hasattr, hash, hex, id, int, isinstance, issubclass, iter, len, list, max, min, object, oct, ord, pow, range,
    repr, reversed, round, set, slice, sorted, str, sum, tuple, type, zip,
})  # fmt: skip
# Those whose result is a number or text, never one of the arguments or something inside them.
_NUMERIC: frozenset[Any] = frozenset({
    all, any, ascii, bin, bool, bytes, callable, chr, complex, dir, float, format, hasattr, hash, hex, id, int, isinstance,
    issubclass, len, oct, ord, repr, round, str,
})  # fmt: skip
# A method that an immutable type has, or the immutable twin of a container, changes nothing.
_IMMUTABLE_TYPES = (str, bytes, int, float, complex, tuple, frozenset, range, slice, types.MappingProxyType, torch.Size)
_PURE_METHODS = frozenset(name for cls in _IMMUTABLE_TYPES for name in dir(cls))
# The containers whose other methods change the container and nothing else.
_CONTAINERS = (list, dict, set)


def is_in_place_name(name: str) -> bool:
    """Whether an operator function or dunder method writes its first operand: iadd, __iadd__, setitem, __delattr__, …

    >>> [name for name in ("iadd", "ior", "index", "invert", "is_", "setitem", "getitem") if is_in_place_name(name)]
    ['iadd', 'ior', 'setitem']
    """
    bare = name.removeprefix("__").removesuffix("__")
    if bare.startswith(("setitem", "delitem", "setattr", "delattr", "setslice", "delslice")):
        return True
    return bare.startswith("i") and len(bare) > 2 and hasattr(operator, f"__{bare[1:]}__")


def is_pure_method_name(name: str) -> bool:
    """Whether a method of this name, on whichever builtin type, changes nothing."""
    return name in _PURE_METHODS and not is_in_place_name(name)


def is_container_method(name: str) -> bool:
    """Whether a method of this name belongs to a builtin container."""
    return any(hasattr(cls, name) for cls in _CONTAINERS)


def is_always_pure(function: Any) -> bool:
    """Whether a C function of Python's own computes and does nothing else, whatever its arguments."""
    if not isinstance(function, types.BuiltinFunctionType):
        return False
    if function.__module__ == "_operator":
        return not is_in_place_name(function.__name__) and function.__name__ != "call"
    return function.__module__ in _STATELESS_MODULES


def find_python_call(
    findings: Findings, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], memory: Memory
) -> bool:
    """Find out what a call of one of Python's own functions does; False if nothing is known of it."""
    name, home = getattr(function, "__name__", ""), getattr(function, "__module__", None) or ""
    # An item belongs to the first argument, whatever the index is.
    given = memory(args[:1]) if function is operator.getitem else memory((args, kwargs))
    if home == "_operator" and is_in_place_name(name):
        findings.write(memory(args[:1]), f"operator.{name} writes its first argument")
        findings.shares |= memory(args[:1])
    elif is_always_pure(function):
        findings.shares |= given if home == "_operator" else set()
    elif function is getattr and len(args) > 1 and _is_plain_attribute(args[1]):
        pass
    elif function in _PURE_BUILTINS:
        if function not in _NUMERIC and any(map(callable, (*args, *kwargs.values()))):
            return False  # a key to sort by, a function to iterate over
        findings.shares |= set() if function in _NUMERIC else given
    elif type(function) in (operator.itemgetter, operator.attrgetter) or _is_question(function, home, name):
        findings.shares |= given
    else:
        return False
    return True


@functools.cache
def _is_plain_attribute(name: Any) -> bool:
    """Whether an attribute of tensors is a number, a size or the like, in which no memory is shared: shape, dtype, device, …"""
    if not isinstance(name, str) or not isinstance(
        getattr(torch._C.TensorBase, name, None), types.GetSetDescriptorType
    ):
        return False
    try:
        found = getattr(torch.empty((1, 1), device="meta"), name)
    except Exception:
        return False
    return isinstance(found, (bool, int, torch.Size, torch.dtype, torch.device, torch.layout))


def _is_question(function: Any, home: str, name: str) -> bool:
    """Whether a function of torch's C code asks for a setting or a property (is_grad_enabled, _get_tracing_state, …)."""
    return home.startswith("torch") and isinstance(function, types.BuiltinFunctionType) and bool(_QUESTION.match(name))
