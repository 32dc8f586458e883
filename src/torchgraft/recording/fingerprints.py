"""What is remembered of a tensor or of a call so that it is known again: sums of values, and one name for one operation.
Who compares them, to line up the nodes of two programs, is `alignment.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchgraft.analysis.comparison import comparable, has_values


class Fingerprint(NamedTuple):
    """What is remembered of a tensor: enough to know it again; `sums` is None where there are no values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sums: tuple[float, ...] | None

    def same_values(self, other: Fingerprint) -> bool:
        """Whether the values are the same, up to what another order of additions can change."""
        if self.sums is None or other.sums is None:
            return True
        unit = torch.finfo(self.dtype).eps if self.dtype.is_floating_point or self.dtype.is_complex else 0.0
        allowed = 32 * unit * self.sums[0]
        return all(abs(mine - theirs) <= allowed for mine, theirs in zip(self.sums, other.sums, strict=True))


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """The fingerprint of a tensor as it is now."""
    sums: tuple[float, ...] | None = None
    # A tensor inside vmap and the like has no values that Python may see.
    if has_values(tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        with torch.no_grad():
            values = comparable(tensor).reshape(-1)
            odd = float((~torch.isfinite(values)).sum())
            values = torch.nan_to_num(values, nan=0.5, posinf=2.0, neginf=-2.0)
            sums = (float(values.abs().sum()), float(values.sum()), float(values @ _weights(values)), odd)
    return Fingerprint(tuple(tensor.shape), tensor.dtype, sums)


_longest_weights: dict[torch.device, torch.Tensor] = {}


def _weights(values: torch.Tensor) -> torch.Tensor:
    """Numbers that make a sum depend on the order; the longest ones made are kept, because they take long to compute."""
    known = _longest_weights.get(values.device)
    if known is None or known.numel() < values.numel():
        known = torch.arange(values.numel(), dtype=torch.float64, device=values.device).mul_(0.7).cos_()
        _longest_weights[values.device] = known
    return known[: values.numel()]


# ---- names of calls ----

_ALIASES = {"truediv": "div", "true_divide": "div", "multiply": "mul", "subtract": "sub", "invert": "bitwise_not"}


def call_key(name: str) -> str:
    """One name for the operator, the method, the in-place form and the ATen overload of an operation.

    >>> [call_key(name) for name in ("__iadd__", "add_", "add.Tensor", "__radd__", "relu")]
    ['add', 'add', 'add', 'add', 'relu']
    """
    plain = name.split(".")[0].strip("_")
    if name.startswith("__") or plain in _IN_PLACE_OPERATORS:
        if plain[:1] in ("i", "r") and plain[1:] in _OPERATORS:
            plain = plain[1:]
    return _ALIASES.get(plain, plain)


_OPERATORS = frozenset({"add", "sub", "mul", "truediv", "div", "matmul", "pow", "and", "or", "xor", "floordiv", "mod"})
_IN_PLACE_OPERATORS = frozenset({f"i{name}" for name in _OPERATORS})


__all__ = ["Fingerprint", "call_key", "fingerprint"]
