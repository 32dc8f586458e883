"""Remote calls overlapped with other work, in real processes on the loopback: `python -m benchmarks.scheduling`.
A recommendation-like model fetches eight embeddings from servers that take a while; and data-parallel steps beside DDP.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed import rpc

import torchgraft
from torchgraft.schedule import OverlapRemoteCalls, overlaps

TABLES, ROWS, WIDTH, BATCHES = 8, 10_000, 32, (128, 512)
_table: dict[int, torch.Tensor] = {}


@torchgraft.pure
def lookup(table: int, ids: torch.Tensor, delay: float) -> torch.Tensor:
    """What a server does: wait as long as a network would take, and look rows up."""
    if table not in _table:
        _table[table] = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(table))
    time.sleep(delay)
    return _table[table][ids]


class Recommender(nn.Module):
    """A dense part, and eight embeddings that are fetched right before they are used."""

    def __init__(self, servers: int, delay: float) -> None:
        super().__init__()
        self.servers, self.delay = servers, delay
        self.bottom = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())])
        self.mixers = nn.ModuleList([nn.Linear(WIDTH, 128) for _ in range(TABLES)])
        self.top = nn.Sequential(nn.Linear(512 + 128 * TABLES, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        parts = [self.bottom(x)]
        for table, mixer in enumerate(self.mixers):
            server = f"server{1 + table % self.servers}"
            rows = rpc.rpc_sync(server, lookup, args=(table, ids + table, self.delay))
            parts.append(mixer(rows).relu())
        return self.top(torch.cat(parts, 1))


def fetches(model: Recommender, ids: torch.Tensor) -> list[Any]:
    """All fetches of a query, started."""
    servers = [f"server{1 + table % model.servers}" for table in range(TABLES)]
    calls = [(table, ids + table, model.delay) for table in range(TABLES)]
    return [rpc.rpc_async(server, lookup, args=call) for server, call in zip(servers, calls, strict=True)]


def by_hand(model: Recommender, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The query as one would write it: all fetches are under way while the dense part computes."""
    started = fetches(model, ids)
    parts = [model.bottom(x)]
    parts += [mixer(future.wait()).relu() for future, mixer in zip(started, model.mixers, strict=True)]
    return model.top(torch.cat(parts, 1))


def critical_path(model: Recommender, ids: torch.Tensor, x: torch.Tensor) -> float:
    """The least time of a query on one core, taken from one whose parts run one after the other, all fetches first.

    The processor time of all parts (in all threads of this process, those of the calls too), or the arrival of a fetch and
    whatever has to follow it (the mixers that come after it, and the top), whichever is longer.
    """
    begin, used = time.perf_counter(), time.process_time()
    rows, arrived, mixed = [], [], []
    for future in fetches(model, ids):
        rows.append(future.wait())
        arrived.append(time.perf_counter() - begin)
    parts = [model.bottom(x)]
    for row, mixer in zip(rows, model.mixers, strict=True):
        mixed.append(time.perf_counter())
        parts.append(mixer(row).relu())
    model.top(torch.cat(parts, 1))
    end, used = time.perf_counter(), time.process_time() - used
    return max(used, *[arrival + end - then for arrival, then in zip(arrived, mixed, strict=True)])


def seconds(run: Callable[[], Any]) -> float:
    """How long a run takes."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def ratio(of: list[float], to: list[float]) -> float:
    """The ratio of two ways that took turns: the median of the ratios of runs next to one another."""
    return statistics.median(one / other for one, other in zip(of, to, strict=True))


def measured(servers: int, batch: int, delay: float, rounds: int, report: bool) -> None:
    """One line of the table: the model with calls that wait, with calls in flight, and what could be had."""
    torch.manual_seed(0)
    model = Recommender(servers, delay).eval()
    example = (torch.randint(0, ROWS - TABLES, (batch,)), torch.randn(batch, 512))
    with torch.no_grad():
        plain, scheduled = torchgraft.capture(model, example), torchgraft.capture(model, example)
        changes = OverlapRemoteCalls()(scheduled).changes
        expected = model(*example)
        same = all(
            torch.equal(found, expected) for found in (plain(*example), scheduled(*example), by_hand(model, *example))
        )
        used: list[float] = []

        def overlapped() -> float:
            before = time.process_time()
            took = seconds(lambda: scheduled(*example))
            used.append((time.process_time() - before) / took)
            return took

        ways: dict[str, Callable[[], float]] = {
            "waiting": lambda: seconds(lambda: plain(*example)),
            "possible": lambda: critical_path(model, *example),
            "overlapped": overlapped,
            "by hand": lambda: seconds(lambda: by_hand(model, *example)),
        }
        runs: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(
            1 + max(rounds // 5, 1)
        ):  # in turns, each five times in a row, as queries come; the first is to warm up
            for name, run in ways.items():
                found = [run() for _ in range(5)]
                runs[name] += found if number else []
    after = runs["overlapped"]
    rates = {name: f"{1 / statistics.median(times):.1f}" for name, times in runs.items()}
    cells = (
        *(1 + servers, batch, f"{delay * 1e3:g} ms"),
        *(rates["waiting"], rates["overlapped"], rates["by hand"], rates["possible"]),
        f"{ratio(runs['waiting'], after):.2f}",
        f"{ratio(runs['by hand'], after):.2f}",
        f"{ratio(runs['possible'], after):.0%}",
        f"{ratio(runs['possible'], runs['by hand']):.0%}",
        f"{statistics.median(used[5:]):.0%}",
        *(changes, "yes" if same else "NO"),
    )
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
    if report:
        print(overlaps(scheduled, example))


def client(servers: int, delays: list[float], rounds: int) -> None:
    for batch in BATCHES:
        for delay in delays:
            measured(servers, batch, delay, rounds, "--report" in sys.argv)


def _keep_to_its_core(rank: int) -> None:
    """The client has a core of its own, as on a machine of its own, and the servers share the others."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[:1] if rank == 0 else cores[1:])


def _serve(rank: int, count: int, port: int, delays: list[float], rounds: int) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    _keep_to_its_core(rank)
    # TCP, as between machines. What torch takes on one machine by itself, shared memory, is polled by a thread of every process.
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", num_worker_threads=16, _transports=["uv"], _channels=["basic"]
    )
    rpc.init_rpc("client" if rank == 0 else f"server{rank}", rank=rank, world_size=count, rpc_backend_options=options)
    if rank == 0:
        client(count - 1, delays, rounds)
    rpc.shutdown()


class Stack(nn.Module):
    """Layers whose gradients are summed over all processes."""

    def __init__(self, width: int = 512, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def written_out(
    x: torch.Tensor, weights: list[torch.Tensor], bucket: int, reduces: bool = True, works: list[Any] | None = None
) -> list[torch.Tensor]:
    """A training step with an all-reduce for each bucket of so many bytes, written where its last gradient is made.

    By hand: whoever gives `works` gets a handle of each, which are under way until they are awaited.
    """
    values = [x]
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        values += [z := torch.addmm(bias, values[-1], weight.t()), z.relu()]
    gradient = values[-1] * (2.0 / values[-1].numel())
    gradients: list[torch.Tensor] = []
    waiting: list[torch.Tensor] = []
    for number in reversed(range(len(weights) // 2)):
        z, before = values[2 * number + 1], values[2 * number]
        gradient = gradient * (z > 0)
        waiting += [gradient.sum(0), gradient.t() @ before]
        if number:
            gradient = gradient @ weights[2 * number]
        if not number or sum(4 * one.numel() for one in waiting) >= bucket:
            flat = torch.cat([one.flatten() for one in waiting])
            if works is not None:
                works.append(distributed.all_reduce(flat, async_op=True))
            elif reduces:
                distributed.all_reduce(flat)
            parts = flat.split([one.numel() for one in waiting])
            gradients += [part.view_as(one) for part, one in zip(parts, waiting, strict=True)]
            waiting = []
    return gradients[::-1]


def _train(rank: int, count: int, port: int, rounds: int) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=count)
    for megabytes in (1, 3, 25):
        _steps(rank, count, megabytes, rounds)
    distributed.barrier()
    distributed.destroy_process_group()


def _steps(rank: int, count: int, megabytes: int, rounds: int) -> None:
    """One line of the table: all-reduces of buckets of so many megabytes, awaited, overlapped, and by DDP."""
    torch.manual_seed(0)
    model, bucket = Stack(), megabytes << 20
    weights = [parameter.detach() for parameter in model.parameters()]
    torch.manual_seed(rank)
    x = torch.randn(64, 512)
    with torch.no_grad():
        plain, scheduled = [torchgraft.capture(written_out, (x, weights, bucket)) for _ in range(2)]
        alone = torchgraft.capture(written_out, (x, weights, bucket, False))
        changes = OverlapRemoteCalls()(scheduled).changes
        same = all(map(torch.equal, plain(x, weights, bucket), scheduled(x, weights, bucket)))
    sizes = [sum(4 * weight.numel() for weight in weights) // changes // 4] * changes
    parallel: Any = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=megabytes)

    def step() -> None:
        parallel.zero_grad()
        parallel(x).backward()

    def steps_by_hand() -> list[torch.Tensor]:
        works: list[Any] = []
        gradients = written_out(x, weights, bucket, True, works)
        for work in works:
            work.wait()
        return gradients

    def reduce_only() -> None:
        for work in [distributed.all_reduce(torch.zeros(size), async_op=True) for size in sizes]:
            work.wait()

    step()
    reduced = [parameter.grad for parameter in model.parameters()]
    with torch.no_grad():
        found = scheduled(x, weights, bucket)
        same = same and all(map(torch.equal, found, steps_by_hand()))
    close = all(torch.allclose(one / count, other, atol=1e-6) for one, other in zip(found, reduced, strict=True))
    ways = {
        "waiting": lambda: plain(x, weights, bucket),
        "overlapped": lambda: scheduled(x, weights, bucket),
        "by hand": steps_by_hand,
        "DDP": step,
        "computing only": lambda: alone(x, weights, bucket, False),
        "reducing only": reduce_only,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1 + max(rounds // 5, 1)):
        for name, run in ways.items():
            with torch.set_grad_enabled(name == "DDP"):
                for _ in range(5):
                    distributed.barrier()
                    took = seconds(run)
                    times[name] += [took] if number else []
    if rank == 0:
        middle = {name: statistics.median(values) * 1e3 for name, values in times.items()}
        ratios = [f"{ratio(times[name], times['overlapped']):.2f}" for name in ("waiting", "by hand", "DDP")]
        cells = (count, f"{megabytes} MB", changes, *[f"{value:.1f} ms" for value in middle.values()], *ratios)
        print(f"| {' | '.join(map(str, (*cells, 'yes' if same and close else 'NO')))} |", flush=True)
    parallel = None  # torch's reducer must be gone before its group


def _port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", default="2,4")
    parser.add_argument("--delays", default="0.2,1,5", help="of the servers, in milliseconds")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", choices=("fetches", "steps"), help="one of the two tables")
    parser.add_argument("--report", action="store_true", help="print what each call overlaps with")
    options = parser.parse_args()
    delays = [float(text) / 1e3 for text in options.delays.split(",")]
    counts = [int(text) for text in options.processes.split(",")]
    print(f"torch {torch.__version__}, {os.cpu_count()} cores")
    if options.only != "steps":
        columns = (
            "processes",
            "batch",
            "delay",
            "waiting",
            "overlapped",
            "by hand",
            "possible",
            "gain",
            "beside by hand",
        )
        columns += ("reached", "reached by hand", "busy", "calls", "same results")
        print(f"\n{TABLES} fetches, queries a second\n\n| {' | '.join(columns)} |\n|" + "---|" * len(columns))
        for count in counts:
            multiprocessing.spawn(_serve, args=(count, _port(), delays, options.rounds), nprocs=count)
    if options.only != "fetches":
        columns = ("processes", "buckets", "all-reduces", "waiting", "overlapped", "by hand", "DDP", "computing only")
        columns += ("reducing only", "gain", "beside by hand", "beside DDP", "same results")
        print(f"\ndata-parallel steps on gloo\n\n| {' | '.join(columns)} |\n|" + "---|" * len(columns))
        for count in counts:
            multiprocessing.spawn(_train, args=(count, _port(), options.rounds), nprocs=count)


if __name__ == "__main__":
    main()
