"""Values of a watched run by their parts: what is in a container or an object now, whether that has changed, and how it is
changed. The nodes of values are the business of `values.py`.
"""

from __future__ import annotations

import contextlib
from types import BuiltinFunctionType
from typing import Any

import torch

from torchgraft.capturing.flowing.dtypes import FlowingDtype
from torchgraft.capturing.flowing.sizes import unwrapped
from torchgraft.capturing.patching.module_patches import TrainingFlag, plain_mode
from torchgraft.capturing.tracer_base import UNCHANGED_TYPES
from torchgraft.ir.arguments import rebuild_tuple
from torchgraft.ir.structures import attributes_of, has_attributes, set_attributes


def closed_over(function: Any) -> dict[str, Any]:
    """The variables that a function closes over, as far as they have values by now."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def parts_now(value: Any) -> dict[Any, Any]:
    """The parts of a container, or the attributes of an object, as they are now."""
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    return {} if callable(value) or not has_attributes(value) else attributes_of(value)


def same_parts(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return len(now) == len(before) and all(key in now and now[key] is part for key, part in before.items())


def mutable_parts(value: Any, depth: int = 0) -> list[tuple[Any, dict[Any, Any]]]:
    """Containers and objects among the arguments of a call, which the call may change."""
    if depth > 4 or isinstance(value, (torch.Tensor, torch.nn.Module, type, str, int, float, BuiltinFunctionType)):
        return []
    parts = parts_now(value)
    found = (
        []
        if isinstance(value, tuple) or (not parts and not isinstance(value, (list, dict)))
        else [(value, dict(parts))]
    )
    for item in list(parts.values()):
        found += mutable_parts(item, depth + 1)
    return found


def with_parts(value: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(value, tuple):
        return rebuild_tuple(value, list(parts.values()))
    if isinstance(value, list):
        value[:] = parts.values()
    elif isinstance(value, dict):
        for key, part in parts.items():  # what is no plain dict may not have update()
            value[key] = part
    else:
        set_attributes(value, parts)
    return value


def concrete(value: Any) -> Any:
    """The same value with plain numbers in the place of symbolic ones."""
    cls = type(value)
    if cls is torch.Tensor or cls in UNCHANGED_TYPES:
        return value
    if cls is tuple or cls is list:
        return cls([concrete(item) for item in value])
    number = unwrapped(value)
    if number is not None:
        return number.value
    if cls is TrainingFlag:
        return plain_mode(value)
    if cls is FlowingDtype:
        return value.value
    if isinstance(value, torch.Size):
        return torch.Size([concrete(item) for item in value])
    if cls is dict:
        return {key: concrete(item) for key, item in value.items()}
    if cls is slice:
        return slice(concrete(value.start), concrete(value.stop), concrete(value.step))
    return value
