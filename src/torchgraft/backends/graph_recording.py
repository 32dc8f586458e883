"""Recording one CUDA graph, so that a recording that fails leaves the process as it was. What is recorded, and when, is in
`cudagraphs.py`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from torchgraft.capturing.patching.active import paused_collection

# Who records, or waits for all that a device does: to wait for a device is an error while any thread records on it.
recording = threading.RLock()


def record_graph(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of all that a function launches, and what the function returned, which lies in memory of the graph.

    Where the function does what no graph can do (it asks for a value, say), that error is raised.
    """
    with recording:
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        before, failure = torch.cuda.current_stream(), None
        # The stream that torch would take belongs to the device it was first used for.
        stream = torch.cuda.Stream(before.device)
        torch.cuda.synchronize()
        # cuBLAS keeps its workspace for the next call. What a graph uses must be the graph's own memory, or it is gone with
        # another graph, or when torch.compile clears it.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            # Other threads may go on using the device. What is collected could be another graph, or an event.
            with paused_collection, torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                try:
                    result = function()
                except BaseException as error:
                    failure = error
                    raise
        except BaseException as error:
            _clean_up(graph, pool, stream, before)
            raise failure or error from None  # what came first; to end a recording that is invalid fails, too
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        return graph, result


def _clean_up(graph: torch.cuda.CUDAGraph, pool: Any, stream: Any, before: Any) -> None:
    """After a recording that failed. torch's context manager leaves early where ending the recording fails: the thread would
    go on with the stream of the recording, which waits for nobody, and every later random number would be refused."""
    torch.cuda.set_stream(before)
    try:
        graph.pool()
        return  # it ended in order
    except RuntimeError:
        pass
    device = before.device.index
    with contextlib.suppress(RuntimeError):  # the recording did not even begin, or the device does not answer any more
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    with contextlib.suppress(RuntimeError):
        # The generator of random numbers takes a recording for going on until one has ended.
        number = torch.zeros(1, device=before.device)
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            number.zero_()
    torch.cuda.set_stream(before)
