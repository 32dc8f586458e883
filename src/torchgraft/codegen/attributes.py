"""The attributes a program refers to: copying them from a model into the module that runs the program, by dotted path.
Modules and tensors are shared with the model, never cloned; only the containers on the way are new.
"""

from __future__ import annotations

from typing import Any

import torch

from torchgraft.errors import GraphAttributeError
from torchgraft.ir.verify import find_attribute

_MISSING: Any = object()


class Adoption:
    """Makes attributes of one module attributes of another, with empty modules where the way is not there yet."""

    def __init__(self, source: torch.nn.Module, destination: torch.nn.Module) -> None:
        self._source = source
        # For each path the module there in the model, and the one in its place (None if it came along whole).
        self._containers: dict[str, tuple[Any, torch.nn.Module | None]] = {"": (source, destination)}
        # What stands for a module of the model, under all of its names: a buffer that is cast or moved stays one.
        self._homes: dict[torch.nn.Module, torch.nn.Module] = {}

    def adopt(self, path: str) -> bool:
        """Make the attribute at `path` available under the same path; whether it is a plain tensor, no buffer of the model."""
        prefix, _, name = path.rpartition(".")
        original, holder = self._containers.get(prefix) or self._container(prefix, path)
        if holder is None:
            return False  # a module of the model was adopted whole, and everything in it came along
        if isinstance(original, torch.nn.Module):
            module = original._modules.get(name)
            if module is not None and not _is_of_class(holder, name):
                holder._modules[name] = self._homes[module] = module
                self._containers[path] = (module, None)
                return False
        value = getattr(original, name, _MISSING)
        if value is _MISSING:
            self._refuse(path)
        persistent = isinstance(original, torch.nn.Module) and is_persistent_buffer(original, name)
        place_attribute(holder, name, value, persistent)
        return is_plain_tensor(value) and name not in getattr(original, "_buffers", ())

    def adopt_state(self, reserved: frozenset[str]) -> None:
        """Make all that is in the model's state_dict available, used or not and under each of its names, in the model's order: so
        that checkpoints of the model and of its optimizers are checkpoints of the program."""
        self._adopt_state(self._source, "", reserved, ())
        self.put_in_order()

    def _adopt_state(
        self, module: torch.nn.Module, prefix: str, reserved: frozenset[str], outer: tuple[torch.nn.Module, ...]
    ) -> None:
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is not None and name not in reserved:
                self.adopt(prefix + name)
        for name, inner in module._modules.items():
            # Modules in a circle have no state_dict.
            if inner is not None and inner is not module and inner not in outer and name not in reserved:
                self._adopt_state(inner, f"{prefix}{name}.", frozenset(), (*outer, module))

    def put_in_order(self) -> None:
        """Order what was adopted as it is in the model: optimizers know parameters by their number."""
        for original, holder in self._containers.values():
            if holder is not None and isinstance(original, torch.nn.Module):
                for table in ("_modules", "_parameters", "_buffers"):
                    _put_in_order(getattr(holder, table), getattr(original, table))

    def _container(self, prefix: str, path: str) -> tuple[Any, torch.nn.Module | None]:
        outer, _, name = prefix.rpartition(".")
        original, holder = self._containers.get(outer) or self._container(outer, path)
        modules = original._modules if isinstance(original, torch.nn.Module) else {}
        original = modules[name] if name in modules else getattr(original, name, _MISSING)
        if original is _MISSING:
            self._refuse(path)
        if holder is not None:
            inner = holder._modules.get(name) or vars(holder).get(name)
            if inner is None:
                is_module = isinstance(original, torch.nn.Module)
                inner = self._homes.get(original) if is_module else None
                if inner is None:
                    inner = empty_module(original.training if is_module else True)
                holder._modules[name] = inner
            if isinstance(original, torch.nn.Module):
                self._homes.setdefault(original, inner)
            holder = None if inner is original else inner
        self._containers[prefix] = (original, holder)
        return original, holder

    def _refuse(self, path: str) -> None:
        reason = find_attribute(self._source, path)[1]
        raise GraphAttributeError(
            f"the program refers to '{path}', but {reason}; add the attribute to the module that the graph module is made of"
        )


def _put_in_order(table: dict[str, Any], like: dict[str, Any]) -> None:
    """Order one table as another one is; names that only the first has come last."""
    for name in [*[name for name in like if name in table], *[name for name in table if name not in like]]:
        table[name] = table.pop(name)


_EMPTY = vars(torch.nn.Module())
_TABLES = [(name, type(value)) for name, value in _EMPTY.items() if isinstance(value, (dict, set))]


def empty_module(training: bool) -> torch.nn.Module:
    """What `torch.nn.Module()` makes, in a fraction of the time: a program has dozens of them."""
    module = torch.nn.Module.__new__(torch.nn.Module)
    module.__dict__.update(_EMPTY)
    module.__dict__.update([(name, kind()) for name, kind in _TABLES])
    module.__dict__["training"] = training
    return module


_OF_MODULES = frozenset(dir(torch.nn.Module))


def _is_of_class(holder: torch.nn.Module, name: str) -> bool:
    """Whether the class of a module has something under a name."""
    return name in _OF_MODULES if type(holder) is torch.nn.Module else hasattr(type(holder), name)


def assign_attribute(destination: torch.nn.Module, path: str, value: Any, persistent: bool = True) -> None:
    """Make `destination.path` be `value`, with empty modules where the way is not there yet."""
    *containers, name = path.split(".")
    holder = destination
    for part in containers:
        inner = getattr(holder, part, None)
        if inner is None:
            inner = torch.nn.Module()
            setattr(holder, part, inner)
        holder = inner
    place_attribute(holder, name, value, persistent)


def place_attribute(holder: Any, name: str, value: Any, persistent: bool) -> None:
    """Set one attribute; a tensor becomes a buffer, so that it follows the module to other devices."""
    if is_plain_tensor(value) and isinstance(holder, torch.nn.Module) and getattr(holder, name, None) is not value:
        if hasattr(holder, name):
            delattr(holder, name)
        holder.register_buffer(name, value, persistent=persistent)
    else:
        setattr(holder, name, value)


def is_plain_tensor(value: Any) -> bool:
    """Whether a value is a tensor and no parameter."""
    return isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)


def is_persistent_buffer(module: torch.nn.Module, name: str) -> bool:
    """Plain tensor attributes are not in the model's state_dict, so they must not appear in the program's either."""
    return name in module._buffers and name not in module._non_persistent_buffers_set
