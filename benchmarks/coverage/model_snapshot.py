"""A snapshot of a model, to see afterwards what was changed about it: attributes, hooks, modes, weights and gradients.
Nothing here puts anything back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Snapshot:
    """Remembers a model as it is.

    >>> model = nn.Linear(1, 1)
    >>> snapshot = Snapshot(model)
    >>> model.visits = 1
    >>> snapshot.changes()
    ['.visits is new']
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._attributes = {path: _attributes(module) for path, module in model.named_modules()}
        self._tensors = {name: (value, value.detach().clone(), value.grad) for name, value in _tensors(model).items()}

    def changes(self) -> list[str]:
        """What is different now, in words."""
        found = []
        modules = dict(self._model.named_modules())
        for path in self._attributes.keys() ^ modules.keys():
            found.append(f"module {path or 'root'} came or went")
        for path in self._attributes.keys() & modules.keys():
            found += _changed(path, self._attributes[path], _attributes(modules[path]))
        now = _tensors(self._model)
        for name, (value, copied, gradient) in self._tensors.items():
            if now.get(name) is not value:
                found.append(f"{name} is another tensor")
            elif value.shape != copied.shape or value.dtype != copied.dtype or not _is_same(value.detach(), copied):
                found.append(f"the values of {name}")
            elif value.grad is not gradient:
                found.append(f"the gradient of {name}")
        return sorted(found)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: _shallow(value) for name, value in vars(module).items()}


def _shallow(value: Any) -> Any:
    """A copy of a container, as deep as containers go: a memo that grew is a change too."""
    if isinstance(value, dict):
        return {key: _shallow(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return [_shallow(item) for item in value]
    return value


def _changed(path: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    texts = [f"{path}.{name} is new" for name in after.keys() - before.keys()]
    texts += [f"{path}.{name} is gone" for name in before.keys() - after.keys()]
    texts += [
        f"{path}.{name} changed" for name in before.keys() & after.keys() if not _is_same(before[name], after[name])
    ]
    return texts


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and _same_values(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_is_same, a, b))
    try:
        return bool(a == b)
    except Exception:
        return False


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_quantized or a.device.type == "meta" or torch.equal(a, b):
        return True
    if a.shape != b.shape or not a.is_floating_point():
        return False
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
