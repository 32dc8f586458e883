"""The reference form: plain functions between floats and integers (or 8-bit floats) that a quantized program calls around
ordinary operators. How scales are chosen is in `observers.py`; kernels that do the same faster are in `native/`.

`scale` and `zero_point` are tensors: of no dimension for one scale, of one for a scale per slice along `axis`, and of the shape
(rows, columns / group) for groups of columns.
"""

from __future__ import annotations

import torch

from torchgraft.analysis.effects import pure

_TINY = torch.finfo(torch.float32).tiny


@pure
def quantize_tensor(
    values: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    low: int,
    high: int,
    dtype: torch.dtype,
    axis: int | None = None,
    group: int | None = None,
) -> torch.Tensor:
    """The nearest steps of a scale, between `low` and `high`, as a plain tensor of `dtype`.

    >>> quantize_tensor(torch.tensor([-1.0, 0.26, 9.0]), torch.tensor(0.1), torch.tensor(10), 0, 100, torch.uint8)
    tensor([  0,  13, 100], dtype=torch.uint8)
    """
    steps = _steps(values, scale, zero_point, axis, group, rounds=not dtype.is_floating_point)
    return torch.clamp(steps, low, high).to(dtype).reshape(values.shape)


@pure
def dequantize_tensor(
    steps: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    dtype: torch.dtype = torch.float32,
    axis: int | None = None,
    group: int | None = None,
) -> torch.Tensor:
    """The numbers that steps of a scale stand for.

    >>> dequantize_tensor(torch.tensor([0, 13], dtype=torch.uint8), torch.tensor(0.5), torch.tensor(10))
    tensor([-5.0000,  1.5000])
    """
    if group is not None:
        parts = dequantize_tensor(_grouped(steps, group), scale.unsqueeze(-1), _last(zero_point), dtype)
        return parts.reshape(steps.shape)
    values = steps.float()
    if zero_point is not None:
        values = values - _along(zero_point, steps, axis)
    return (values * _along(scale, steps, axis)).to(dtype)


@pure
def scale_of_values(
    values: torch.Tensor, low: int, high: int, symmetric: bool, per_row: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and zero point that fit these values, which is what "dynamic" means; with `per_row` for each last dimension.

    >>> scale, zero_point = scale_of_values(torch.tensor([-1.0, 1.55]), 0, 255, symmetric=False)
    >>> round(scale.item(), 4), zero_point.item()
    (0.01, 100)
    """
    floats = values.float()
    if not floats.numel():
        lowest = highest = floats.new_zeros([*floats.shape[:-1], 1] if per_row else [])
    elif per_row:
        lowest, highest = floats.amin(-1, keepdim=True), floats.amax(-1, keepdim=True)
    else:
        lowest, highest = torch.aminmax(floats)
    return scale_of_range(lowest, highest, low, high, symmetric)


def scale_of_range(
    lowest: torch.Tensor, highest: torch.Tensor, low: int, high: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and zero point of ranges, which are made to hold zero: padding and ReLU want it to be exact.

    >>> scale_of_range(torch.tensor(0.5), torch.tensor(2.54), -127, 127, symmetric=True)
    (tensor(0.0200), tensor(0, dtype=torch.int32))
    """
    lowest, highest = lowest.clamp(max=0.0), highest.clamp(min=0.0)
    if symmetric:
        middle = (low + high + 1) // 2
        scale = torch.maximum(highest / (high - middle), lowest / (low - middle)).clamp(min=_TINY)
        return scale, torch.full_like(scale, middle, dtype=torch.int32)
    scale = ((highest - lowest) / (high - low)).clamp(min=_TINY)
    zero_point = torch.round(low - lowest / scale).clamp(low, high)
    return scale, zero_point.to(torch.int32)


@pure
def fake_quantize(
    values: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    low: int,
    high: int,
    axis: int | None = None,
    group: int | None = None,
) -> torch.Tensor:
    """Values rounded to the steps of a scale and still floats; gradients pass straight through inside the range, and are zero
    outside of it.

    >>> x = torch.tensor([0.26, 9.0], requires_grad=True)
    >>> fake_quantize(x, torch.tensor(0.5), torch.tensor(0), -8, 7).sum().backward()
    >>> x.grad
    tensor([1., 0.])
    """
    with torch.no_grad():
        steps = _steps(values, scale, zero_point, axis, group, rounds=True).reshape(values.shape)
        inside = (steps >= low) & (steps <= high)
        rounded = dequantize_tensor(steps.clamp(low, high), scale, zero_point, values.dtype, axis, group)
    constant = values.detach()
    return torch.where(inside, values, constant) + (rounded - constant)


def _steps(
    values: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    axis: int | None,
    group: int | None,
    rounds: bool,
) -> torch.Tensor:
    """Values counted in steps, with no limits; for groups in the shape of the groups."""
    if group is not None:
        values, scale, zero_point, axis = _grouped(values, group), scale.unsqueeze(-1), _last(zero_point), None
    steps = values.float() / _along(scale, values, axis)
    steps = torch.round(steps) if rounds else steps
    return steps if zero_point is None else steps + _along(zero_point, values, axis)


def _along(parameter: torch.Tensor, values: torch.Tensor, axis: int | None) -> torch.Tensor:
    """A parameter in a shape that spreads over `values`."""
    if axis is None or parameter.dim() == 0:
        return parameter
    shape = [1] * values.dim()
    shape[axis] = -1
    return parameter.reshape(shape)


def _grouped(values: torch.Tensor, group: int) -> torch.Tensor:
    return values.reshape(*values.shape[:-1], -1, group)


def _last(zero_point: torch.Tensor | None) -> torch.Tensor | None:
    return None if zero_point is None else zero_point.unsqueeze(-1)
