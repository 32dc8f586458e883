"""Whether a model is still what it was when programs were made from it: its submodules, plain attributes and, where a program
has copies of them, its weights. What is done about a change is decided by who asks.

Looking takes well under a microsecond for a module: tables are compared as a whole, and tensors by torch's own counts of writes.
A write that torch does not count (through `.data`, or through memory shared with numpy) is not seen.
"""

from __future__ import annotations

from operator import attrgetter, itemgetter
from typing import Any

import torch

from torchgraft.ir.modules import is_from_torch

_PLAIN = frozenset({int, float, bool, str, bytes, type(None), complex, torch.dtype, torch.device})
_STANDARD = frozenset(torch.nn.Module().__dict__)
_version = attrgetter("_version")


class ModelWatch:
    """A snapshot of what a model is made of; `change` says what is different now.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> watch = ModelWatch(model, weights=True)
    >>> watch.change()
    >>> _ = model[0].weight.data_ptr(), torch.nn.init.zeros_(model[0].weight)
    >>> watch.change()
    "the values of '0.weight' have changed"
    """

    def __init__(self, model: Any, weights: bool = False) -> None:
        self._attributes: list[tuple[str, Any, dict[str, Any], Any]] = []
        self._tables: list[tuple[str, dict[str, Any], list[int], list[Any]]] = []
        self._names: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._untracked: list[str] = []
        if not isinstance(model, torch.nn.Module):
            return
        for path, module in model.named_modules():
            self._watch(path, module, weights)
        self._versions = list(map(_version, self._tensors))
        self._pointers = list(map(torch.Tensor.data_ptr, self._tensors))

    def _watch(self, path: str, module: torch.nn.Module, weights: bool) -> None:
        names = [] if is_from_torch(module) else [
            name for name, value in module.__dict__.items() if name not in _STANDARD and type(value) in _PLAIN
        ]  # fmt: skip
        if names:
            getter = itemgetter(*names)
            self._attributes.append((path, getter, module.__dict__, getter(module.__dict__)))
        for table in ("_modules", "_parameters", "_buffers") if weights else ("_modules",):
            values = getattr(module, table)
            if values:
                self._tables.append((path, values, list(map(id, values.values())), list(values.values())))
        if weights:
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if (
                    tensor is not None
                    and not tensor.is_inference()
                    and not isinstance(tensor, torch.nn.UninitializedParameter)
                ):
                    self._names.append(f"{path}.{name}".lstrip("."))
                    self._tensors.append(tensor)

    def change(self) -> str | None:
        """What has changed, in words; None for nothing."""
        for path, getter, values, before in self._attributes:
            try:
                if getter(values) != before:
                    return f"an attribute of {_named(path)} was set"
            except KeyError:
                return f"an attribute of {_named(path)} was deleted"
        for path, table, before, _ in self._tables:
            if list(map(id, table.values())) != before:
                return f"a submodule or tensor of {_named(path)} was replaced"
        if self._tensors:
            versions, pointers = list(map(_version, self._tensors)), list(map(torch.Tensor.data_ptr, self._tensors))
            if versions != self._versions or pointers != self._pointers:
                both = zip(self._names, versions, self._versions, pointers, self._pointers, strict=True)
                return f"the values of '{next(name for name, a, b, c, d in both if a != b or c != d)}' have changed"
        return None


def _named(path: str) -> str:
    return f"'{path}'" if path else "the model"
