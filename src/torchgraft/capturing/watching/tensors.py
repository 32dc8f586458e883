"""The tensors in a tree of arguments, and how often each was written into.
Nothing else is looked for here; proxies have a search of their own in `proxy.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a tree of tuples, lists, dicts and slices."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))


def has_tensor(value: Any) -> bool:
    """Whether there is a tensor in a tree."""
    return next(tensors_in(value), None) is not None


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written into, as far as torch counts it."""
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode, where nobody counts
        return 0


def versions_in(value: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[int, int]:
    """The version of every tensor among the arguments of a call."""
    found: dict[int, int] = {}
    for item in (*value[0], *value[1].values()):
        if type(item) is torch.Tensor:
            found[id(item)] = version_of(item)
        else:
            found.update({id(tensor): version_of(tensor) for tensor in tensors_in(item)})
    return found
