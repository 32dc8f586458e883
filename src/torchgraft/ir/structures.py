"""Results that are objects of their own kind (a cache, say): taken apart into tensors and a template, and put together again.
Containers that torch's pytree knows are not handled here.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class _Slot(NamedTuple):
    number: int


class _Named:
    """A named tuple in a template. Its own class may want tensors where the slots are, when the template is copied."""

    def __init__(self, kind: Any, items: list[Any]) -> None:
        self.kind = kind
        self.items = items


def has_attributes(value: Any) -> bool:
    """Whether an object is more than a value: it has attributes that may change, in its `__dict__` or in slots."""
    if hasattr(value, "__dict__"):
        return True
    is_value = type(value).__hash__ not in (None, object.__hash__) and not dataclasses.is_dataclass(value)
    return not is_value and bool(slots_of(value))


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots included.

    >>> attributes_of(_Slot(1))
    {}
    """
    slots = {name: getattr(value, name) for name in slots_of(value) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def set_attributes(value: Any, attributes: dict[str, Any]) -> None:
    """Give an object other attributes, whatever its class has to say about that (a frozen one refuses)."""
    in_slots = slots_of(value)
    for name, item in attributes.items():
        if name in in_slots:
            object.__setattr__(value, name, item)
        else:
            value.__dict__[name] = item


def slots_of(value: Any) -> tuple[str, ...]:
    """The names of the slots that the class of an object has."""
    return _slots(type(value))  # type: ignore[arg-type]


@functools.cache
def _slots(cls: type) -> tuple[str, ...]:
    found: list[str] = []
    for kind in cls.__mro__ if cls.__module__ != "builtins" else ():
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            is_private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{kind.__name__.lstrip('_')}{name}" if is_private else name)
    return tuple([name for name in found if name not in ("__dict__", "__weakref__")])


def take_apart(value: Any, is_part: Callable[[Any], bool]) -> tuple[Any, list[Any]]:
    """A copy of `value` with slots where a part was, and the parts; objects without parts in them are kept as they are."""
    parts: list[Any] = []

    def replace(leaf: Any) -> Any:
        if not is_part(leaf):
            return leaf
        parts.append(leaf)
        return _Slot(len(parts) - 1)

    return _rebuild(value, replace, {}), parts


def put_together(template: Any, *parts: Any) -> Any:
    """A new object like the template, with the parts in its slots."""
    memo: dict[int, Any] = {}

    def replace(leaf: Any) -> Any:
        if isinstance(leaf, _Named):
            return leaf.kind._make([_rebuild(item, replace, memo) for item in leaf.items])
        return parts[leaf.number] if isinstance(leaf, _Slot) else leaf

    return _rebuild(template, replace, memo)


def put_into(target: Any, keys: tuple[Any, ...], *values: Any) -> None:
    """Give a container other items, or an object other attributes.

    >>> items = [1]
    >>> put_into(items, (0, 1), 1, 2)
    >>> items
    [1, 2]
    """
    if isinstance(target, list):
        target[:] = values
    elif isinstance(target, dict):
        target.clear()
        target.update(zip(keys, values, strict=True))
    else:
        set_attributes(target, dict(zip(keys, values, strict=True)))


# Read by analysis/effects: what is written into an object of the caller's is never dead.
put_into.__torchgraft_effect__ = True  # type: ignore[attr-defined]


def _rebuild(value: Any, replace: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    new = replace(value)
    if new is not value or isinstance(value, (torch.Tensor, torch.nn.Module, type, _Slot)):
        return new
    if id(value) in memo:
        return memo[id(value)][1]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        items = [_rebuild(item, replace, memo) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value if isinstance(value, tuple) else _remember(memo, value, copy.copy(value))
        return _remember(memo, value, _with_items(value, items))
    if isinstance(value, dict):
        result = _remember(memo, value, copy.copy(value))
        for key, item in value.items():
            result[key] = _rebuild(item, replace, memo)
        return result
    if not has_attributes(value) or callable(value):
        return value
    memo[id(value)] = (value, value)
    attributes = attributes_of(value)
    changed = {name: new for name, item in attributes.items() if (new := _rebuild(item, replace, memo)) is not item}
    if not changed:
        return value
    result = _remember(memo, value, copy.copy(value))
    set_attributes(result, changed)
    return result


def _with_items(value: Any, items: list[Any]) -> Any:
    if hasattr(value, "_fields"):
        return _Named(type(value), items)
    return type(value)(items, value.maxlen) if isinstance(value, deque) else type(value)(items)


def _remember(memo: dict[int, Any], value: Any, result: Any) -> Any:
    memo[id(value)] = (value, result)  # holding the original keeps its id its own
    return result
