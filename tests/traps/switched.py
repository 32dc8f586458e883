"""Traps: models that go on in another mode or dtype than they were captured in, and say so in statements of their own.
Layers of torch that behave differently by the mode, and models that switch it themselves, are in `modes.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.traps.trap import Collection

TRAPS = Collection()


class OwnNorm(nn.BatchNorm1d):
    """A norm that spells out in its own forward what torch's does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.momentum or 0.0
        if self.training and self.track_running_stats:
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
        if self.training:
            by_batch = True
        else:
            by_batch = self.running_mean is None
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, by_batch, factor)


TRAPS.add("a norm of its own", lambda: OwnNorm(4), sizes=(5,))
TRAPS.add("a norm of its own captured in evaluation", lambda: OwnNorm(4), mode="eval", sizes=(5,))
TRAPS.add("a norm of its own inside", lambda: nn.Sequential(nn.Linear(4, 4), OwnNorm(4)), sizes=(5,))


@TRAPS.model("counters by the mode")
class CountersByMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("trained", torch.zeros(()))
        self.register_buffer("evaluated", torch.zeros(()))
        self.is_counted = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1.0
        if self.training:
            if self.is_counted:
                self.trained += 1
                scale = 3.0
        else:
            self.evaluated.add_(2)
        return x * scale + self.trained - self.evaluated


def _doubled(x: torch.Tensor, mode: bool) -> torch.Tensor:
    return x * 2 if mode is True else x + 1


@TRAPS.model("the mode compared elsewhere")
class ModeElsewhere(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mode = not self.training
        return _doubled(x, self.training) + (1 if mode is False else 3)


class Rows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        return x * torch.rand(x.shape[0], 1, dtype=x.dtype, device=x.device).ge(0.5)


TRAPS.add("a dropout of rows", lambda: nn.Sequential(nn.Linear(4, 4), Rows()))
TRAPS.add("a dropout of rows captured in evaluation", lambda: nn.Sequential(nn.Linear(4, 4), Rows()), mode="eval")


@TRAPS.model("the smallest number of a dtype")
class SmallestNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x.to(self.linear.weight.dtype))
        kind = y.dtype
        mask = torch.full((4, 4), torch.finfo(kind).min, dtype=kind, device=y.device).triu(1)
        return (y[:, None] + mask).softmax(-1, dtype=torch.float32).to(kind) * torch.finfo(kind).eps


@TRAPS.model("a dtype that decides")
class DtypeDecides(nn.Module):
    table = {torch.float32: 2.0, torch.float64: 3.0}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = self.linear.weight.dtype
        y = self.linear(x.to(kind)) * (2 if kind is torch.float32 else 3)
        if kind == torch.float64 or kind not in (torch.float32, torch.float16):
            y = y + 1
        return y * self.table[kind] + len(str(kind)) + kind.itemsize + torch.finfo(kind).bits
