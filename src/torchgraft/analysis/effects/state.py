"""Which memory a path of module state stands for, so that a weight known under two paths, or by a view, is known to be one.
Which paths a node reads and writes is said in `nodes.py`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from torchgraft.ir.verify import find_attribute


def pieces_at(root: torch.nn.Module | None, path: str) -> list[Hashable]:
    """Keys of everything that a path stands for: the storage of a tensor; of a module itself, all that it holds.

    Any other attribute counts as a part of the module that holds it. A path that leads nowhere stands for nothing.

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
