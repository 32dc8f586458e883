"""Whether a model is still what it was when programs were made from it: its submodules, plain attributes and, where a program
has copies of them, its weights. What is done about a change is decided by who asks.

Looking takes well under a microsecond for a module: tables are compared as a whole, and tensors by torch's own counts of writes.
A write that torch does not count (through `.data`, or through memory shared with numpy) is not seen.
"""

from __future__ import annotations

from operator import attrgetter, getitem, is_, itemgetter
from typing import Any

import torch

from torchgraft.analysis.aliases import Aliases
from torchgraft.ir.modules import is_from_torch

_PLAIN = frozenset({int, float, bool, str, bytes, type(None), complex, torch.dtype, torch.device})
_STANDARD = frozenset(torch.nn.Module().__dict__)
_version, _mode = attrgetter("_version"), attrgetter("training")


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
        self._tables: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._values: list[Any] = []
        self._owners: list[str] = []
        self._modes: list[torch.nn.Module] = []
        self._names: list[str] = []
        self._tensors: list[torch.Tensor] = []
        for path, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
            self._watch(path, module, weights)
        self._training = list(map(_mode, self._modes))
        self._versions = list(map(_version, self._tensors))
        self._pointers = list(map(torch.Tensor.data_ptr, self._tensors))

    def _watch(self, path: str, module: torch.nn.Module, weights: bool) -> None:
        names = [] if is_from_torch(module) else [
            name for name, value in module.__dict__.items() if name not in _STANDARD and type(value) in _PLAIN
        ]  # fmt: skip
        if names:
            getter = itemgetter(*names)
            self._attributes.append((path, getter, module.__dict__, getter(module.__dict__)))
        if weights:
            self._modes.append(module)
        for table in ("_modules", "_parameters", "_buffers") if weights else ("_modules",):
            for name, value in getattr(module, table).items():
                self._tables.append(getattr(module, table))
                self._keys.append(name)
                self._values.append(value)
                self._owners.append(path)
        if weights:
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if (
                    tensor is not None
                    and not tensor.is_inference()
                    and not isinstance(tensor, torch.nn.UninitializedParameter)
                ):
                    self._names.append(f"{path}.{name}".lstrip("."))
                    self._tensors.append(tensor)

    def leave_out(self, program: Any) -> None:
        """Do not mind changes of the tensors that a program of the model writes itself."""
        memory = Aliases(program.graph)
        if not memory.has_writes:
            return
        kept = [index for index, tensor in enumerate(self._tensors) if not memory.is_state_written(tensor)]
        for name in ("_names", "_tensors", "_versions", "_pointers"):
            values = getattr(self, name)
            setattr(self, name, [values[index] for index in kept])

    def change(self) -> str | None:
        """What has changed, in words; None for nothing."""
        for path, getter, values, before in self._attributes:
            try:
                if getter(values) != before:
                    return f"an attribute of {_named(path)} was set"
            except KeyError:
                return f"an attribute of {_named(path)} was deleted"
        try:
            found = list(map(getitem, self._tables, self._keys))
        except KeyError:
            found = []
        if len(found) != len(self._values) or not all(map(is_, found, self._values)):
            entries = zip(self._owners, self._tables, self._keys, self._values, strict=True)
            path = next((path for path, table, key, value in entries if table.get(key) is not value), "")
            return f"a submodule or tensor of {_named(path)} was replaced"
        if self._modes and list(map(_mode, self._modes)) != self._training:
            return "a module was switched between training and evaluation"
        if self._tensors:
            versions, pointers = list(map(_version, self._tensors)), list(map(torch.Tensor.data_ptr, self._tensors))
            if versions != self._versions or pointers != self._pointers:
                both = zip(self._names, versions, self._versions, pointers, self._pointers, strict=True)
                return f"the values of '{next(name for name, a, b, c, d in both if a != b or c != d)}' have changed"
        return None


def _named(path: str) -> str:
    return f"'{path}'" if path else "the model"
