"""The programs that are measured: models of the zoo, and chains of small operations of any length.
How they are measured is in `core`.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import nn

from torchgraft import zoo


class MixedChain(nn.Module):
    """`length` operations in a row: functions, operators and methods in equal parts."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.length // 4):
            x = torch.relu(x)
            x = x + 1.0
            x = x.neg()
            x = torch.mul(x, 0.5)
        return x


class PairChain(nn.Module):
    """`length` operations in a row, alternately relu and neg: one match of a two-node pattern per pair."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.length // 2):
            x = torch.neg(torch.relu(x))
        return x


def pair_pattern(x: torch.Tensor) -> torch.Tensor:
    return torch.neg(torch.relu(x))


def pair_replacement(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x)


def small_mlp() -> nn.Module:
    """Six small layers: kernels of a few microseconds, so that the way between them shows."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(16, 16), nn.ReLU()]
    return nn.Sequential(*layers).eval()


@cache
def zoo_model(name: str) -> nn.Module:
    """A model of the zoo, made once; weights are real, so that what a trace does to protect them is paid for."""
    options = {"layers": 12} if name == "transformer" else {}
    return zoo.create(name, **options)


@cache
def traced_chain(kind: type[nn.Module], length: int, library: ModuleType) -> Any:
    """A chain as `library` captures it, made once and shared by the experiments that leave it as it was."""
    return library.symbolic_trace(kind(length))


@cache
def traced_zoo_model(name: str, library: ModuleType) -> Any:
    return library.symbolic_trace(zoo_model(name))
