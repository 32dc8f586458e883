"""The attributes a program refers to: copying them from a model into the module that runs the program, by dotted path.
Modules and tensors are shared with the model, never cloned; only the containers on the way are new.
"""

from __future__ import annotations

from typing import Any

import torch

from torchgraft.errors import GraphAttributeError
from torchgraft.ir.verify import find_attribute


def adopt_attribute(source: torch.nn.Module, destination: torch.nn.Module, path: str) -> None:
    """Make `destination.path` be `source.path`, with empty modules where the way is not there yet."""
    value, reason = find_attribute(source, path)
    if reason is not None:
        raise GraphAttributeError(
            f"the program refers to '{path}', but {reason}; add the attribute to the module that the graph module is made of"
        )
    *containers, name = path.split(".")
    holder, original = destination, source
    for part in containers:
        original = getattr(original, part)
        inner = getattr(holder, part, None)
        if inner is original:
            return  # a module of the model was adopted whole, and everything in it came along
        if inner is None:
            inner = torch.nn.Module()
            if isinstance(original, torch.nn.Module):
                inner.training = original.training
            setattr(holder, part, inner)
        holder = inner
    persistent = isinstance(original, torch.nn.Module) and _is_persistent_buffer(original, name)
    place_attribute(holder, name, value, persistent)


def assign_attribute(destination: torch.nn.Module, path: str, value: Any) -> None:
    """Make `destination.path` be `value`, with empty modules where the way is not there yet."""
    *containers, name = path.split(".")
    holder = destination
    for part in containers:
        inner = getattr(holder, part, None)
        if inner is None:
            inner = torch.nn.Module()
            setattr(holder, part, inner)
        holder = inner
    place_attribute(holder, name, value, persistent=True)


def place_attribute(holder: Any, name: str, value: Any, persistent: bool) -> None:
    """Set one attribute; a tensor becomes a buffer, so that it follows the module to other devices."""
    is_plain_tensor = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    if is_plain_tensor and isinstance(holder, torch.nn.Module) and getattr(holder, name, None) is not value:
        if hasattr(holder, name):
            delattr(holder, name)
        holder.register_buffer(name, value, persistent=persistent)
    else:
        setattr(holder, name, value)


def _is_persistent_buffer(module: torch.nn.Module, name: str) -> bool:
    """Plain tensor attributes are not in the model's state_dict, so they must not appear in the program's either."""
    return name in module._buffers and name not in module._non_persistent_buffers_set
