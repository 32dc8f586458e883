"""Linear layers on a GPU by torch's own products of bytes and of 8-bit floats; each row of the input gets its scale when the
program runs. They are written in plain calls, so that torch.compile makes one kernel of all that is around the product.
"""

from __future__ import annotations

import torch

_FLOAT8_LARGEST = 448.0
_TINY = 1e-12


class RowLinear(torch.nn.Module):
    """Inputs rounded row by row, weights channel by channel; `bytes` by `torch._int_mm`, or 8-bit floats by `torch._scaled_mm`.

    >>> weight = torch.tensor([[50, -127], [127, 0]], dtype=torch.int8)
    >>> layer = RowLinear(weight, torch.tensor([0.02, 0.01]), None, torch.float32)
    >>> layer(torch.tensor([[1.0, 1.0]])).shape
    torch.Size([1, 2])
    """

    # The products take rows and columns in multiples of these, and more rows than this.
    multiple = 16
    least_rows = 17

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.dtype, self.outputs, self.inputs = dtype, weight.shape[0], weight.shape[1]
        self.is_float8 = weight.dtype == torch.float8_e4m3fn
        rows, columns = -self.outputs % self.multiple, -self.inputs % self.multiple
        padded = weight.view(torch.int8) if self.is_float8 else weight
        if rows or columns:
            padded = torch.nn.functional.pad(padded, (0, columns, 0, rows))
            scale = torch.nn.functional.pad(scale.expand(self.outputs), (0, rows))
        self.register_buffer("weight", padded.view(weight.dtype))
        self.register_buffer("scale", scale.expand(padded.shape[0]).float().contiguous())
        self.register_buffer("bias", bias)
        self.weight: torch.Tensor
        self.scale: torch.Tensor
        self.bias: torch.Tensor | None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """The layer on floats."""
        rows = values.reshape(-1, self.inputs)
        count = rows.shape[0]
        fill = max(self.least_rows - count, 0) if not self.is_float8 else -count % self.multiple
        if fill or self.weight.shape[1] != self.inputs:
            rows = torch.nn.functional.pad(rows, (0, self.weight.shape[1] - self.inputs, 0, fill))
        result = self._float8(rows) if self.is_float8 else self._bytes(rows)
        result = result[:count, : self.outputs]
        if self.bias is not None:
            result = result + self.bias
        return result.reshape(*values.shape[:-1], self.outputs)

    def _bytes(self, rows: torch.Tensor) -> torch.Tensor:
        largest = rows.float().abs().amax(-1, keepdim=True).clamp(min=_TINY)
        steps = torch.round(rows.float() * (127.0 / largest)).to(torch.int8)
        product = torch._int_mm(steps, self.weight.t())
        return (product.float() * (largest * (1.0 / 127.0)) * self.scale).to(self.dtype)

    def _float8(self, rows: torch.Tensor) -> torch.Tensor:
        largest = rows.float().abs().amax(-1, keepdim=True).clamp(min=_TINY)
        steps = (rows.float() * (_FLOAT8_LARGEST / largest)).to(torch.float8_e4m3fn)
        return torch._scaled_mm(
            steps, self.weight.t(), largest / _FLOAT8_LARGEST, self.scale.unsqueeze(0),
            out_dtype=self.dtype, use_fast_accum=True,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.outputs}, {self.inputs}, {'float8' if self.is_float8 else 'int8'}"
