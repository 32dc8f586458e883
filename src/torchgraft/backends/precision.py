"""Computing in another precision than the model's own: inputs are cast on the way in, and results on the way out.
What precisions there are is said in `backend.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def type_of_model(model: Any) -> torch.dtype | None:
    """The floating-point type of a model's weights; None where it has none."""
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else []
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)


def precision_of(model: Any) -> str:
    """The precision that a model computes in, by the name that users give it."""
    return {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(type_of_model(model) or torch.float32, "fp32")


class Casting:
    """Runs a program in another precision than that of its inputs and results."""

    def __init__(self, inner: Any, cast: Callable[[Any], Any], cast_back: Callable[[Any], Any]) -> None:
        self._inner, self._cast, self._cast_back = inner, cast, cast_back

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._cast_back(self._inner(*self._cast(args), **self._cast(kwargs)))
