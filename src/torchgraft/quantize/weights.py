"""Weights as integers: choosing their scales and rounding them. Values that go through the program are in `observers.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchgraft.errors import QuantizeError
from torchgraft.quantize.operators import dequantize_tensor, quantize_tensor, scale_of_range
from torchgraft.quantize.schemes import Numbers

_PART = 1 << 20
# Where few steps have to do, it pays to look for a range narrower than the extremes.
_NARROWER = [1.0 - 0.04 * step for step in range(11)]


class QuantizedWeight(NamedTuple):
    """Steps, scale and zero point (None for zero) of weights, and how the scale spreads over them."""

    steps: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    axis: int | None
    group: int | None

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The numbers that the steps stand for."""
        return dequantize_tensor(self.steps, self.scale, self.zero_point, dtype, self.axis, self.group)


@torch.no_grad()
def quantize_weight(weight: torch.Tensor, numbers: Numbers, axis: int | None, where: str = "") -> QuantizedWeight:
    """Weights rounded to the nearest step.

    >>> found = quantize_weight(torch.tensor([[1.0, -2.54], [0.1, 0.0]]), Numbers(8, True, True, "channel"), 0)
    >>> found.steps.tolist(), [round(item, 4) for item in found.scale.tolist()]
    ([[50, -127], [127, 0]], [0.02, 0.0008])
    """
    by_rows = numbers.per == "group" or (numbers.per == "channel" and axis == 0)
    if by_rows and weight.numel() > _PART and not weight.is_meta:
        return _in_parts(weight, numbers, axis, where)
    if not weight.is_meta and not bool(torch.isfinite(weight).all()):
        raise QuantizeError(f"the weights of {where or 'a layer'} hold infinite values or no numbers\ncheck the model")
    scale, zero_point = weight_scale(weight, numbers, axis)
    axis, group = spread(numbers, axis)
    low, high = numbers.range
    steps = quantize_tensor(weight.detach(), scale, zero_point, low, high, numbers.dtype, axis, group)
    return QuantizedWeight(steps, scale, zero_point, axis, group)


def _in_parts(weight: torch.Tensor, numbers: Numbers, axis: int | None, where: str) -> QuantizedWeight:
    """Rows have scales of their own, so that a few at a time will do: less memory, and most of it in the cache."""
    count = max(1, _PART // (weight.numel() // weight.shape[0]))
    steps = torch.empty(weight.shape, dtype=numbers.dtype, device=weight.device)
    scales, zeros = [], []
    for first in range(0, weight.shape[0], count):
        part = quantize_weight(weight[first : first + count], numbers, axis, where)
        steps[first : first + count] = part.steps
        scales.append(part.scale)
        zeros.append(part.zero_point)
    zero_point = None if zeros[0] is None else torch.cat([item for item in zeros if item is not None])
    return QuantizedWeight(steps, torch.cat(scales), zero_point, *spread(numbers, axis))


def spread(numbers: Numbers, axis: int | None) -> tuple[int | None, int | None]:
    """The axis and the group of a scale."""
    return (axis if numbers.per == "channel" else None), (numbers.group if numbers.per == "group" else None)


@torch.no_grad()
def weight_scale(weight: torch.Tensor, numbers: Numbers, axis: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scale and zero point for weights; with few bits, those with the least squared error."""
    values = weight.detach().float()
    if numbers.per == "group":
        rows = values.reshape(values.shape[0], -1, numbers.group)
    elif numbers.per == "channel" and axis is not None:
        rows = values.movedim(axis, 0).reshape(values.shape[axis], -1)
    else:
        rows = values.reshape(1, -1)
    lowest, highest = torch.aminmax(rows, dim=-1)
    low, high = numbers.range
    scale, zero_point = scale_of_range(lowest, highest, low, high, numbers.symmetric)
    if numbers.bits <= 4 and numbers.kind == "int" and not weight.is_meta:
        scale, zero_point = _least_error(rows, lowest, highest, numbers)
    if numbers.per in ("tensor", "row"):
        scale, zero_point = scale.reshape(()), zero_point.reshape(())
    return scale, None if numbers.symmetric and numbers.signed else zero_point


def _least_error(
    rows: torch.Tensor, lowest: torch.Tensor, highest: torch.Tensor, numbers: Numbers
) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = numbers.range
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for part in _NARROWER:
        scale, zero = scale_of_range(lowest * part, highest * part, low, high, numbers.symmetric)
        unit, middle = scale.unsqueeze(-1), zero.unsqueeze(-1)
        steps = (rows / unit).round_().add_(middle).clamp_(low, high)
        error = steps.sub_(middle).mul_(unit).sub_(rows).square_().sum(-1)
        if best is None:
            best = error, scale, zero
        else:
            better = error < best[0]
            best = (
                torch.where(better, error, best[0]),
                torch.where(better, scale, best[1]),
                torch.where(better, zero, best[2]),
            )
    assert best is not None
    return best[1], best[2]
