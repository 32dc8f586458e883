"""The tensors in a tree of arguments.
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
