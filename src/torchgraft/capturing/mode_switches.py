"""What a model's own `train()` does: whether it only gives every module the mode, as torch's does, or more (freezes some, merges
weights). It is tried on a stand-in for the model, which has its attributes and no right to compute anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def has_own_train(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether one of some modules is switched to another mode in a way of its own."""
    trains = {type(module).train for module in modules}
    return any(not train.__module__.startswith("torch.") for train in trains)


def only_switches(root: torch.nn.Module) -> bool:
    """Whether switching a model there and back gives every module the mode, and does nothing else.

    The stand-in shares lists and objects with the model: the caller puts those back.
    """
    copies: dict[torch.nn.Module, torch.nn.Module] = {}
    copy = _stand_in(root, copies)
    before = {module: _attributes(module) for module in copies.values()}
    try:
        for mode in (not root.training, bool(root.training)):
            with _NoCalls():
                copy.train(mode)
            for module, attributes in before.items():
                if module.__dict__["training"] is not mode or not _same(_attributes(module), attributes):
                    return False
    except Exception:
        return False  # it wants to compute, or the stand-in is not enough for it
    return True


class _NoCalls(TorchFunctionMode):
    """Refuses every call of torch's, so that what belongs to the real model stays as it is."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{function} was called")


def _stand_in(module: torch.nn.Module, copies: dict[torch.nn.Module, torch.nn.Module]) -> torch.nn.Module:
    """A module of the same class with its own tables, and stand-ins for the modules inside."""
    known = copies.get(module)
    if known is None:
        known = copies[module] = object.__new__(type(module))
        known.__dict__.update(module.__dict__)
        for name in ("_modules", "_parameters", "_buffers"):
            known.__dict__[name] = dict(module.__dict__[name])
        inside = {name: inner and _stand_in(inner, copies) for name, inner in module._modules.items()}
        known.__dict__["_modules"] = inside
    return known


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    tables = {name: dict(module.__dict__[name]) for name in ("_modules", "_parameters", "_buffers")}
    plain = {name: value for name, value in module.__dict__.items() if name not in tables and name != "training"}
    return plain | {f"{table}.{name}": value for table, values in tables.items() for name, value in values.items()}


def _same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return now.keys() == before.keys() and all(now[name] is value for name, value in before.items())
