"""Values that are known in part, and the whole ones that are tried in their place.
A node is checked by running it on meta tensors, so its rules are torch's own; what is left open is filled with sizes that matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchgraft.analysis.types.tensor_type import Dyn, TensorType

_ALWAYS = (1, 2, 97, 128)
_MOST_SIZES = 10
_LARGEST = 1_000_000


@dataclass(eq=False)
class Shaped:
    """A tensor known by its sizes, some of which may be Dyn; the dtype is None where it is not known."""

    dims: tuple[Any, ...]
    dtype: torch.dtype | None = None

    @property
    def type(self) -> TensorType:
        return TensorType(self.dims)


@dataclass(eq=False)
class Holes:
    """The places of an argument tree that are left open, and the sizes that may matter in them."""

    tree: Any
    sizes: list[int] = field(default_factory=list)
    count: int = 0
    has_unknown_number: bool = False
    has_unknown_object: bool = False
    has_unknown_dtype: bool = False

    @classmethod
    def of(cls, tree: Any, related: Iterable[torch.Tensor] = ()) -> Holes:
        """Look through arguments; `related` are the tensors of a module, whose sizes its inputs have to fit."""
        holes = cls(tree)
        found, numbers = set(_ALWAYS), list[int]()
        tensors: list[Shaped] = []
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Shaped):
                tensors.append(leaf)
                holes.count += sum(size == Dyn for size in leaf.dims)
                holes.has_unknown_dtype |= leaf.dtype is None
                found |= {size for size in leaf.dims if size != Dyn}
            elif isinstance(leaf, UnknownNumber):
                holes.count += 1
                holes.has_unknown_number = True
            elif isinstance(leaf, type(Dyn)):
                holes.has_unknown_object = True
            elif type(leaf) is int:
                found.add(abs(leaf))
                numbers.append(abs(leaf))
        found |= {size for tensor in related for size in tensor.shape}
        ordered = sorted(size for size in found if size > 0)
        # The smallest show where a size is cut off, the largest where one is too small.
        kept = ordered if len(ordered) <= _MOST_SIZES else ordered[: _MOST_SIZES // 2] + ordered[-_MOST_SIZES // 2 :]
        products = {first * second for first in numbers for second in kept if 4 < first * second <= 1024}
        holes.sizes = kept + sorted(products - set(kept))[:6]
        # All parts of a view together, and what is left of that for an open size beside the known ones.
        whole = prod(number for number in numbers if number)
        known = {prod(size for size in leaf.dims if size != Dyn) for leaf in tensors}
        shares = {whole, *[whole // size for size in known if size and whole % size == 0]}
        holes.sizes += [size for size in sorted(shares) if size <= _LARGEST and size not in holes.sizes]
        return holes

    def fillings(self) -> Iterator[list[int]]:
        """Sizes for the open places: the same in all, and each alone different from the rest."""
        if not self.count:
            yield []
            return
        for size in self.sizes:
            yield [size] * self.count
        if self.count > 1:
            yield from self._one_apart(97)

    def last_fillings(self) -> Iterator[list[int]]:
        """Sizes to try when nothing has fitted so far."""
        if self.count > 1:
            for rest in (2, 1, 64):
                yield from self._one_apart(rest)

    def doubled(self, filling: list[int]) -> Iterator[list[int]]:
        """A filling that fits with each of its sizes twice as large, and all of them: it may be one of many, or the only one."""
        for place in range(self.count):
            yield [size * 2 if index == place else size for index, size in enumerate(filling)]
        if self.count > 1:
            yield [size * 2 for size in filling]

    def _one_apart(self, rest: int) -> Iterator[list[int]]:
        for place in range(self.count):
            for size in self.sizes:
                if size != rest:
                    yield [size if index == place else rest for index in range(self.count)]

    def filled(self, filling: list[int], unknown_dtype: torch.dtype) -> Any:
        """The tree with tensors and numbers in the place of what was known in part."""
        sizes = iter(filling)

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, Shaped):
                dims = [next(sizes) if size == Dyn else size for size in leaf.dims]
                return torch.empty(dims, dtype=leaf.dtype or unknown_dtype, device="meta")
            if isinstance(leaf, torch.device):
                return torch.device("meta")
            return next(sizes) if isinstance(leaf, UnknownNumber) else leaf

        return pytree.tree_map(fill, self.tree)


class UnknownNumber:
    """An integer that is not known, such as an open size that was read."""

    def __repr__(self) -> str:
        return "Dyn"


def abstract(value: Any) -> Any:
    """A value with what is known of its tensors in their place."""
    return pytree.tree_map_only(torch.Tensor, lambda t: Shaped(tuple(t.shape), t.dtype), _plain(value))


def join(first: Any, second: Any) -> Any:
    """What is true of two results of the same call."""
    if isinstance(first, Shaped) and isinstance(second, Shaped):
        if len(first.dims) != len(second.dims):
            return Dyn
        dims = tuple(a if a == b else Dyn for a, b in zip(first.dims, second.dims, strict=True))
        return Shaped(dims, first.dtype if first.dtype == second.dtype else None)
    if isinstance(first, (tuple, list)) and type(first) is type(second):
        if len(first) != len(second):
            return Dyn
        return type(first)([join(a, b) for a, b in zip(first, second, strict=True)])
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return {key: join(value, second[key]) for key, value in first.items()}
    if type(first) is int and type(second) is int:
        return first if first == second else UnknownNumber()
    if isinstance(first, UnknownNumber) and isinstance(second, (int, UnknownNumber)):
        return first
    return first if type(first) is type(second) and first == second else Dyn


def _plain(value: Any) -> Any:
    """Named tuples and sizes as tuples, so that two of them can be joined item by item."""
    if isinstance(value, tuple):
        return tuple([_plain(item) for item in value])
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
