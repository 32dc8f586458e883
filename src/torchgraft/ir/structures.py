"""Results that are objects of their own kind (a cache, say): taken apart into tensors and a template, and put together again.
Containers that torch's pytree knows are not handled here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class _Slot(NamedTuple):
    number: int


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
    return _rebuild(template, lambda leaf: parts[leaf.number] if isinstance(leaf, _Slot) else leaf, {})


def _rebuild(value: Any, replace: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    new = replace(value)
    if new is not value or isinstance(value, (torch.Tensor, torch.nn.Module, type, _Slot)):
        return new
    if id(value) in memo:
        return memo[id(value)][1]
    if isinstance(value, (list, tuple, set)):
        items = [_rebuild(item, replace, memo) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value if isinstance(value, tuple) else _remember(memo, value, copy.copy(value))
        return _remember(memo, value, type(value)(*items) if hasattr(value, "_fields") else type(value)(items))
    if isinstance(value, dict):
        result = _remember(memo, value, copy.copy(value))
        for key, item in value.items():
            result[key] = _rebuild(item, replace, memo)
        return result
    if not hasattr(value, "__dict__") or callable(value):
        return value
    memo[id(value)] = (value, value)
    changed = {name: new for name, item in vars(value).items() if (new := _rebuild(item, replace, memo)) is not item}
    if not changed:
        return value
    result = _remember(memo, value, copy.copy(value))
    for name, item in changed.items():
        result.__dict__[name] = item
    return result


def _remember(memo: dict[int, Any], value: Any, result: Any) -> Any:
    memo[id(value)] = (value, result)  # holding the original keeps its id its own
    return result
