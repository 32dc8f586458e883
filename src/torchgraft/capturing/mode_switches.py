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
    inside = {inner: dict(inner._modules) for inner in copies.values() if inner._modules}
    try:
        for mode in (not root.training, bool(root.training)):
            with _NoCalls():
                copy.train(mode)
            # Also on the way: what it sets in one mode it may set back in the other.
            if any(stand_in.__dict__["training"] is not mode for stand_in in copies.values()) or not _unchanged(
                copies, inside
            ):
                return False
    except Exception:
        return False  # it wants to compute, or the stand-in is not enough for it
    return True


def _unchanged(copies: dict[torch.nn.Module, torch.nn.Module], inside: dict[torch.nn.Module, dict[str, Any]]) -> bool:
    """Whether stand-ins have what the modules have, and the stand-ins inside that they had."""
    return all(
        _same(stand_in.__dict__, module.__dict__, _NOT_SHARED)
        and _same(stand_in._parameters, module._parameters)
        and _same(stand_in._buffers, module._buffers)
        and _same(stand_in._modules, inside.get(stand_in, {}))
        for module, stand_in in copies.items()
    )


class _NoCalls(TorchFunctionMode):
    """Refuses every call of torch's, so that what belongs to the real model stays as it is."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{function} was called")


_TABLES = ("_parameters", "_buffers", "_modules")
_NOT_SHARED = frozenset({*_TABLES, "training"})


def _stand_in(module: torch.nn.Module, copies: dict[torch.nn.Module, torch.nn.Module]) -> torch.nn.Module:
    """A module of the same class with tables of its own, and stand-ins for the modules inside."""
    known = copies.get(module)
    if known is None:
        known = copies[module] = object.__new__(type(module))
        attributes = known.__dict__
        attributes.update(module.__dict__)
        for name in _TABLES:
            attributes[name] = attributes[name].copy()
        table = attributes["_modules"]
        for name, inner in table.items():
            if inner is not None:
                table[name] = _stand_in(inner, copies)
    return known


def _same(now: dict[str, Any], before: dict[str, Any], besides: frozenset[str] = frozenset()) -> bool:
    found = now.get
    return len(now) == len(before) and all(found(name) is value or name in besides for name, value in before.items())
