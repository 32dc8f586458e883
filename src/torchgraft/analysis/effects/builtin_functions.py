"""Python's own functions and methods: which of them have effects, and what is known of their results.
Operators of torch are in `operators.py`.
"""

from __future__ import annotations

import inspect
import operator
import re
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from torchgraft.analysis.effects.attributes import Attributes
from torchgraft.analysis.effects.machine import Arguments
from torchgraft.analysis.effects.values import (
    MISSING,
    OUTSIDE,
    WRAPPERS,
    Value,
    contents,
    element_of,
    is_plain_data,
    join,
    reachable,
)

Handler = Callable[[Attributes, Any, Arguments], Value]

# C modules whose functions compute and keep nothing.
_STATELESS_MODULES = frozenset({"math", "cmath", "itertools", "_functools"})
# They report to people or to the dispatcher of torch; a program means the same without them.
DIAGNOSTICS: frozenset[Any] = frozenset({warnings.warn, torch._C._log_api_usage_once})
_TORCH_FUNCTION_QUESTIONS = frozenset(
    {
        torch._C._has_torch_function,
        torch._C._has_torch_function_unary,
        torch._C._has_torch_function_variadic,
    }
)
_QUESTION = re.compile(r"_?(is|has|get|are|can|len)_")

# A method that an immutable type has, or the immutable twin of a container, changes nothing.
_IMMUTABLE_TYPES = (str, bytes, int, float, complex, tuple, frozenset, range, slice, types.MappingProxyType, torch.Size)
_PURE_METHODS = frozenset(name for cls in _IMMUTABLE_TYPES for name in dir(cls))
_CONCRETE_TYPES = (str, int, float, bool, bytes, tuple, list, dict, set, frozenset, range)


class _Settings(dict[str, Any]):
    """The settings of torch as a namespace, so that an answer that depends on one can be checked again."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(torch._C, name)()


_SETTINGS = _Settings()


def is_in_place_name(name: str) -> bool:
    """Whether an operator function or dunder method writes its first operand: iadd, __iadd__, setitem, __delattr__, …

    >>> [name for name in ("iadd", "ior", "index", "invert", "is_", "setitem", "getitem") if is_in_place_name(name)]
    ['iadd', 'ior', 'setitem']
    """
    bare = name.removeprefix("__").removesuffix("__")
    if bare.startswith(("setitem", "delitem", "setattr", "delattr", "setslice", "delslice")):
        return True
    return bare.startswith("i") and len(bare) > 2 and hasattr(operator, f"__{bare[1:]}__")


def call_builtin(machine: Attributes, site: Any, function: Any, arguments: Arguments) -> Value | None:
    """Call a C function that is no operator of torch; None if nothing is known of it."""
    if function in _TORCH_FUNCTION_QUESTIONS:
        # Only argument classes with __torch_function__ are asked further, and what they do cannot be known here.
        return Value(False)
    handler = _HANDLERS.get(function)
    if handler is not None:
        return handler(machine, site, arguments)
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__name__", "")
    if module == "_operator":
        return _call_operator(machine, site, name, arguments)
    if module == "builtins":
        return None if function not in _PURE_BUILTINS else _call_pure(machine, site, function, arguments)
    if module in _STATELESS_MODULES:
        return _call_pure(machine, site, function, arguments)
    if module == "sys" and name.startswith(("get", "_get", "is", "exc_info")):
        return Value(places=frozenset({OUTSIDE, *machine.raised}))
    if module.startswith("torch") and _QUESTION.match(name):
        if name.startswith("_get_") and not arguments.all() and is_plain_data(setting := function()):
            # A setting of the process, unlike the modes that a program switches itself (is_grad_enabled, …).
            machine.reads.append((_SETTINGS, name, setting))
            return Value(setting)
        return machine.make(site, [Value(places=reachable(arguments.all()))])
    return None


def is_always_pure(function: Any) -> bool:
    """Whether a C function of Python's own computes and does nothing else, whatever its arguments."""
    if not isinstance(function, types.BuiltinFunctionType):
        return False
    if function.__module__ == "_operator":
        return not is_in_place_name(function.__name__) and function.__name__ != "call"
    return function.__module__ == "math"


def _call_operator(machine: Attributes, site: Any, name: str, arguments: Arguments) -> Value | None:
    first = arguments.positional[0] if arguments.positional else Value()
    if is_in_place_name(name):
        for value in arguments.positional[1:] or [Value()]:
            machine.store(first, value, f"operator.{name} writes its first argument")
        return first
    if name == "getitem" and len(arguments.positional) == 2:
        return machine.read_item(site, first, arguments.positional[1])
    if name == "call":
        return machine.call(site, first, Arguments(arguments.positional[1:], arguments.keyword, arguments.rest))
    return _call_pure(machine, site, getattr(operator, name, None), arguments)


def _call_pure(machine: Attributes, site: Any, function: Any, arguments: Arguments) -> Value:
    """A function that does nothing itself; functions handed to it (a key, a predicate) may be called by it."""
    values = arguments.all()
    for number, value in enumerate(values):
        machine.call_special((site, number), value, _METHODS_BEHIND.get(function, ("__iter__",)))
        if isinstance(value.known, (*WRAPPERS, types.FunctionType, torch.nn.Module)):
            machine.call((site, number), value, Arguments(rest=Value(places=reachable(values))))
    if not arguments.rest and not arguments.keyword and _all_plain(values) and function in _FOLDED:
        try:
            return Value(function(*[value.known for value in values]))
        except Exception:  # the call would raise when run, which is not our concern
            return Value()
    if function in _NUMERIC:
        return Value()
    result = machine.make(site, values)
    return Value(MISSING, result.places | reachable(values) if function in _CHOOSING else result.places)


def _all_plain(values: list[Value]) -> bool:
    return all(
        value.is_known and type(value.known) in (int, float, bool, str, type(None), tuple) for value in values
    ) and all(is_plain_data(value.known) for value in values)


def call_container_method(
    machine: Attributes, site: Any, owner: Value, cls: type, name: str, arguments: Arguments
) -> Value:
    """Call a method of a builtin type."""
    local = contents(owner)
    if local is not None and local.entries is not None and name in ("get", "pop") and arguments.positional:
        key = arguments.positional[0].known
        found = local.entries.get(key) if isinstance(key, str) else element_of(owner)
        default = arguments.positional[1] if len(arguments.positional) > 1 else Value(None)
        return default if found is None else found
    if name in _PURE_METHODS and not is_in_place_name(name):
        values = arguments.all()
        if type(owner.known) in _CONCRETE_TYPES and _all_plain(values) and not arguments.keyword:
            machine._depends_on_contents(owner.known)
            try:
                found = getattr(owner.known, name)(*[value.known for value in values])
            except Exception:  # the call would raise when run, which is not our concern
                return element_of(owner)
            return Value(found, frozenset() if is_plain_data(found) else owner.places)
        if cls in (str, int, float, bool, bytes):
            return Value()
        return machine.make(site, [owner, *values])
    if not owner.places and not owner.is_known:
        machine.give_up(f"calls {name} of an object of unknown origin")
    for value in arguments.all() or [Value()]:
        machine.store(owner, value, f"{cls.__name__}.{name} changes the {cls.__name__}")
    return element_of(owner)


def is_pure_method_name(name: str) -> bool:
    """Whether a method of this name, on whichever builtin type, changes nothing."""
    return name in _PURE_METHODS and not is_in_place_name(name)


# ---- functions of whose result something is known ----


def _isinstance(machine: Attributes, site: Any, arguments: Arguments) -> Value:
    if len(arguments.positional) != 2 or arguments.rest is not None:
        return Value()
    value, classes = arguments.positional
    wanted = _as_classes(machine, classes)
    if wanted is None or any(_decides_in_python(cls) for cls in wanted):
        return Value()
    if value.is_known and not isinstance(value.known, WRAPPERS):
        return Value(isinstance(value.known, wanted))
    cls = value.cls
    if cls is None:
        return Value()
    if issubclass(cls, wanted):
        return Value(True)
    # A tensor may be of a subclass, but never a number or a container.
    return Value() if any(issubclass(one, cls) or type(one) is not type for one in wanted) else Value(False)


def _decides_in_python(cls: type) -> bool:
    """Whether asking for instances of the class would run code of the user's."""
    check = inspect.getattr_static(type(cls), "__instancecheck__", None)
    return isinstance(check, types.FunctionType) and not check.__module__.startswith(("abc", "torch", "typing", "enum"))


def _as_classes(machine: Attributes, value: Value) -> tuple[type, ...] | None:
    if isinstance(value.known, type):
        return (value.known,)
    if isinstance(value.known, types.UnionType):
        return value.known.__args__ if all(isinstance(cls, type) for cls in value.known.__args__) else None
    items = machine.items_of(value)
    if items is None:
        return None
    nested = [_as_classes(machine, item) for item in items]
    return None if any(found is None for found in nested) else tuple(cls for found in nested for cls in found or ())


def _len(machine: Attributes, site: Any, arguments: Arguments) -> Value:
    if len(arguments.positional) != 1:
        return Value()
    length = machine.length_of(arguments.positional[0])
    if length is None:
        return machine.call_special(site, arguments.positional[0], ("__len__",)) or Value()
    return Value(length)


def _getattr(machine: Attributes, site: Any, arguments: Arguments) -> Value:
    if len(arguments.positional) < 2 or arguments.rest is not None:
        return element_of(Value(places=reachable(arguments.all())))
    owner, name = arguments.positional[:2]
    if not isinstance(name.known, str):
        return element_of(owner)
    found = machine.read_attribute(site, owner, name.known)
    return join(found, arguments.positional[2]) if len(arguments.positional) > 2 and not found.is_known else found


def _hasattr(machine: Attributes, site: Any, arguments: Arguments) -> Value:
    if len(arguments.positional) == 2 and isinstance(arguments.positional[1].known, str):
        if machine.read_attribute(site, arguments.positional[0], arguments.positional[1].known).is_known:
            return Value(True)
    return Value()


def _sequence(cls: type) -> Handler:
    def construct(machine: Attributes, site: Any, arguments: Arguments) -> Value:
        items = machine.items_of(arguments.positional[0]) if len(arguments.positional) == 1 else None
        if not arguments.all():
            items = []
        if items is not None:
            return machine.make_sequence(site, items, cls)
        return machine.make(site, [Value(places=reachable(arguments.all()))], cls)

    return construct


def _dict(machine: Attributes, site: Any, arguments: Arguments) -> Value:
    if not arguments.positional and arguments.rest is None:
        return machine.make_mapping(site, arguments.keyword, dict)
    return machine.make(site, [Value(places=reachable(arguments.all()))], dict)


def _enumerate(machine: Attributes, site: Any, arguments: Arguments) -> Value:
    items = machine.items_of(arguments.positional[0]) if len(arguments.positional) == 1 else None
    if items is None or arguments.keyword:
        return machine.make(site, [Value(places=reachable(arguments.all()))])
    pairs = [machine.make_sequence((site, i), [Value(i), item], tuple) for i, item in enumerate(items)]
    return machine.make_sequence(site, pairs, list)


def _zip(machine: Attributes, site: Any, arguments: Arguments) -> Value:
    columns = [machine.items_of(value) for value in arguments.positional]
    if not columns or arguments.rest is not None or any(column is None for column in columns):
        return machine.make(site, [Value(places=reachable(arguments.all()))])
    rows = zip(*[column or [] for column in columns], strict=False)
    return machine.make_sequence(
        site, [machine.make_sequence((site, i), row, tuple) for i, row in enumerate(rows)], list
    )


def _reversed(machine: Attributes, site: Any, arguments: Arguments) -> Value:
    items = machine.items_of(arguments.positional[0]) if len(arguments.positional) == 1 else None
    if items is None:
        return machine.make(site, [Value(places=reachable(arguments.all()))])
    return machine.make_sequence(site, reversed(items), list)


def _type(machine: Attributes, site: Any, arguments: Arguments) -> Value:
    if len(arguments.positional) != 1:
        machine.give_up("type() makes a class")
    value = arguments.positional[0]
    if value.is_known and not isinstance(value.known, WRAPPERS):
        return Value(type(value.known))
    return Value()


def _iter(machine: Attributes, site: Any, arguments: Arguments) -> Value:
    if len(arguments.positional) != 1:
        machine.give_up("iter() of a function")
    items = machine.items_of(arguments.positional[0])
    if items is not None:
        return machine.make_sequence(site, items, list)
    iterator = machine.call_special(site, arguments.positional[0], ("__iter__",))
    return machine.make(site, [element_of(iterator or arguments.positional[0])])


def _next(machine: Attributes, site: Any, arguments: Arguments) -> Value:
    if not arguments.positional:
        return element_of(Value(places=reachable(arguments.all())))
    machine.write(arguments.positional[0], "next() advances an iterator")
    return Value(places=reachable(arguments.all()))


_HANDLERS: dict[Any, Handler] = {
    isinstance: _isinstance,
    len: _len,
    getattr: _getattr,
    hasattr: _hasattr,
    list: _sequence(list),
    tuple: _sequence(tuple),
    set: _sequence(set),
    dict: _dict,
    enumerate: _enumerate,
    zip: _zip,
    reversed: _reversed,
    type: _type,
    iter: _iter,
    next: _next,
}
# The builtins that only compute. Of the language's own functions there is no schema to ask; what is missing here
# (print, open, exec, setattr, …) counts as an effect.
_PURE_BUILTINS: frozenset[Any] = frozenset({
    abs, all, any, ascii, bin, bool, bytes, callable, chr, complex, dir, divmod, filter, float, format, frozenset, hash,
    hex, id, int, issubclass, map, max, min, object, oct, ord, pow, range, repr, round, slice, sorted, str, sum,
})  # fmt: skip
_NUMERIC: frozenset[Any] = frozenset({
    abs, all, any, bin, bool, callable, chr, complex, float, hash, hex, id, int, issubclass, oct, ord, repr, round, str,
})  # fmt: skip
_FOLDED: frozenset[Any] = frozenset({abs, all, any, bool, float, int, max, min, range, round, str, sum})
_CHOOSING: frozenset[Any] = frozenset({max, min, sum})
# The methods by which a class decides what a builtin does with its objects; for all others, iteration.
_METHODS_BEHIND: dict[Any, tuple[str, ...]] = {
    abs: ("__abs__",),
    bool: ("__bool__", "__len__"),
    float: ("__float__", "__index__"),
    format: ("__format__", "__str__", "__repr__"),
    hash: ("__hash__",),
    id: (),
    int: ("__int__", "__index__"),
    repr: ("__repr__",),
    round: ("__round__",),
    str: ("__str__", "__repr__"),
}
