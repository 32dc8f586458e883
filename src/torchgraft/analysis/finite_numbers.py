"""What a program that asks for infinities and NaN is told where there are no values: that all numbers are finite.
Models that compute in 16 bits ask so and clamp (`if not torch.isfinite(x).all()`). The fakes that ask this are in `fake.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_aten: Any = torch.ops.aten
_NEVER = frozenset({_aten.isnan.default, _aten.isinf.default, _aten.isposinf.default, _aten.isneginf.default})
_SAME = frozenset({_aten.all.default, _aten.all.dim, _aten.any.default, _aten.any.dim})
_OF_SEVERAL = {
    _aten.mul.Tensor: all,
    _aten.logical_and.default: all,
    _aten.bitwise_and.Tensor: all,
    _aten.logical_or.default: any,
    _aten.bitwise_or.Tensor: any,
}
_NOT = frozenset({_aten.logical_not.default, _aten.bitwise_not.default})
_EQUAL, _UNEQUAL = (_aten.eq.Tensor, _aten.eq.Scalar), (_aten.ne.Tensor, _aten.ne.Scalar)
ASKING = frozenset({*_NEVER, *_SAME, *_OF_SEVERAL, *_NOT, *_EQUAL, *_UNEQUAL})
"""The operators of which `truth_of` may know the answer."""

_TRUTH = "_torchgraft_truth"


def truth_of(func: Any, args: tuple[Any, ...]) -> bool | None:
    """What each element of the result of an operator is, if all numbers are finite; None where that depends on more.

    >>> x = torch.ones(2)
    >>> truth_of(torch.ops.aten.isnan.default, (x,)), truth_of(torch.ops.aten.eq.Tensor, (x, torch.ones(2)))
    (False, None)
    """
    if func in _NEVER:
        return False
    if func in _EQUAL or func in _UNEQUAL:
        one, other = args[:2]
        if one is other:
            return func in _EQUAL
        return func in _UNEQUAL if isinstance(other, float) and math.isinf(other) else None
    known = [noted(value) for value in args if isinstance(value, torch.Tensor)]
    if None in known or not known:
        return None
    if func in _SAME:
        return known[0]
    return not known[0] if func in _NOT else _OF_SEVERAL[func](known)


def note(result: torch.Tensor, truth: bool) -> None:
    """Remember what all elements of a tensor without values are."""
    result.__dict__[_TRUTH] = truth


def noted(value: torch.Tensor) -> bool | None:
    """What was remembered of a tensor."""
    return value.__dict__.get(_TRUTH)
