"""Every tensor that a model holds, each once, and calls of the model with other tensors in their places.
Which of them a program takes as inputs, and what is done with new values, is decided by the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from torchgraft.errors import GuardError

_TABLES = frozenset(vars(torch.nn.Module()))


class Slot(NamedTuple):
    """A place of a model where a tensor is held: an entry of a table of parameters or buffers, an attribute, a list, a dict."""

    table: Any
    key: Any


class Held(NamedTuple):
    """A tensor of a model: "parameter", "buffer" or "constant" (an attribute that is not registered), its name and places."""

    kind: str
    name: str
    slots: list[Slot]

    @property
    def value(self) -> torch.Tensor:
        """The tensor that the model holds now."""
        slot = self.slots[0]
        try:
            return slot.table[slot.key]
        except (KeyError, IndexError):
            raise GuardError(
                f"the model no longer has the {self.kind} '{self.name}' that the program was captured with; "
                "capture the model again"
            ) from None


class ModelTensors:
    """The tensors of a model; one that is shared appears once, under the first of its names.

    >>> model = torch.nn.BatchNorm1d(2)
    >>> [(held.kind, held.name) for held in ModelTensors(model).held]
    [('parameter', 'weight'), ('parameter', 'bias'), ('buffer', 'running_mean'), ('buffer', 'running_var'),
     ('buffer', 'num_batches_tracked')]
    """

    def __init__(self, model: torch.nn.Module, more: dict[str, torch.nn.Module] | None = None) -> None:
        self.held: list[Held] = []
        found: dict[int, Held] = {}
        modules = list(model.named_modules())
        for prefix, other in (more or {}).items():
            modules += other.named_modules(prefix=prefix)
        for kind, slots_of in (("parameter", _parameters), ("buffer", _buffers), ("constant", _attributes)):
            for path, module in modules:
                for name, slot in slots_of(module):
                    tensor = slot.table[slot.key]
                    known = found.get(id(tensor))
                    if known is None:
                        known = found[id(tensor)] = Held(kind, f"{path}.{name}" if path else name, [])
                        self.held.append(known)
                    known.slots.append(slot)

    @contextmanager
    def replaced(self, values: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let the model hold other tensors for a while; it gets its own back in any case."""
        before = [[slot.table[slot.key] for slot in held.slots] for held in self.held]
        try:
            for held, value in zip(self.held, values, strict=True):
                for slot in held.slots:
                    slot.table[slot.key] = value
            yield
        finally:
            for held, tensors in zip(self.held, before, strict=True):
                for slot, tensor in zip(held.slots, tensors, strict=True):
                    slot.table[slot.key] = tensor

    def take_assigned(self, values: Sequence[torch.Tensor]) -> dict[int, Any]:
        """What stands now in the places where `values` were put, where it is something else; `values` are put back."""
        result: dict[int, Any] = {}
        for index, (held, value) in enumerate(zip(self.held, values, strict=True)):
            for slot in held.slots:
                there = slot.key in slot.table if isinstance(slot.table, dict) else slot.key < len(slot.table)
                if there and slot.table[slot.key] is not value:
                    result[index] = slot.table[slot.key]
                    slot.table[slot.key] = value
        return result


def _parameters(module: torch.nn.Module) -> Iterator[tuple[str, Slot]]:
    for name, value in module._parameters.items():
        if value is not None:
            yield name, Slot(module._parameters, name)


def _buffers(module: torch.nn.Module) -> Iterator[tuple[str, Slot]]:
    for name, value in module._buffers.items():
        if value is not None:
            yield name, Slot(module._buffers, name)


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, Slot]]:
    for name, value in vars(module).items():
        if name in _TABLES:
            continue
        if isinstance(value, torch.Tensor):
            yield name, Slot(vars(module), name)
        elif isinstance(value, (list, dict)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from [(f"{name}[{key!r}]", Slot(value, key)) for key, item in items if isinstance(item, torch.Tensor)]
