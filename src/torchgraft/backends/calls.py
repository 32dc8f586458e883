"""What a call looks like: as a key, by which the program that fits it is found quickly, and in a few words for people.
Whether a program really fits is for its guards to say.
"""

from __future__ import annotations

from typing import Any

import torch

_PLAIN = frozenset({int, float, bool, str, bytes, type(None), torch.dtype, torch.device, complex})


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Any:
    """What a call looks like, in a form that can be a key: shapes and dtypes of tensors, plain values, classes of others.

    >>> call_key((torch.ones(2, 3), 5), {}, False) == call_key((torch.zeros(2, 3), 5), {}, False)
    True
    """
    parts: list[Any] = [training, torch.is_grad_enabled()]
    for value in args:
        parts.append((value.shape, value.dtype) if type(value) is torch.Tensor else _part(value, 4))
    for name, value in kwargs.items():
        parts.append(name)
        parts.append((value.shape, value.dtype) if type(value) is torch.Tensor else _part(value, 4))
    return tuple(parts)


def _part(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, torch.Tensor):
        return kind, value.shape, value.dtype
    if depth and kind in (tuple, list):
        return kind, tuple([_part(item, depth - 1) for item in value])
    if depth and kind is dict:
        return kind, tuple(
            [(name if type(name) is str else type(name), _part(item, depth - 1)) for name, item in value.items()]
        )
    return kind


def likeness(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call looks like apart from its sizes and numbers: two that are alike are likely to take one path.

    >>> likeness((torch.ones(2, 3), 5), {}) == likeness((torch.ones(4, 3), 6), {})
    True
    """
    return tuple(map(_kind, args)), tuple([(name, _kind(value)) for name, value in sorted(kwargs.items())])


def _kind(value: Any, depth: int = 4) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return kind, value.dtype, value.ndim, value.layout, bool(value.__dict__)
    if kind in (bool, str, type(None)):
        return kind, value
    if depth and kind in (tuple, list):
        return kind, frozenset([_kind(item, depth - 1) for item in value])
    if depth and kind is dict:
        return kind, frozenset([(str(name), _kind(item, depth - 1)) for name, item in value.items()])
    return kind


def call_text(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The inputs of a call in a few words.

    >>> call_text((torch.ones(2, 3), 5), {"mask": None})
    'float32[2, 3], 5, mask=None'
    """
    return ", ".join([_text(value) for value in args] + [f"{name}={_text(value)}" for name, value in kwargs.items()])


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if type(value) in _PLAIN:
        return repr(value)
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list, dict)) else type(value).__name__
