"""Random programs with collectives, writes, draws, regions and guards: the same bits, the same collectives in the same order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchgraft
from tests.schedule.processes import run_processes
from tests.schedule.test_overlap_remote_calls import fetch
from torchgraft.schedule import OverlapRemoteCalls

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor")
LOCAL = ("sin", "add", "write", "view", "rand", "fetch", "guard", "region", "pieces", "shape")


class Random(nn.Module):
    """A random program. With a `rank` it has more local work on some ranks than on others, and the same collectives on all."""

    def __init__(self, seed: int, length: int, world: int, rank: int = 0) -> None:
        super().__init__()
        choose = random.Random(seed)
        own = random.Random(seed * 31 + rank)
        self.world = world
        self.steps: list[tuple[str, float, float]] = []
        for _ in range(length):
            kind = choose.choice((*COLLECTIVES, *LOCAL))
            self.steps.append((kind, choose.random(), choose.random()))
            if rank:  # what is only computed here and used nowhere else
                self.steps += [("own", own.random(), 0.0)] * own.randrange(3)

    def forward(self, x: Any) -> Any:
        values, own = [x * 1, x + 1], []
        for kind, first, second in self.steps:
            one, two = values[int(first * len(values))], values[int(second * len(values))]
            if kind == "own":
                own.append(one.cos())
            elif kind in LOCAL:
                values += self.local(kind, one, two)
            elif kind in ("all_reduce", "broadcast"):
                distributed.broadcast(one, src=0) if kind == "broadcast" else distributed.all_reduce(one)
            elif kind == "all_gather":
                parts = [torch.zeros_like(one) for _ in range(self.world)]
                distributed.all_gather(parts, one.contiguous())
                values += parts
            else:
                whole = torch.zeros(self.world * 3)
                distributed.all_gather_into_tensor(whole, one.contiguous())
                values.append(whole[:3])
        return [*values, *own]

    @staticmethod
    def local(kind: str, one: Any, two: Any) -> list[Any]:
        if kind == "write":
            one.mul_(0.5)
        elif kind == "guard":
            if one.sum() > 1e9:
                return [one, one]
        elif kind == "shape":
            if one.shape[0] > 5:
                return [one, one]
        elif kind == "pieces":
            return [torch.cat([piece for piece, _ in zip(one.split([1, 2]), "ab", strict=True)][::-1])]
        elif kind == "region":
            with torch.no_grad():
                return [one.tanh()]
        elif kind == "fetch":
            return [fetch(one)]
        elif kind == "view":
            return [one[...]]
        elif kind == "rand":
            return [one + torch.rand(3)]
        else:
            return [one.sin() if kind == "sin" else one + two]
        return []


def collectives(program: Any) -> list[str]:
    return [name for node in program.graph.nodes if (name := getattr(node.target, "__name__", "")) in COLLECTIVES]


def check(model: Random, x: Any, limit: int) -> list[str]:
    """Compare one program before and after; the names of its collectives."""
    program = torchgraft.capture(model, x)
    before = collectives(program)
    torch.manual_seed(0)
    expected = program(x.clone())
    OverlapRemoteCalls(max_in_flight=limit)(program)
    assert collectives(program) == before, (collectives(program), before)
    torch.manual_seed(0)
    found = program(x.clone())
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)
    return before


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_collectives_of_different_tensors_are_under_way_together(one_process: None) -> None:
    def model(x: Any, weights: list[Any]) -> Any:
        flats = []
        for weight in weights:
            x = (x @ weight).relu()
            flat = torch.cat([x.flatten(), weight.flatten()])
            distributed.all_reduce(flat)
            flats.append(flat[:4].view(2, 2))
        return flats

    example = (torch.ones(2, 2), [torch.ones(2, 2) for _ in range(3)])
    program = torchgraft.capture(model, example)
    expected = program(*example)
    OverlapRemoteCalls()(program)
    calls = ("all_reduce", "wait_for_work")
    order = [name for node in program.graph.nodes if (name := getattr(node.target, "__name__", "")) in calls]
    assert order == ["all_reduce"] * 3 + ["wait_for_work"] * 3
    assert all(map(torch.equal, program(*example), expected))


def test_shapes_and_pieces_that_are_asked_for_hold_nothing_up(one_process: None) -> None:
    """A check of what a collective wrote would: nothing is started before a check that came before it."""

    def model(x: Any, weights: list[Any]) -> Any:
        parts = []
        for weight in weights:
            flat = torch.cat([weight.flatten(), (x @ weight).flatten()])
            distributed.all_reduce(flat)
            if flat.shape[0] > 4 and flat.numel() > 5:
                x = x * 2
            parts += [part.view_as(one) for part, one in zip(flat.split([4, weight.numel()]), (weight, x), strict=True)]
        return parts

    example = (torch.ones(2, 2), [torch.ones(2, 2) for _ in range(3)])
    program = torchgraft.capture(model, example)
    expected = program(*example)
    OverlapRemoteCalls()(program)
    calls = ("all_reduce", "wait_for_work")
    order = [name for node in program.graph.nodes if (name := getattr(node.target, "__name__", "")) in calls]
    assert order == ["all_reduce"] * 3 + ["wait_for_work"] * 3
    assert all(map(torch.equal, program(*example), expected))


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 100_000), limit=st.integers(1, 5), length=st.integers(2, 16))
def test_in_one_process(one_process: None, seed: int, limit: int, length: int) -> None:
    check(Random(seed, length, 1), torch.ones(3), limit)


def _several(rank: int, count: int, seeds: list[int]) -> Any:
    distributed.init_process_group("gloo", rank=rank, world_size=count, timeout=timedelta(seconds=120))
    names = []
    for seed in seeds:
        torch.manual_seed(seed)
        # Not only the local work: the limit differs, too, and so does when each rank waits.
        names.append(check(Random(seed, 12, count, rank), torch.randn(3) * (rank + 1), 1 + (seed + rank) % 4))
    distributed.destroy_process_group()
    return names


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_in_several_processes_with_other_local_work_on_each(count: int) -> None:
    results = run_processes(_several, count, list(range(24)))
    assert all(result == results[0] for result in results), results
    assert sum(map(len, results[0])) > 24
