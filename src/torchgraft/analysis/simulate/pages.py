"""Which memory of a run on a CPU is new to the program and comes from the system page by page, which takes a while.
How long a page takes is a figure of the machine; what is alive when is known from `memory/`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from torchgraft.analysis.memory.peak import Storage

_NONE: Mapping[int, Sequence[int]] = {}
_SMALLEST = 128 * 1024  # pieces below are always kept at hand


def fresh_bytes(log: Iterable[Storage], mapped: int, scratch: Mapping[int, Sequence[int]] = _NONE) -> dict[int, int]:
    """The bytes of new memory by the time at which an operator asks for it, in a run that was run before.

    Allocators give pieces of `mapped` bytes back to the system at once. Smaller ones come from one heap, which is kept when they
    are let go, up to twice the largest that was: what is free beyond that at its end goes back, and comes anew when it is asked
    for. `scratch` are pieces that are there only while the operator at a time runs; of large ones nothing is said here.

    >>> log = [Storage(100 << 20, None, "forward", 1, 2), Storage(1 << 20, None, "forward", 2, 3)]
    >>> fresh_bytes(log, 32 << 20)
    {1: 104857600}
    """
    found: dict[int, int] = defaultdict(int)
    changes: dict[int, list[int]] = defaultdict(list)  # what goes and comes at each time
    entries = list(log)
    end = max((entry.born for entry in entries), default=0) + 2
    for entry in entries:
        if entry.size >= mapped:
            found[entry.born] += entry.size
        else:
            changes[end if entry.died is None else entry.died].insert(0, -entry.size)
            changes[entry.born].append(entry.size)
    for moment, pieces in scratch.items():
        small = [size for size in pieces if size < mapped]
        changes[moment] += [*small, *[-size for size in small]]
    heap = _Heap(max((abs(size) for sizes in changes.values() for size in sizes), default=0))
    moments = sorted(changes)
    for is_measured in (False, True):
        for moment in moments:
            new = sum(heap.change(size) for size in changes[moment])
            if is_measured and new:
                found[moment] += new
    return dict(found)


class _Heap:
    """How much of a heap is in use, and how much is kept."""

    def __init__(self, largest: int) -> None:
        self.most_free = 2 * max(largest, _SMALLEST)
        self.live = self.kept = 0

    def change(self, size: int) -> int:
        """Take a piece, or let one go; the bytes that are new."""
        self.live += size
        if size < 0 and self.kept - self.live > self.most_free:
            self.kept = self.live
        new = max(self.live - self.kept, 0)
        self.kept += new
        return new
