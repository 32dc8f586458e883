"""How far apart two tensors are, in the measures people use: largest absolute and relative error, SQNR and cosine similarity.
Whether that is too far is decided in `program_comparison.py`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from torchgraft.analysis.comparison import comparable


class ErrorMeasures(NamedTuple):
    """The error of a second tensor against a first; positions where either is NaN or infinite are left out and counted.

    `sqnr` is the ratio of signal to error in decibels, infinite where there is no error. `unlike` counts positions where one is
    NaN or infinite and the other is not the same.
    """

    max_abs: float
    max_rel: float
    sqnr: float
    cosine: float
    unlike: int = 0


_EQUAL = ErrorMeasures(0.0, 0.0, math.inf, 1.0)


def error_measures(first: torch.Tensor, second: torch.Tensor) -> ErrorMeasures:
    """The measures of two tensors with the same number of elements.

    >>> error_measures(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    ErrorMeasures(max_abs=0.5, max_rel=0.125, sqnr=20.0, cosine=0.9984603532054123, unlike=0)
    """
    with torch.no_grad():
        expected, found = comparable(first).reshape(-1), comparable(second).reshape(-1).to(first.device)
        finite = torch.isfinite(expected) & torch.isfinite(found)
        same = finite | (expected == found) | (torch.isnan(expected) & torch.isnan(found))
        unlike = int((~same).sum())
        if not bool(finite.all()):
            expected, found = expected[finite], found[finite]
        distance = (expected - found).abs()
        if not len(distance) or not bool(distance.any()):
            return _EQUAL._replace(unlike=unlike)
        sizes = expected.abs()
        signal, noise = float(torch.linalg.vector_norm(expected)), float(torch.linalg.vector_norm(distance))
        other = float(torch.linalg.vector_norm(found))
        relative = torch.where(sizes > 0, distance / sizes, torch.where(distance > 0, math.inf, 0.0))
        return ErrorMeasures(
            float(distance.max()),
            float(relative.max()),
            20 * math.log10(signal / noise) if signal and noise else -math.inf,
            float(expected @ found) / (signal * other) if signal and other else 0.0,
            unlike,
        )


__all__ = ["ErrorMeasures", "error_measures"]
