"""What another process answered to a call when the program was captured, without data: for whoever runs the program without data.
Which calls are answered by somebody else is known to those who record them; nothing here is called by a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

# The key of a node's metadata.
ANSWER = "answer"


@dataclass(frozen=True)
class TensorLooks:
    """A tensor without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> torch.Tensor:
        """A tensor that looks so."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


_KEPT = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


def looks_of(value: Any) -> Any:
    """A value with its tensors without data. Of what is neither a tensor nor plain nothing is kept: handles, futures.

    >>> looks_of((torch.ones(2), 3, object()))[0].shape
    (2,)
    """
    return _pytree.tree_map(_looks, value)


def _looks(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        return TensorLooks(tuple(map(int, leaf.shape)), leaf.stride(), leaf.dtype, leaf.device)
    return leaf if isinstance(leaf, _KEPT) else None


def made_anew(looks: Any) -> Any:
    """A value that looks so; under a mode of fake tensors it has no data.

    >>> made_anew(looks_of([torch.ones(2), 3]))[1]
    3
    """
    return _pytree.tree_map(lambda leaf: leaf.empty() if isinstance(leaf, TensorLooks) else leaf, looks)
