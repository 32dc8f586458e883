"""Statistics of a tensor, kept instead of the tensor itself: the measures that `record(reduce=...)` knows by name.
Which nodes they are taken of, and when, is decided in `record.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchgraft.analysis.comparison import comparable, has_values
from torchgraft.errors import suggestion

HISTOGRAM_BINS = 32

Reduction = bool | str | Iterable[str] | Callable[[torch.Tensor], Any] | None


class Statistics(dict[str, Any]):
    """What was measured of one tensor, by name; also `shape` and `dtype`. NaN and infinities are counted, not measured.

    `histogram` is (counts, lowest, highest) over equal parts of the range of the finite values.
    """

    def __str__(self) -> str:
        measures = [f"{name}={_text(value)}" for name, value in self.items() if name not in ("shape", "dtype")]
        return f"{self['dtype']}{list(self['shape'])} {' '.join(measures)}"


def _text(value: Any) -> str:
    return (
        f"{value:.4g}"
        if isinstance(value, float)
        else f"[{len(value[0])} bins]"
        if type(value) is tuple
        else str(value)
    )


# Each takes the finite values as 64-bit floats, of which there is at least one.
_MEASURES: dict[str, Callable[[torch.Tensor], Any]] = {
    "min": lambda values: float(values.min()),
    "max": lambda values: float(values.max()),
    "mean": lambda values: float(values.mean()),
    "std": lambda values: float(values.std(correction=0)),
    "norm": lambda values: float(torch.linalg.vector_norm(values)),
    "histogram": lambda values: _histogram(values),
}
_COUNTS: dict[str, Callable[[torch.Tensor], int]] = {
    "zeros": lambda values: values.numel() - int(torch.count_nonzero(values)),
    "nan": lambda values: int(torch.isnan(values).sum()),
    "inf": lambda values: int(torch.isinf(values).sum()),
}
MEASURES = ("min", "max", "mean", "std", "norm", "zeros", "nan", "inf", "histogram")
# The histogram takes longer than all the others together, so it is not among what True means.
USUAL = MEASURES[:-1]


def reducer(reduce: Reduction) -> Callable[[torch.Tensor], Any] | None:
    """The function that turns a tensor into what is kept of it; None keeps the tensor.

    >>> measured = reducer(["min", "max", "nan"])
    >>> print(measured(torch.tensor([1.0, float("nan"), -2.0])))
    float32[3] min=-2 max=1 nan=1
    """
    if reduce is None or reduce is False:
        return None
    if callable(reduce):
        return reduce
    names = USUAL if reduce is True else (reduce,) if isinstance(reduce, str) else tuple(reduce)
    for name in names:
        if name not in MEASURES:
            hint = suggestion(name, MEASURES, f"there are {', '.join(MEASURES)}; or give a function")
            raise ValueError(f"there is no statistic {name!r}; {hint}")
    return lambda tensor: statistics_of(tensor, names)


def statistics_of(tensor: torch.Tensor, names: Iterable[str] = USUAL) -> Statistics:
    """The statistics of one tensor; of complex numbers those of their real and imaginary parts together."""
    found = Statistics(shape=_shape(tensor), dtype=str(tensor.dtype).removeprefix("torch."))
    if not has_values(tensor):
        return found
    with torch.no_grad():
        values = comparable(tensor).reshape(-1)
        finite = values if bool(torch.isfinite(values.sum())) else values[torch.isfinite(values)]
        for name in names:
            if name in _COUNTS:
                found[name] = _COUNTS[name](values) if name == "zeros" or len(finite) < len(values) else 0
            else:
                found[name] = _MEASURES[name](finite) if len(finite) else None
    return found


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape) if not tensor.is_nested else (tensor.size(0),)


def _histogram(values: torch.Tensor) -> tuple[list[int], float, float]:
    low, high = float(values.min()), float(values.max())
    if low == high:
        return [len(values)] + [0] * (HISTOGRAM_BINS - 1), low, high
    scaled = (values - low) * (HISTOGRAM_BINS / (high - low))
    # A range of more than the largest float overflows; so does none of its halves.
    if high - low == float("inf"):
        scaled = (values / 2 - low / 2) * (HISTOGRAM_BINS / (high / 2 - low / 2))
    places = scaled.to(torch.int64).clamp_(0, HISTOGRAM_BINS - 1)
    return torch.bincount(places, minlength=HISTOGRAM_BINS).tolist(), low, high
