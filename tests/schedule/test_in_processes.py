"""Scheduled programs in two and four real processes: remote calls, collectives, and what happens when somebody fails."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from torch import nn
from torch.distributed import rpc

import torchgraft
from tests.schedule.processes import run_processes
from torchgraft.schedule import OverlapRemoteCalls, overlaps

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

DELAY = 0.1


@torchgraft.pure
def lookup(table: int, ids: Any) -> Any:
    time.sleep(DELAY)
    return torch.arange(100.0).reshape(50, 2)[ids % 50] + table


@torchgraft.pure
def broken(ids: Any) -> Any:
    raise LookupError("no such row")


@torchgraft.pure
def dying(ids: Any) -> Any:
    os._exit(3)


@torchgraft.pure
def sleeping(ids: Any) -> Any:
    time.sleep(30)


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.top = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, ids: Any, x: Any) -> Any:
        total = self.dense(x)
        for table in range(8):
            total = total + rpc.rpc_sync("rank1", lookup, args=(table, ids + table))
        return self.top(total)


def _with_rpc(rank: int, count: int, client: Any) -> Any:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=count, rpc_backend_options=options)
    try:
        return client() if rank == 0 else None
    finally:
        rpc.shutdown()


def _fetches(rank: int, count: int) -> Any:
    def client() -> Any:
        torch.manual_seed(0)
        model, example = Recommender().eval(), (torch.tensor([1, 2]), torch.randn(2, 2))
        program = torchgraft.capture(model, example)
        expected = program(*example)
        begin = time.perf_counter()
        program(*example)
        blocking = time.perf_counter() - begin
        changes = OverlapRemoteCalls()(program).changes
        begin = time.perf_counter()
        same = torch.equal(program(*example), expected)
        return changes, same, blocking, time.perf_counter() - begin

    return _with_rpc(rank, count, client)


def test_eight_fetches_wait_together() -> None:
    changes, same, blocking, overlapped = run_processes(_fetches, 2)[0]
    assert changes == 8
    assert same
    assert blocking > 8 * DELAY
    assert overlapped < blocking / 2


def _failing(rank: int, count: int, kind: str) -> Any:
    function = {"broken": broken, "dying": dying, "sleeping": sleeping}[kind]
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=count, rpc_backend_options=options)
    if rank == 1:
        time.sleep(25)
        os._exit(0)

    def model(ids: Any, x: Any) -> Any:
        return x.sin() + rpc.rpc_sync("rank1", lookup, args=(0, ids)).sum()

    example = (torch.tensor([1]), torch.ones(2))
    program = torchgraft.capture(model, example)
    OverlapRemoteCalls()(program)
    program(*example)
    for node in program.graph.nodes:
        if node.name.startswith("rpc_async"):
            constant = node.args[1].target
            setattr(program, constant, function)
            node.kwargs = {"args": (node.kwargs["args"][1],), "timeout": 2.0}
    begin = time.perf_counter()
    try:
        program(*example)
    except Exception as error:
        notes = "\n".join([str(error), *getattr(error, "__notes__", [])])
        return type(error).__name__, notes, time.perf_counter() - begin
    return "nothing", "", 0.0


@pytest.mark.parametrize("kind", ["broken", "dying", "sleeping"])
def test_an_error_names_the_node_and_the_line(kind: str) -> None:
    error, notes, seconds = run_processes(_failing, 2, kind, first_only=True)[0]
    assert error != "nothing"
    assert "wait_for_future" in notes and "test_in_processes.py" in notes
    assert seconds < 20


@torchgraft.pure
def dying_on_request(ids: Any) -> Any:
    if ids[0] < 0:
        os._exit(3)
    return lookup(0, ids)


def _in_the_middle(rank: int, count: int) -> Any:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=count, rpc_backend_options=options)
    if rank:
        time.sleep(60)
        os._exit(0)

    def model(ids: Any, index: Any, x: Any) -> Any:
        first = rpc.rpc_sync("rank1", dying_on_request, args=(ids,), timeout=5.0)
        return rpc.rpc_sync("rank2", lookup, args=(1, ids), timeout=5.0) + x[index].sin() + first

    def living(ids: Any) -> Any:
        return rpc.rpc_sync("rank2", lookup, args=(1, ids)) + 1

    def outcome(program: Any, *args: Any) -> str:
        try:
            return str(program(*args).tolist())
        except Exception as error:
            return "\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", [])])

    ids, one = torch.tensor([1]), torch.ones(2)
    program, other = torchgraft.capture(model, (ids, ids * 1, one)), torchgraft.capture(living, ids)
    assert (OverlapRemoteCalls()(program).changes, OverlapRemoteCalls()(other).changes) == (2, 1)
    begin = time.perf_counter()
    outcomes = [outcome(program, ids, index, one) for index in (ids * 1, ids * 7, ids * 1)]
    outcomes += [outcome(program, -ids, ids * 1, one), outcome(program, ids, ids * 1, one), outcome(other, ids)]
    return outcomes, time.perf_counter() - begin


def test_what_raises_in_the_middle_leaves_the_rest_as_it_was() -> None:
    """While calls are under way: the client raises, and goes on; a server dies, and the other still answers."""
    (fine, raised, again, died, dead, other), seconds = run_processes(_in_the_middle, 3, first_only=True)[0]
    assert fine == again and fine.startswith("[[")
    assert "IndexError" in raised and "x[index].sin()" in raised
    for gone in (died, dead):
        assert "dying_on_request, args=(ids,)" in gone and "RuntimeError" in gone, gone
    assert other.startswith("[[")
    assert seconds < 30


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Any) -> Any:
        results = []
        for layer in self.layers:
            part = layer(x)
            distributed.all_reduce(part)
            results.append(part.relu())
        gathered = [torch.empty_like(results[0]) for _ in range(distributed.get_world_size())]
        distributed.all_gather(gathered, results[0] + 1)
        whole = torch.empty(x.shape[0] * distributed.get_world_size(), 8)
        distributed.all_gather_into_tensor(whole, results[1])
        distributed.broadcast(results[2], src=0)
        return [*results, *gathered, whole, x.sin()]


def _collectives(rank: int, count: int) -> Any:
    distributed.init_process_group("gloo", rank=rank, world_size=count)
    torch.manual_seed(0)
    model = Parallel().eval()
    torch.manual_seed(rank)
    x = torch.randn(2, 8)
    with torch.no_grad():
        expected = model(x)
        program = torchgraft.capture(model, x)
        changes = OverlapRemoteCalls()(program).changes
        same = all(map(torch.equal, program(x), expected))
    order = [
        str(node.target.__name__) for node in program.graph.nodes if "c10d" in getattr(node.target, "__module__", "")
    ]
    distributed.destroy_process_group()
    return changes, same, order


@pytest.mark.parametrize("count", [2, 4])
def test_collectives_are_in_the_same_order_on_every_rank(count: int) -> None:
    results = run_processes(_collectives, count)
    for changes, same, order in results:
        assert changes == 7
        assert same
        assert order == results[0][2]


def _raising(rank: int, count: int) -> Any:
    distributed.init_process_group("gloo", rank=rank, world_size=count, timeout=timedelta(seconds=6))

    def model(x: Any) -> Any:
        y = x * 1
        distributed.all_reduce(y)
        return y + x.sin()

    program = torchgraft.capture(model, torch.ones(2))
    OverlapRemoteCalls()(program)
    if rank == 1:
        return "raised", "", 0.0  # and never takes part again
    begin = time.perf_counter()
    try:
        program(torch.ones(2))
    except Exception as error:
        return (
            type(error).__name__,
            "\n".join([str(error), *getattr(error, "__notes__", [])]),
            time.perf_counter() - begin,
        )
    return "nothing", "", 0.0


def test_a_rank_that_is_gone_stops_the_others_in_bounded_time() -> None:
    error, notes, seconds = run_processes(_raising, 2)[0]
    assert error not in ("nothing", "raised")
    assert "test_in_processes.py" in notes
    assert seconds < 40


def _by_hand(rank: int, count: int) -> Any:
    distributed.init_process_group("gloo", rank=rank, world_size=count)

    def model(x: Any) -> Any:
        y = x * (rank + 1)
        work = distributed.all_reduce(y, async_op=True)
        z = x.sin()
        work.wait()
        distributed.barrier()
        return y + z

    program = torchgraft.capture(model, torch.ones(2))
    names = [getattr(node.target, "__name__", "") for node in program.graph.nodes]
    x = torch.full((2,), 3.0)
    same = torch.equal(program(x), model(x))
    distributed.destroy_process_group()
    return same, [name for name in names if name in ("all_reduce", "sin", "wait_for_work", "barrier")]


def test_handles_that_are_awaited_and_barriers_are_calls_of_the_program() -> None:
    for answer in run_processes(_by_hand, 2):
        assert answer == (True, ["all_reduce", "wait_for_work", "barrier"]), answer


def _references(rank: int, count: int) -> Any:
    def client() -> Any:
        def model(ids: Any, x: Any) -> Any:
            first = rpc.remote("rank1", lookup, args=(0, ids)).to_here()
            second = rpc.remote("rank1", lookup, args=(1, ids)).to_here()
            third = rpc.rpc_async("rank1", lookup, args=(2, ids)).wait()
            return first + second + third + x.sin()

        example = (torch.tensor([1, 2]), torch.randn(2, 2))
        program = torchgraft.capture(model, example)
        expected = program(*example)
        changes = OverlapRemoteCalls()(program).changes
        kinds = ("remote", "rpc_async", "start_fetching", "wait_for_future", "sin", "add")
        order = [kind for node in program.graph.nodes for kind in kinds if node.name.startswith(kind)]
        same = torch.equal(program(*example), expected)
        # Without data nobody is asked, and what was answered keeps its shape.
        work = [call.work for call in overlaps(program, example, cost="flops").calls]
        return changes, order, same, work

    return _with_rpc(rank, count, client)


def test_remote_references_and_futures_wait_together() -> None:
    changes, order, same, work = run_processes(_references, 2)[0]
    assert changes == 2
    waits = ["wait_for_future", "wait_for_future", "add", "wait_for_future", "add", "add"]
    assert order == ["remote", "start_fetching", "remote", "start_fetching", "rpc_async", "sin", *waits]
    assert same
    assert all(amount > 1 for amount in work)


def _estimating(rank: int, count: int) -> Any:
    distributed.init_process_group("gloo", rank=rank, world_size=count, timeout=timedelta(seconds=120))
    with torch.no_grad():
        program = torchgraft.capture(Parallel().eval(), torch.ones(2, 8))
        OverlapRemoteCalls()(program)
        # One process estimates and the other does not: were anybody asked, the sums below would be of other calls.
        work = [call.work for call in overlaps(program, torch.ones(2, 8), cost="flops").calls] if rank else []
    value = torch.full((2,), float(rank))
    distributed.all_reduce(value)
    distributed.destroy_process_group()
    return value.tolist(), work


def test_estimates_make_no_collectives() -> None:
    results = run_processes(_estimating, 2)
    assert not any(isinstance(result, str) for result in results), results
    (first, _), (second, work) = results
    assert first == second == [1.0, 1.0]
    assert len(work) == 7 and sum(work) > 0


def _raising_within(rank: int, count: int) -> Any:
    distributed.init_process_group("gloo", rank=rank, world_size=count, timeout=timedelta(seconds=6))

    def model(x: Any, index: Any) -> Any:
        y = x * 1
        distributed.all_reduce(y)
        z = x[index]
        distributed.all_reduce(z)
        return y + z

    program = torchgraft.capture(model, (torch.ones(2), torch.tensor([0, 1])))
    OverlapRemoteCalls()(program)
    begin = time.perf_counter()
    try:
        program(torch.ones(2), torch.tensor([0, 1 + 8 * rank]))
    except Exception as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])]), time.perf_counter() - begin
    return "nothing", 0.0


def test_a_rank_that_raises_stops_the_others_in_bounded_time() -> None:
    (other, seconds), (raised, _) = run_processes(_raising_within, 2)
    assert "index 9 is out of bounds" in raised and "test_in_processes.py" in raised
    assert "test_in_processes.py" in other and "all_reduce" in other
    assert seconds < 40


def _every_kind(rank: int, count: int) -> Any:
    distributed.init_process_group("gloo", rank=rank, world_size=count, timeout=timedelta(seconds=120))

    def model(x: Any) -> Any:
        local = x.sin()
        received, reduced, spread = torch.zeros(4), x + 1, torch.zeros(2)
        if rank % 2:
            distributed.recv(received, (rank - 1) % count)
            distributed.send(x.contiguous(), (rank + 1) % count)
        else:
            distributed.send(x.contiguous(), (rank + 1) % count)
            distributed.recv(received, (rank - 1) % count)
        distributed.reduce(reduced, dst=1)
        gathered = [torch.zeros(4) for _ in range(count)] if rank == 0 else None
        distributed.gather(local, gathered, dst=0)
        distributed.scatter(spread, [x[:2] * n for n in range(count)] if rank == 0 else None, src=0)
        parts = [x * (n + 1) for n in range(count)]
        summed = torch.zeros(4)
        distributed.reduce_scatter(summed, parts)
        swapped = torch.zeros(4 * count)
        distributed.all_to_all_single(swapped, torch.cat(parts))
        return [received + local, reduced, spread, summed, swapped, *(gathered or [])]

    torch.manual_seed(rank)
    x = torch.randn(4)
    expected = model(x)
    program = torchgraft.capture(model, x)
    changes = OverlapRemoteCalls()(program).changes
    names = ("isend", "irecv", "reduce", "gather", "scatter", "reduce_scatter", "all_to_all_single", "wait_for_work")
    order = [name for node in program.graph.nodes if (name := getattr(node.target, "__name__", "")) in names]
    same = [list(map(torch.equal, program(x), expected)) for _ in range(3)]
    distributed.destroy_process_group()
    return changes, order, same


@pytest.mark.parametrize("count", [2, 4])
def test_every_kind_of_collective(count: int) -> None:
    results = run_processes(_every_kind, count)
    for rank, answer in enumerate(results):
        assert not isinstance(answer, str), answer
        changes, order, same = answer
        assert changes == 7
        # All are started before any is awaited, in the order in which they were written.
        pair = ["irecv", "isend"] if rank % 2 else ["isend", "irecv"]
        starts = [*pair, "reduce", "gather", "scatter", "reduce_scatter", "all_to_all_single"]
        assert [name for name in order if name != "wait_for_work"] == starts
        assert all(map(all, same))
