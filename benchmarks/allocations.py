"""How much memory an action takes at its fullest, as torch's allocators count it.
What is predicted is compared with this in `analysis.py` and in the tests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from torchgraft.capturing.patching.active import paused_collection


def taken_on_cpu(action: Callable[[], object]) -> int:
    """The most bytes that were there at once beyond those before, from the profiler's record of every allocation."""
    # What was there before and is found by the collector on the way would be taken off the account.
    with paused_collection, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        action()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def taken_on_gpu(action: Callable[[], object]) -> int:
    """The same from the allocator of the GPU."""
    torch.cuda.synchronize()
    with paused_collection:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        action()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
