"""Comparing what two runs gave: results of any structure, walked down to their tensors and plain values.
Which runs are compared is decided in `examination`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

# Sums of another order differ in the last bits; a wrong program differs by more.
RELATIVE = 1e-4


def difference(expected: Any, found: Any, at_least: float = 0.0) -> str:
    """The first place where two results differ, by more than `at_least`, in words; empty where there is none.

    >>> difference({"a": [torch.ones(2)]}, {"a": [torch.zeros(2)]})
    "['a'][0]: by 1 at most, where values reach 1"
    """
    left, right = list(leaves(expected)), list(leaves(found))
    for (place, a), (other, b) in zip(left, right, strict=False):
        if place != other:
            return f"{place or 'result'} became {other or 'result'}"
        text = _leaf_difference(a, b, at_least)
        if text:
            return f"{place or 'result'}: {text}"
    return "" if len(left) == len(right) else f"{len(left)} parts became {len(right)}"


def is_flat(result: Any) -> bool:
    """Whether every tensor of a result is one number over and over (or not a number): such a result shows nothing."""
    tensors = [leaf for _place, leaf in leaves(result) if isinstance(leaf, torch.Tensor) and leaf.numel() > 1]
    return all(bool(leaf.isnan().any()) or bool((leaf == leaf.flatten()[0]).all()) for leaf in tensors)


def leaves(value: Any, place: str = "", seen: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every tensor and plain value in a result, with the way to it; objects such as caches are looked into."""
    if id(value) in seen:
        return
    inner = (*seen, id(value))
    if isinstance(value, torch.Tensor) or value is None or isinstance(value, (int, float, complex, str, bytes)):
        yield place, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{place}[{key!r}]", inner)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{place}[{index}]", inner)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), f"{place}.{field.name}", inner)
    elif type(value).__module__.startswith(("torch", "builtins")) or isinstance(value, type) or callable(value):
        yield place, str(value)
    else:
        for name, item in vars(value).items() if hasattr(value, "__dict__") else ():
            yield from leaves(item, f"{place}.{name}", inner)


def _leaf_difference(a: Any, b: Any, at_least: float) -> str:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        if type(a) is type(b) and (a == b or (a != a and b != b)):
            return ""
        return f"{_short(a)} became {_short(b)}"
    for name in ("shape", "dtype", "device", "requires_grad"):
        if getattr(a, name) != getattr(b, name):
            return f"{name} {getattr(a, name)} became {getattr(b, name)}"
    a, b = a.detach(), b.detach()
    if a.is_quantized:
        a, b = a.dequantize(), b.dequantize()
    if a.device.type == "meta" or a.numel() == 0 or torch.equal(a, b):
        return ""
    return _distance(a, b, at_least)


def _distance(a: torch.Tensor, b: torch.Tensor, at_least: float) -> str:
    if not (a.is_floating_point() or a.is_complex()):
        return f"{int((a != b).sum())} of {a.numel()} values"
    if not torch.equal(a.isfinite(), b.isfinite()):
        return "infinite or undefined values in other places"
    known = a.isfinite()
    largest = float(a[known].abs().max()) if bool(known.any()) else 0.0
    distance = float((a[known] - b[known]).abs().max()) if bool(known.any()) else 0.0
    if distance <= max(RELATIVE * largest, at_least):
        return ""
    return f"by {distance:.3g} at most, where values reach {largest:.3g}"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)}"
    return repr(value)[:40]
