"""Calls of a program that do something in one mode and nothing in the other.
Which statements of a model become such calls is decided while capturing.
"""

from __future__ import annotations

import torch


def add_if(condition: bool, tensor: torch.Tensor, amount: float) -> torch.Tensor:
    """Add to a tensor in place if a condition holds, as a norm counts the batches that it sees in training mode.

    >>> add_if(True, torch.tensor(3), 1), add_if(False, torch.tensor(3), 1)
    (tensor(4), tensor(3))
    """
    return tensor.add_(amount) if condition else tensor
