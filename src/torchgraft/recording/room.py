"""Memory for copies of large tensors, in a few big pieces that are used again when nobody refers to them any more.
Keeping the tensors of a run costs more time than copying them here: memory that is fresh from the operating system arrives in
pages of 4 KiB, each with an interruption, and a program that may free its values works in memory it already has.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from typing import Any

import torch

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


__all__ = ["Room"]
