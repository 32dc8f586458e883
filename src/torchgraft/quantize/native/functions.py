"""Functions that a native program calls between its layers: the same as the reference form's, in one pass over memory.
Layers are in `layers.py`; which calls these take the place of is decided in `lowering.py`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from torchgraft.analysis.effects import pure

# Activations that write into their input, by the names of operators: a program that has them by name can be saved.
WRITING: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(torch.ops.aten, f"{name}_").default
    for name in (
        *("relu", "hardtanh", "hardswish", "silu", "gelu", "selu", "elu", "sigmoid", "tanh", "leaky_relu", "mish"),
        "hardsigmoid",
    )
}
_QUANTIZED_TYPES = {torch.uint8: torch.quint8, torch.int8: torch.qint8}


def _find_kernel() -> Callable[..., torch.Tensor] | None:
    """torch's kernel for quantizing: deprecated with its quantized tensors, and the only one in a single pass."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8)
    except (AttributeError, RuntimeError):
        return None
    return torch.quantize_per_tensor


_kernel = _find_kernel()


def _seen_as(tensor: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as one of the kind of `empty`: bytes for quantized tensors and back. `int_repr` would copy them."""
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


@pure
def quantize_fast(
    values: torch.Tensor, scale: float, zero_point: int, low: int = 0, high: int = 255, dtype: torch.dtype = torch.uint8
) -> torch.Tensor:
    """What `quantize_tensor` does with one scale.

    >>> quantize_fast(torch.tensor([-1.0, 0.26, 99.0]), 0.1, 10)
    tensor([  0,  13, 255], dtype=torch.uint8)
    """
    limits = torch.iinfo(dtype)
    is_whole = (low, high) == (limits.min, limits.max)
    if _kernel is not None and is_whole and not values.requires_grad and not torch.compiler.is_compiling():
        return _seen_as(
            _kernel(values.float(), scale, zero_point, _QUANTIZED_TYPES[dtype]), torch.empty(0, dtype=dtype)
        )
    steps = torch.round(values.float() * (1.0 / scale)).add_(zero_point).clamp_(low, high)
    return steps.to(dtype)


@pure
def dequantize_fast(
    steps: torch.Tensor, scale: float, zero_point: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """What `dequantize_tensor` does with one scale.

    >>> dequantize_fast(torch.tensor([0, 13], dtype=torch.uint8), 0.5, 10)
    tensor([-5.0000,  1.5000])
    """
    values = steps.float()
    if zero_point:
        values.sub_(zero_point)
    return values.mul_(scale).to(dtype)


@pure
def average_bytes(
    steps: torch.Tensor,
    scale: float,
    zero_point: int,
    dims: tuple[int, ...],
    keepdim: bool,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The mean of `dequantize_fast`, without making floats of all the bytes.

    >>> average_bytes(torch.tensor([[10, 13]], dtype=torch.uint8), 0.5, 10, (1,), False)
    tensor([0.7500])
    """
    count = math.prod([steps.shape[dim] for dim in dims])
    if not count:
        return dequantize_fast(steps, scale, zero_point, dtype).mean(dims, keepdim)
    total = steps.sum(dims, keepdim, dtype=torch.float32)
    if zero_point:
        total.sub_(zero_point * count)
    return total.mul_(scale / count).to(dtype)


@pure
def look_up(steps: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """What a table says of each byte: any function of one number between integers is one.

    >>> look_up(torch.tensor([[0, 3]], dtype=torch.uint8), torch.arange(256) ** 2)
    tensor([[0, 9]])
    """
    flat = torch.index_select(table, 0, steps.reshape(-1).to(torch.int32))
    return flat.reshape(steps.shape)


@pure
def activate_and_quantize(
    values: torch.Tensor,
    activation: str,
    options: tuple[Any, ...],
    scale: float,
    zero_point: int,
) -> torch.Tensor:
    """An activation that writes into its input, which nobody else sees, and its result in bytes.

    >>> activate_and_quantize(torch.tensor([-1.0, 1.0]), "relu", (), 0.5, 3)
    tensor([3, 5], dtype=torch.uint8)
    """
    return quantize_fast(WRITING[activation](values, *options), scale, zero_point)


@pure
def activate(values: torch.Tensor, activation: str, options: tuple[Any, ...]) -> torch.Tensor:
    """An activation that writes into its input, which nobody else sees.

    >>> activate(torch.tensor([-1.0, 1.0]), "relu", ())
    tensor([0., 1.])
    """
    return WRITING[activation](values, *options)


def table_of(function: Callable[[torch.Tensor], torch.Tensor], scale: float, zero_point: int) -> torch.Tensor:
    """The 256 results of a function of bytes."""
    return function((torch.arange(256, dtype=torch.float32) - zero_point) * scale)


@pure
def max_pool_bytes(
    steps: torch.Tensor,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> torch.Tensor:
    """What `max_pool2d` does, on bytes: torch's own kernel takes only small images of them.

    >>> max_pool_bytes(torch.arange(16, dtype=torch.uint8).reshape(1, 1, 4, 4), (2, 2), (2, 2), (0, 0), (1, 1))
    tensor([[[[ 5,  7],
              [13, 15]]]], dtype=torch.uint8)
    """
    if steps.dim() == 3:
        return max_pool_bytes(steps.unsqueeze(0), kernel, stride, padding, dilation).squeeze(0)
    if _kernel is not None and steps.dtype in _QUANTIZED_TYPES and not torch.compiler.is_compiling():
        steps = steps.contiguous(memory_format=torch.channels_last)
        # torch's kernel for quantized tensors goes by the strides, which say nothing where a size is 1.
        _, channels, height, width = steps.shape
        strides = (channels * height * width, 1, channels * width, channels)
        empty = torch._empty_affine_quantized([0], scale=1.0, zero_point=0, dtype=_QUANTIZED_TYPES[steps.dtype])
        quantized = _seen_as(steps.as_strided(steps.shape, strides), empty)
        return _seen_as(
            torch.max_pool2d(quantized, kernel, stride, padding, dilation), torch.empty(0, dtype=steps.dtype)
        )
    if any(padding):
        # The smallest step never wins over one that is there.
        around = (padding[1], padding[1], padding[0], padding[0])
        steps = torch.nn.functional.pad(steps, around, value=torch.iinfo(steps.dtype).min)
    for axis, place in ((2, 0), (3, 1)):
        reach = dilation[place] * (kernel[place] - 1)
        count = (steps.shape[axis] - reach - 1) // stride[place] + 1
        length = (count - 1) * stride[place] + 1
        result = None
        for step in range(0, reach + 1, dilation[place]):
            part = steps.narrow(axis, step, length)
            part = part[:, :, :: stride[place]] if axis == 2 else part[:, :, :, :: stride[place]]
            result = part if result is None else torch.maximum(result, part)
        assert result is not None
        steps = result
    return steps
