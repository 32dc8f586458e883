"""What other threads do while a model is traced symbolically: they may not use traced values, nor write into the model's tensors.
Who is asked before a thread gets something to do is said in `switches.py`.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from torchgraft.capturing.reads import at_line
from torchgraft.errors import TraceError

_REMEDY = (
    "do the work in that thread, or keep the surrounding module or function as a leaf (Tracer.is_leaf_module, "
    "torchgraft.wrap)"
)


class OtherThreads:
    """The tensors of a model as they were when the first thread got something to do."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.owner = threading.get_ident()
        with torch._C.DisableTorchFunction():  # else the copies would be recorded
            tensors = [*root.buffers(), *root.parameters()]
            self._before = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors]

    def refusal(self) -> TraceError | None:
        """What to raise if another thread than that of the trace is running."""
        if threading.get_ident() == self.owner:
            return None
        return TraceError(
            f"cannot trace what another thread does{at_line()}: it uses a value of a program that is traced in the thread it "
            f"was started from; {_REMEDY}"
        )

    def put_back(self) -> TraceError | None:
        """Undo what was written into the model; what to raise if that was anything."""
        written = [(tensor, value) for tensor, version, value in self._before if tensor._version != version]
        for tensor, value in written:
            tensor.detach().copy_(value)
        if not written:
            return None
        return TraceError(
            "cannot trace what another thread does: it writes into a tensor of the model, and the traced program would not; "
            f"{_REMEDY}. The model is left as it was"
        )


def threads_of(tracer: Any) -> OtherThreads:
    """What is known of the threads beside a trace; asked when one gets something to do."""
    known: OtherThreads | None = tracer._threads
    if known is None:
        known = tracer._threads = OtherThreads(tracer.root)
    return known
