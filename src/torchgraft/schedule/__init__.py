"""When things run: calls that wait for somebody else are started early and awaited late, with other work in between.
What must stay before what is known to `splitting/order.py`; nothing here talks to another process by itself.
"""

from __future__ import annotations

from torchgraft.schedule.blocking import Blocking, blocking
from torchgraft.schedule.overlap_remote_calls import OverlapRemoteCalls
from torchgraft.schedule.prefetch_copies import PrefetchCopies
from torchgraft.schedule.report import Overlap, Overlaps, overlaps

__all__ = ["Blocking", "Overlap", "OverlapRemoteCalls", "Overlaps", "PrefetchCopies", "blocking", "overlaps"]
