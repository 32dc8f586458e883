"""Bytes that an operator reads and writes when it runs by itself, as eager torch runs it: no fusion, no caches.
Views move nothing, an expanded tensor is read once, and a look-up reads the rows that it looks up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchgraft.analysis.cost.elementwise import is_view

_FETCHES_ROWS = frozenset({"embedding", "index", "index_select", "gather", "_embedding_bag", "masked_select", "take"})
_PUTS_ROWS = frozenset({"index_put", "index_put_", "scatter", "scatter_", "scatter_add_", "index_add_", "index_copy_"})
_OVERWRITES = frozenset({"copy_", "fill_", "zero_", "set_"})
# Memory that is not written yet, and what torch calls unsafe: views that are declared to be none.
_MAKES_NOTHING = ("empty", "new_empty", "unsafe_", "_unsafe_view", "lift_fresh")


def traffic(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """Bytes read and written by one call.

    >>> x = torch.ones(2, 3)
    >>> traffic(torch.ops.aten.add.Tensor, (x, x[0]), {}, x + x[0])
    (36, 24)
    """
    packet = getattr(func, "overloadpacket", func)
    name = getattr(packet, "__name__", str(func))
    if is_view(func) or name.startswith(_MAKES_NOTHING):
        return 0, 0
    written = [tensor for tensor, is_written in _arguments(func, args, kwargs) if is_written]
    memory = {id(tensor) for tensor, _ in _arguments(func, args, kwargs)}
    made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and id(leaf) not in memory]
    if name in _PUTS_ROWS:
        rows = [tensor for tensor, _ in list(_arguments(func, args, kwargs))[1:]]
        moved = sum(map(distinct_bytes, rows))
        return moved, max(map(distinct_bytes, rows), default=0) + sum(map(distinct_bytes, made))
    read = sum(distinct_bytes(tensor) for tensor in _read(func, name, args, kwargs, made))
    return read, sum(distinct_bytes(tensor) for tensor in [*written, *made])


def _read(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> list[Tensor]:
    tensors = list(_arguments(func, args, kwargs))
    if name in _FETCHES_ROWS:
        return [*made[:1], *[tensor for tensor, _ in tensors[1:]]]
    draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and name.endswith("_")
    blind = name in _OVERWRITES or draws or name.endswith("_like") or "out" in kwargs
    return [tensor for tensor, is_written in tensors if not (blind and (is_written or name.endswith("_like")))]


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """Every tensor among the arguments, and whether the operator writes it."""
    schema = getattr(func, "_schema", None)
    marks = [] if schema is None else [(item.name, item.alias_info) for item in schema.arguments]
    written = {name for name, mark in marks if mark is not None and mark.is_write}
    names = [name for name, _ in marks][: len(args)] + [""] * max(0, len(args) - len(marks))
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                yield leaf, name in written


def distinct_bytes(tensor: Tensor) -> int:
    """The bytes of a tensor's elements, those that an expanded dimension repeats counted once."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.itemsize
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return int(count) * tensor.itemsize
