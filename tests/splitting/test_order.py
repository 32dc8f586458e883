"""What must run before what stays few relations, however often the same memory is written; none of them is lost by that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft.splitting.order import Order


class Counting(nn.Module):
    """Writes one buffer again and again, between reads of it that may be reads of anything."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            self.count.add_(1)
            x = x + self.count
        return x


class Shared(nn.Module):
    """The same modules again and again, one of which writes what it is given."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.layer, self.norm, self.relu = nn.Conv1d(1, 1, 1), nn.BatchNorm1d(1), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.relu(self.norm(self.layer(x)))
        return x


@pytest.mark.parametrize("kind", [Counting, Shared])
def test_relations_grow_with_the_program_and_no_faster(kind: Any) -> None:
    counts = []
    for times in (150, 600):
        order = Order(torchgraft.symbolic_trace(kind(times).eval()).graph)
        counts.append(sum(len(order.before(node)) for node in order.calls))
    assert counts[1] <= 5 * counts[0]


@pytest.mark.parametrize("kind", [Counting, Shared])
@pytest.mark.parametrize("size", [1, 7])
def test_the_parts_keep_the_order_of_writes_and_reads(kind: Any, size: int) -> None:
    torch.manual_seed(0)
    model = kind(100).eval()
    x = torch.randn(1, 1, 3)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(x)
    model.load_state_dict(state)
    program = torchgraft.symbolic_trace(model)
    chosen = {node.name: number % (size + 2) != 0 for number, node in enumerate(program.graph.nodes)}
    for by in (torchgraft.splitting.Size(size), lambda node: chosen[node.name]):
        model.load_state_dict(state)
        torch.testing.assert_close(torchgraft.split(program, by=by).module(x), expected)
