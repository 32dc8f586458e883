"""Tensors as the arrays of numpy that runtimes take, over the same memory."""

from __future__ import annotations

from typing import Any

import torch


def arrays_of(inputs: tuple[Any, ...]) -> list[Any]:
    """The tensors among the inputs of a part; one that is no array as it is (a negative view) is copied.

    >>> [array.shape for array in arrays_of((torch.ones(2, 3), 5, torch.ones(4, requires_grad=True)))]
    [(2, 3), (4,)]
    """
    try:
        return [
            item.numpy() if item.is_contiguous() else item.contiguous().numpy()
            for item in inputs
            if isinstance(item, torch.Tensor)
        ]
    except RuntimeError:
        return [item.detach().contiguous().numpy(force=True) for item in inputs if isinstance(item, torch.Tensor)]
