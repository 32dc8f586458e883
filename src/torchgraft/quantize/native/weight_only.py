"""Linear layers of 16-bit models whose weights alone are integers, until they are multiplied. Layers whose inputs are integers,
too, are in `layers.py`; which layers become these is decided in `lowering.py`.
"""

from __future__ import annotations

from typing import Any

import torch

_aten: Any = torch.ops.aten
_PART = 1 << 20


class WeightOnlyLayer(torch.nn.Module):
    """A linear layer on 16-bit floats whose weights are integers of 8 bits, or of 4 in groups, until they are multiplied."""

    # Few rows are bound by reading the weights, which these kernels do in integers; for many, floats are faster.
    few_rows = 8

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        bias: torch.Tensor | None,
        group: int | None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.group, self.dtype, self.outputs = group, dtype, weight.shape[0]
        self.register_buffer("weight", None)
        self.register_buffer("scale", None)
        self.register_buffer("bias", bias)
        self.weight: torch.Tensor
        self.scale: torch.Tensor
        self.bias: torch.Tensor | None
        self.fill(weight, scale, zero_point)

    def fill(self, weight: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None) -> None:
        """Take weights as the reference form has them."""
        if self.group is not None:
            # The kernel takes steps from 0 to 15 and means (step - 8) * scale + shift.
            shift = torch.zeros_like(scale) if zero_point is None else (8 - zero_point.float()) * scale
            scale = torch.stack([scale, shift], -1).transpose(0, 1).contiguous()
            weight = self._packed_by_fours(weight)
        self.weight, self.scale = weight, scale.to(self.dtype)

    def _packed_by_fours(self, steps: torch.Tensor) -> torch.Tensor:
        """Two weights in each byte, as the kernel wants them; a few rows at a time, because packing takes 32-bit integers."""
        packed = torch.empty(steps.shape[0], steps.shape[1] // 2, dtype=torch.uint8, device=steps.device)
        if steps.is_meta:
            return packed
        middle = 8 if steps.dtype == torch.int8 else 0
        # The kernel's blocks are of 64 rows or of a part of that.
        count = 64 * max(1, _PART // (64 * steps.shape[1]))
        for first in range(0, steps.shape[0], count):
            part = steps[first : first + count].to(torch.int32) + middle
            packed[first : first + count] = _aten._convert_weight_to_int4pack_for_cpu(part, 1)
        return packed

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """The layer on floats."""
        rows = values.reshape(-1, values.shape[-1]).contiguous()
        if self.group is not None:
            result = _aten._weight_int4pack_mm_for_cpu(rows, self.weight, self.group, self.scale)
        elif rows.shape[0] <= self.few_rows:
            result = _aten._weight_int8pack_mm(rows, self.weight, self.scale)
        else:
            result = self._many(rows)
        if self.bias is not None:
            result = result + self.bias
        return result.reshape(*values.shape[:-1], self.outputs)

    def _many(self, rows: torch.Tensor) -> torch.Tensor:
        """Part by part, so that the floats of a part are still in the cache when they are multiplied."""
        result = rows.new_empty(rows.shape[0], self.outputs)
        size = max(1, _PART // self.weight.shape[1])
        for first in range(0, self.outputs, size):
            part = self.weight[first : first + size].to(self.dtype)
            result[:, first : first + size] = torch.nn.functional.linear(rows, part)
        return result.mul_(self.scale)

    def extra_repr(self) -> str:
        return f"outputs={self.outputs}, {'int8' if self.group is None else f'int4 in groups of {self.group}'}"
