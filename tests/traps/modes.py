"""Traps: models that ask for their mode, switch it, or behave differently by it, and models that are cast or moved.
Random numbers themselves are in `random_numbers.py`; torch's switches (no_grad, autocast) in `regions.py`;
statements that choose by the mode, and dtypes that flow, in `switched.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.traps.trap import Collection

TRAPS = Collection()


class FunctionalDropout(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, self.training) + F.dropout(x, p=0.3, training=self.training)


TRAPS.add("functional dropout", FunctionalDropout)
TRAPS.add("functional dropout captured in evaluation", FunctionalDropout, mode="eval")


class Dropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.AlphaDropout(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


TRAPS.add("dropout layers", Dropouts)
TRAPS.add("dropout layers captured in evaluation", Dropouts, mode="eval")


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(4)
        self.second = nn.BatchNorm1d(4, momentum=None)
        self.third = nn.BatchNorm1d(4, track_running_stats=False)
        self.fourth = nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.third(self.second(self.first(x)))
        return y + self.fourth(y.unsqueeze(-1).expand(-1, -1, 2)).sum(-1)


TRAPS.add("batch norm", Norms, sizes=(5,))
TRAPS.add("batch norm captured in evaluation", Norms, mode="eval", sizes=(5,))


@TRAPS.model("functional batch norm", sizes=(5,))
class FunctionalNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.mean, self.variance, training=self.training, momentum=0.1)


@TRAPS.model("branch on the mode")
class BranchOnMode(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return x * 2
        return x + 1


@TRAPS.model("the mode is true")
class ModeIsTrue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.training is True else x + 1


@TRAPS.model("the mode as a number")
class ModeAsNumber(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5 * self.training) + x * self.training


@TRAPS.model("the mode handed to a built-in function")
class ModeToBuiltin(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(x, 0.5, self.training)


@TRAPS.model("the mode in a text")
class ModeInText(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * {"True": 2.0, "False": 3.0}[str(self.training)] + len(f"{self.training}")


@TRAPS.model("the mode combined")
class ModeCombined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drop = self.training and self.p > 0
        return F.dropout(x, self.p, training=drop) if not self.training or x.shape[0] else x


@TRAPS.model("the mode as a key and an index")
class ModeAsKey(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * {True: 2.0, False: 3.0}[self.training] * [5.0, 7.0][self.training] + (self.training == True)  # noqa: E712


@TRAPS.model("the mode's type")
class ModeType(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if isinstance(self.training, bool) and not isinstance(self.training, torch.Tensor) else x


@TRAPS.model("the mode returned")
class ModeReturned(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x, self.training


@TRAPS.model("a submodule's mode")
class SubmoduleMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (2 if any(module.training for module in self.modules()) else 3)


@TRAPS.model("evaluation inside forward", sizes=(5,))
class EvaluationInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.eval()
        return self.norm(x)


@TRAPS.model("a part frozen for good", sizes=(5,))
class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.norm(x), 0.5, self.training)


@TRAPS.model("stochastic depth")
class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if not self.training:
            return x + y
        kept = torch.empty(x.shape[0], 1, dtype=x.dtype, device=x.device).bernoulli_(0.5)
        return x + y * kept / 0.5


@TRAPS.model("layers dropped at random")
class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.5:
                continue
            x = layer(x)
        return x


@TRAPS.model("tensors on the model's device", devices=True)
class OnDevice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = next(self.parameters()).device
        return x.to(here) * self.weight + torch.ones(4, device=self.weight.device) + torch.zeros(4, device=here)


@TRAPS.model("tensors of the model's dtype")
class OfDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(self.linear.weight.dtype)
        return self.linear(y) + torch.ones(4, dtype=self.linear.weight.dtype)


@TRAPS.model("a plain tensor as an attribute")
class PlainTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.scale, self.scale * 2


_GLOBAL = torch.arange(4.0)


@TRAPS.model("a global tensor")
class GlobalTensor(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x + _GLOBAL, _GLOBAL * 2


def _closure() -> Any:
    table, factor = torch.arange(4.0), 3.0
    return lambda x: (x * table * factor, table + factor)


TRAPS.add("a closure over a tensor and a number", _closure)


@TRAPS.model("constants made inside")
class ConstantsInside(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        table = torch.tensor([1.0, 2.0, 3.0, 4.0])
        return x * table, table * 2, torch.arange(4) / 2


@TRAPS.model("the rotary table kept in single precision")
class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(2) / 2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[0], device=x.device)
        with torch.autocast(device_type=x.device.type, enabled=False):
            angles = positions[:, None].float() * self.frequencies[None].float()
            turn = torch.cat([angles.cos(), angles.sin()], -1)
        return x * turn.to(dtype=x.dtype)
