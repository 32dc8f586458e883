"""What random programs are made of besides torch: a model with one submodule of each kind, and functions to call.
Which of it a program uses, and how, is drawn in `strategies.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

import torchgraft


class Residual(nn.Module):
    """A module of the user's own: no leaf, with a buffer that it writes and a mode that it asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(value.detach().mean(0), alpha=0.1)
        result = self.inner(value)
        result += value
        return nn.functional.dropout(result, 0.25, self.training)


class Parts(nn.Module):
    """One submodule, parameter and buffer of each kind; the random programs are forwards of its subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.batch_norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.relu = nn.ReLU(inplace=True)
        self.sequence = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.residual = Residual()
        self.alias = self.linear
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("memory", torch.zeros(3))
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.offset = torch.ones(3)
        self.factor = 3
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                steps = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
                parameter.copy_(torch.sin(steps * (number + 1) + number))
        self.memory.copy_(torch.tensor([0.5, -0.25, 0.75]))


class Pair(NamedTuple):
    """What some programs return."""

    first: torch.Tensor
    second: torch.Tensor


def helper(value: torch.Tensor, amount: float = 0.5) -> torch.Tensor:
    """Traced through."""
    result = value * amount
    result += 1
    return result


@torch.no_grad()
def frozen_helper(value: torch.Tensor) -> torch.Tensor:
    """Traced through, and computed without gradients."""
    return torch.tanh(value) * 2


@torchgraft.wrap
def leaf_function(value: torch.Tensor, amount: float = 2.0) -> torch.Tensor:
    """Kept whole: it branches on a value."""
    return value * amount if value.sum() > 0 else value - amount


@torchgraft.wrap
def leaf_write(value: torch.Tensor) -> None:
    """Kept whole, and called for what it writes."""
    value.mul_(0.5)


class Cube(torch.autograd.Function):
    """A function with a backward of its own (and not the true one, so that using it shows)."""

    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value**3

    @staticmethod
    def backward(ctx, gradient):
        (value,) = ctx.saved_tensors
        return gradient * value
