"""Which memory a path of module state is, so that a weight known under two paths, or by a view, is known to be one.
Which paths a node reads and writes is said in `nodes.py`; what `Places` are joined for is the business of those who ask.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch

from torchgraft.analysis.effects.findings import OUTSIDE
from torchgraft.ir.verify import find_attribute

# What the caller passed in, which may be one tensor twice.
INPUTS = "<inputs>"


class Places:
    """Memory told apart: nodes, paths of module state and what they stand for, joined where they may be the same.

    >>> places = Places(None)
    >>> places.join("a", "b")
    >>> places.find("a") == places.find("b"), places.find("a") == places.find("c")
    (True, False)
    """

    def __init__(self, root: torch.nn.Module | None) -> None:
        self._root = root
        self._parents: dict[Any, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parents)

    def find(self, place: Any) -> Any:
        """One place for all that this one is joined with; the same until something else is joined."""
        parents = self._parents
        parent = parents.get(place, place)
        while parent is not place and parent != place:
            above = parents.get(parent, parent)
            parents[place] = above
            place, parent = parent, above
        return place

    def join(self, first: Any, second: Any) -> None:
        """Let two places be one."""
        self._parents.setdefault(first, first)
        self._parents.setdefault(second, second)
        first, second = self.find(first), self.find(second)
        if first != second:
            self._parents[first] = second

    def state(self, path: str) -> str:
        """The place of module state, joined with all memory that it holds."""
        if path not in self._parents:
            self._parents[path] = path
            for piece in () if path in (OUTSIDE, INPUTS) else pieces_at(self._root, path):
                self.join(path, piece)
        return path


def pieces_at(root: torch.nn.Module | None, path: str) -> list[Hashable]:
    """Keys of everything that a path leads to: the storage of a tensor; of a module itself, all that it holds.

    Any other attribute counts as a part of the module that holds it. A path that leads nowhere has none.

    >>> tied = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    >>> tied[1].weight = tied[0].weight
    >>> pieces_at(tied, "0.weight") == pieces_at(tied, "1.weight"), pieces_at(tied, "0") == pieces_at(tied, "1")
    (True, False)
    """
    if root is None:
        return []
    value, problem = find_attribute(root, path) if path else (root, None)
    if problem is not None:
        return []
    if isinstance(value, torch.Tensor):
        return [storage_of(value)]
    if isinstance(value, torch.nn.Module):
        tensors = dict.fromkeys(storage_of(tensor) for tensor in (*value.parameters(), *value.buffers()))
        return [*[("module", id(module)) for module in value.modules()], *tensors]
    holder: Any = None
    while not isinstance(holder, torch.nn.Module):
        path = path.rpartition(".")[0]
        holder = find_attribute(root, path)[0] if path else root
    return [("module", id(holder))]


def storage_of(tensor: torch.Tensor) -> Hashable:
    """A key that tensors on the same memory share."""
    try:
        return "storage", tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # a sparse tensor, say, has no storage
        return "tensor", id(tensor)
