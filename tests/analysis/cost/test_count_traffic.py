"""Bytes read and written by single operators."""

from typing import Any

import pytest
import torch

import torchgraft
from torchgraft.analysis.cost import cost
from torchgraft.analysis.cost.count import distinct_bytes


def moved(function: Any, *args: torch.Tensor) -> tuple[int, int]:
    work = cost(torchgraft.symbolic_trace(function), args, backward=False).forward
    return work.bytes_read, work.bytes_written


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda x: x.t()[0].view(-1), (0, 0)),
        (lambda x: x + 1, (40, 40)),
        (lambda x: x.add_(1), (40, 40)),
        (lambda x: x.zero_(), (0, 40)),
        (lambda x: x.fill_(3), (0, 40)),
        (lambda x: x.sum(), (40, 4)),
        (lambda x: x.double(), (40, 80)),
        (lambda x: torch.empty_like(x), (0, 0)),
        (lambda x: torch.zeros_like(x), (0, 40)),
        (lambda x: x.bernoulli_(), (0, 40)),
        (lambda x: x.expand(3, 2, 5) + 1, (40, 120)),
        (lambda x: torch.cat([x, x]), (80, 80)),
        (lambda x: torch.relu(x).mul_(x), (40 + 80, 40 + 40)),
        (lambda x: torch.add(x, x, out=torch.empty(2, 5)), (80, 40)),
    ],
)
def test_bytes(function: Any, expected: tuple[int, int]) -> None:
    assert moved(function, torch.ones(2, 5)) == expected


def test_a_look_up_reads_only_the_rows_it_takes() -> None:
    table, rows = torch.ones(1000, 8), torch.zeros(3, dtype=torch.int64)
    assert moved(lambda table, rows: table[rows], table, rows) == (3 * 8 * 4 + 24, 3 * 8 * 4)
    assert moved(lambda table, rows: table.index_select(0, rows), table, rows) == (3 * 8 * 4 + 24, 3 * 8 * 4)
    values = torch.ones(3, 8)
    read, written = moved(lambda t, r, v: t.index_put_((r,), v), table, rows, values)
    assert (read, written) == (24 + 96, 96)


def test_expanded_and_empty_tensors() -> None:
    assert distinct_bytes(torch.ones(1, 3).expand(100, 3)) == 12
    assert distinct_bytes(torch.ones(0, 3)) == 0
    assert distinct_bytes(torch.ones(0, 1).expand(0, 5)) == 0
    assert distinct_bytes(torch.eye(3).to_sparse()) == 36
    assert distinct_bytes(torch.tensor(1.0)) == 4
