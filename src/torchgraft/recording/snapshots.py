"""Values of nodes that stay what they were, although the program goes on and may write into them.
Where a value lies in memory that nobody may write any more it is not copied; copies of large tensors go to a `Room`.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchgraft.analysis.comparison import tensors_in
from torchgraft.analysis.effects import effects_of
from torchgraft.analysis.effects.declared import is_declared_effect
from torchgraft.analysis.effects.state import storage_of
from torchgraft.ir.node import Node

# Copying less than this is cheaper than thinking about it.
_SMALL = 1 << 12
# From this size on, the memory of a copy comes from the room.
_LARGE = 1 << 18
# An input beyond this size is mostly a parameter that was made an input.
_LARGE_INPUT = 1 << 24

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_OUTSIDE = "<outside>"


class _Copy(NamedTuple):
    """Where the copy of a storage is, of which version, and after how many nodes it was still right.

    `held` keeps the identity of the storage its own: while it lives, no other storage gets the same.
    """

    memory: torch.UntypedStorage
    start: int
    version: int
    position: int
    held: StorageWeakRef


class Slot:
    """Where one recorded tensor is kept, so that a copy can take its place later."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Snapshots:
    """The recorded tensors of one run.

    Parameters, large inputs and anything on an accelerator are borrowed: kept as they are, and copied just before a node that may
    write into their memory. What a program computes on the CPU is copied at once, which lets the program use its memory again and
    is quicker than keeping it; views of what was copied are views of the copy, until something is written.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._room = Room()
        self._borrowed: list[Slot] = []
        # By storage.
        self._copies: dict[int, _Copy] = {}
        self._owned: set[int] = set()
        self._holders: list[Any] = []
        self._quiet: dict[Node, bool] = {}
        self._ran: list[Node] = []

    # ---- around a node ----

    def before(self, node: Node, env: dict[Node, Any]) -> None:
        """Copy what the node is about to write."""
        self._ran.append(node)
        if not self._borrowed or node._op in ("placeholder", "get_attr", "output") or self._is_quiet(node):
            return
        effects = effects_of(node)
        everything = effects.unknown or _OUTSIDE in effects.writes
        written = set() if everything else {item for place in effects.writes for item in self._storages_at(place, env)}
        safe: list[Slot] = []
        for slot in self._borrowed:
            if everything or _is_odd(slot.tensor) or storage_of(slot.tensor) in written:
                slot.tensor = slot.tensor.clone()
            else:
                safe.append(slot)
        self._borrowed = safe

    def keep(self, node: Node, tensor: torch.Tensor) -> Slot:
        """A slot with what the tensor is now."""
        plain = tensor.detach()
        if type(plain) not in _PLAIN_TYPES or plain.device.type != "cpu" or _is_odd(plain):
            return self._borrow(plain)
        storage = plain.untyped_storage()
        if node._op == "get_attr" or (node._op == "placeholder" and storage.nbytes() > _LARGE_INPUT):
            self._owned.add(storage._cdata)
            self._holders.append(plain)
        if storage._cdata in self._owned:
            return self._borrow(plain)
        return Slot(self._copy(plain, storage))

    def _borrow(self, tensor: torch.Tensor) -> Slot:
        slot = Slot(tensor)
        self._borrowed.append(slot)
        return slot

    # ---- copies ----

    def _copy(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
        key = storage._cdata
        version = -1 if tensor.is_inference() else tensor._version
        known = self._copies.get(key)
        # Versions do not count what is written through `.data`, nor anything in inference mode.
        if known is not None and known.version == version and all(map(self._is_quiet, self._ran[known.position :])):
            self._copies[key] = known._replace(position=len(self._ran))
            return _view_of(known.memory, known.start, tensor)
        size = storage.nbytes()
        if size < _SMALL or size > 4 * tensor.numel() * tensor.element_size():
            return tensor.clone()
        is_whole = size == tensor.numel() * tensor.element_size() and _is_dense(tensor)
        if is_whole and size < _LARGE:
            copied = tensor.clone()
            memory, start = copied.untyped_storage(), 0
        else:
            memory, start = self._room.place(size)
            copied = _view_of(memory, start, tensor)
            if is_whole:
                copied.copy_(tensor)
            else:
                _bytes_of(memory)[start : start + size].copy_(_bytes_of(storage))
        self._copies[key] = _Copy(memory, start, version, len(self._ran), StorageWeakRef(storage))
        return copied

    # ---- effects ----

    def _is_quiet(self, node: Node) -> bool:
        known = self._quiet.get(node)
        if known is None:
            known = self._quiet[node] = _is_quiet(node)
        return known

    def _storages_at(self, place: Any, env: dict[Node, Any]) -> Iterator[Hashable]:
        if isinstance(place, Node):
            held: Any = env.get(place)
        else:
            held = self._module
            for name in place.split("."):
                held = getattr(held, name, None)
            if isinstance(held, torch.nn.Module):
                held = [*held.parameters(), *held.buffers()]
        yield from map(storage_of, tensors_in(held))


def _is_quiet(node: Node) -> bool:
    """Whether a node writes no memory. Guards and regions are declared to have an effect, but it is none on tensors."""
    is_own = str(getattr(node.target, "__module__", "")).startswith("torchgraft.")
    if node.op == "call_function" and is_own and is_declared_effect(node.target):
        return True
    return not node.is_impure(impure_random=False)


def _is_odd(tensor: torch.Tensor) -> bool:
    """Whether a tensor is more than numbers in one piece of memory."""
    return (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _view_of(memory: torch.UntypedStorage, start: int, tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor is, in a copy of its storage that starts at a byte."""
    offset = start // tensor.element_size() + tensor.storage_offset()
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")  # whatever the default device is
    return empty.set_(memory, offset, tensor.shape, tensor.stride())


# ---- memory for copies ----


_SMALLEST, _LARGEST = 8 << 20, 64 << 20
# Pieces nobody uses are kept up to this much. They are marked so that the system takes them when it needs memory.
_MOST_IDLE = 256 << 20
_ALIGNMENT = 64

_idle: dict[int, list[mmap.mmap]] = {}
_lock = threading.Lock()


class Room:
    """Hands out memory for the copies of one recording; a piece lives for as long as any tensor in it."""

    def __init__(self) -> None:
        self._piece: torch.UntypedStorage | None = None
        self._size = self._used = 0
        self._next = _SMALLEST

    def place(self, length: int) -> tuple[torch.UntypedStorage, int]:
        """Where so many bytes may be written: the memory, and where in it they start. It is not initialised.

        >>> storage, start = Room().place(100)
        >>> start, storage.nbytes() >= 100
        (0, True)
        """
        if length > _LARGEST // 4:
            return _piece(-(-length // _SMALLEST) * _SMALLEST), 0
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if self._piece is None or start + length > self._size:
            self._size, start = max(self._next, -(-length // _SMALLEST) * _SMALLEST), 0
            self._piece = _piece(self._size)
            self._next = min(2 * self._size, _LARGEST)
        self._used = start + length
        return self._piece, start


def _piece(size: int) -> torch.UntypedStorage:
    with _lock:
        known = _idle.get(size)
        memory = known.pop() if known else None
    if memory is None:
        memory = _from_system(size)
    # The tensor holds the view for as long as its memory is referred to, and the view says when that has ended.
    view = memoryview(memory)
    weakref.finalize(view, _put_away, memory, size).atexit = False
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def _from_system(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, **_PRIVATE)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        _advise(memory, advice)
    return memory


# Shared memory, which is what mmap gives otherwise, has small pages only.
_PRIVATE: dict[str, Any] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


def _advise(memory: mmap.mmap, advice: int) -> bool:
    try:
        memory.madvise(advice)
    except (OSError, ValueError):  # a kernel without it
        return False
    return True


def _put_away(memory: mmap.mmap, size: int) -> None:
    advice = getattr(mmap, "MADV_FREE", None)
    if advice is None or not _advise(memory, advice):
        return
    with _lock:
        if sum(length * len(pieces) for length, pieces in _idle.items()) + size <= _MOST_IDLE:
            _idle.setdefault(size, []).append(memory)
