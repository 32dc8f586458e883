"""The books of memory: every storage that appears during a run, how large it is, who made it, when it came and went.
What is run is decided in `peak.py`; here nothing is run.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchgraft.ir.node import Node

RESIDENT = "resident"
GPU_GRAIN = 512  # torch's allocator hands out the memory of a GPU in pieces of so many bytes


@dataclass
class Storage:
    """One piece of memory. Times count operators; `died` is None while it lives."""

    size: int
    node: Node | None
    phase: str
    born: int
    died: int | None = None

    def lives_at(self, time: int) -> bool:
        return self.born <= time and (self.died is None or self.died > time)


class Storages:
    """All storages seen so far, on one device where one is given.

    A storage is known by a weak reference: torch keeps its Python object as long as the memory is in use, so it dies when the
    last tensor on it does, wherever that was held (a local variable, autograd's graph).
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.time = 0
        self.phase = RESIDENT
        self.log: list[Storage] = []
        self.places: list[tuple[str, Node | None]] = []
        self._known: dict[int, tuple[Any, Storage]] = {}

    def note(self, tree: Any, node: Node | None = None) -> None:
        """Enter the storages of the tensors in a tree that are not known yet."""
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and self._is_here(leaf.device):
                self._enter(leaf, node)

    def _is_here(self, device: torch.device) -> bool:
        mine = self.device
        return mine is None or (device.type == mine.type and mine.index in (None, device.index))

    def step(self, tree: Any, node: Node | None) -> None:
        """An operator ran: time goes on, and what it made is entered."""
        self.time += 1
        self.places.append((self.phase, node))
        self.note(tree, node)

    def _enter(self, tensor: torch.Tensor, node: Node | None) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, _taken(storage.nbytes(), tensor.device)
        known = self._known.get(key)
        if known is not None and known[0]() is not None:
            known[1].size = max(known[1].size, size)  # a resize in place
            return
        entry = Storage(size, node, self.phase, self.time)
        self.log.append(entry)

        def gone(_: Any) -> None:
            entry.died = self.time + 1
            current = self._known.get(key)
            if current is not None and current[1] is entry:
                del self._known[key]

        self._known[key] = weakref.ref(storage, gone), entry

    def entry_of(self, tensor: torch.Tensor) -> Storage | None:
        """The entry of a tensor's memory."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    # ---- questions ----

    def live_bytes(self) -> list[int]:
        """How many bytes of tensors are alive while each operator runs, by time."""
        changes = [0] * (self.time + 3)
        for entry in self.log:
            changes[entry.born] += entry.size
            if entry.died is not None:
                changes[entry.died] -= entry.size
        live, result = 0, []
        for change in changes[: self.time + 1]:
            live += change
            result.append(live)
        return result

    def made_bytes(self) -> list[int]:
        """How many bytes of new tensors each operator made, by time."""
        made = [0] * (self.time + 1)
        for entry in self.log:
            made[entry.born] += entry.size
        return made

    def alive(self, time: int) -> list[Storage]:
        """Everything that is alive at one time."""
        return [entry for entry in self.log if entry.lives_at(time)]


def _taken(size: int, device: torch.device) -> int:
    return -(-size // GPU_GRAIN) * GPU_GRAIN if device.type == "cuda" else size
