"""What other threads write into a model while it is traced symbolically is noticed and undone.
What they do with traced values is in `test_threads.py`.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft.capturing.threads import OtherThreads
from torchgraft.errors import TraceError


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: self.steps.add_(1))
        thread.start(), thread.join()
        return x * 2


def test_a_buffer_written_by_another_thread_is_put_back() -> None:
    model = Written()
    with pytest.raises(TraceError, match="another thread does: it writes into a tensor of the model"):
        torchgraft.symbolic_trace(model)
    assert model.steps.item() == 0


def test_a_watched_capture_keeps_it_whole() -> None:
    model = Written()
    program = torchgraft.capture(model, (torch.ones(2),))
    assert "another thread" in program.meta["kept_whole"][""] and model.steps.item() == 0
    program(torch.ones(2))
    assert model.steps.item() == 1


def test_nothing_written_is_nothing_to_say() -> None:
    threads = OtherThreads(nn.Linear(2, 2))
    assert threads.put_back() is None and threads.refusal() is None
