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
from torchgraft.interpreter import Interpreter
from torchgraft.schedule import OverlapRemoteCalls, overlaps

TABLES, ROWS, WIDTH, BATCH = 8, 10_000, 32, 128
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


class _Local(Interpreter):
    """Runs a program and takes the time of what is computed here; what is awaited is kept apart."""

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.here = 0.0

    def run_node(self, node: Any) -> Any:
        begin = time.perf_counter()
        result = super().run_node(node)
        if "rpc_sync" not in node.name:
            self.here += time.perf_counter() - begin
        return result


def best(run: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measured(servers: int, delay: float, rounds: int, report: bool) -> None:
    """One line of the table: the model with calls that wait, with calls in flight, and what could be had."""
    torch.manual_seed(0)
    model = Recommender(servers, delay).eval()
    example = (torch.randint(0, ROWS - TABLES, (BATCH,)), torch.randn(BATCH, 512))
    with torch.no_grad():
        plain, scheduled = torchgraft.capture(model, example), torchgraft.capture(model, example)
        changes = OverlapRemoteCalls()(scheduled).changes
        same = torch.equal(plain(*example), scheduled(*example)) and torch.equal(model(*example), plain(*example))
        # What could be had: all local work one after the other, or one call and what comes after it, whichever is longer.
        here, blocking, overlapped = [], [], []
        for _ in range(rounds):  # in turns
            local = _Local(plain)
            local.run(*example)
            here.append(local.here)
            blocking.append(best(lambda: plain(*example), 1))
            overlapped.append(best(lambda: scheduled(*example), 1))
        one_call = best(lambda: rpc.rpc_sync("server1", lookup, args=(0, example[0], delay)), rounds)
        issue = best(lambda: rpc.rpc_async("server1", lookup, args=(0, example[0], delay)), rounds)
        top = best(lambda: model.top(torch.randn(BATCH, 512 + 128 * TABLES)), rounds)
    before, after = statistics.median(blocking), statistics.median(overlapped)
    possible = max(statistics.median(here) + TABLES * issue, issue + one_call + top)
    cells = (1 + servers, f"{delay * 1e3:g} ms", f"{1 / before:.1f}", f"{1 / after:.1f}", f"{before / after:.2f}")
    more = (f"{1 / possible:.1f}", f"{possible / after:.0%}", changes, "yes" if same else "NO")
    print(f"| {' | '.join(map(str, (*cells, *more)))} |", flush=True)
    if report:
        print(overlaps(scheduled, example))


def client(servers: int, delays: list[float], rounds: int) -> None:
    for delay in delays:
        measured(servers, delay, rounds, "--report" in sys.argv)


def _serve(rank: int, count: int, port: int, delays: list[float], rounds: int) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", num_worker_threads=16)
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


def written_out(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
    """A training step with one all-reduce for each gradient, written where the gradient is made."""
    values = [x]
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        values += [z := torch.addmm(bias, values[-1], weight.t()), z.relu()]
    gradient = values[-1] * (2.0 / values[-1].numel())
    gradients: list[torch.Tensor] = []
    for number in reversed(range(len(weights) // 2)):
        z, before = values[2 * number + 1], values[2 * number]
        gradient = gradient * (z > 0)
        for_weight, for_bias = gradient.t() @ before, gradient.sum(0)
        distributed.all_reduce(for_weight)
        distributed.all_reduce(for_bias)
        gradients = [for_weight, for_bias, *gradients]
        if number:
            gradient = gradient @ weights[2 * number]
    return gradients


def _train(rank: int, count: int, port: int, rounds: int) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=count)
    torch.manual_seed(0)
    model = Stack()
    weights = [parameter.detach() for parameter in model.parameters()]
    torch.manual_seed(rank)
    x = torch.randn(64, 512)
    with torch.no_grad():
        plain = torchgraft.capture(written_out, (x, *weights))
        scheduled = torchgraft.capture(written_out, (x, *weights))
        changes = OverlapRemoteCalls()(scheduled).changes
        same = all(map(torch.equal, plain(x, *weights), scheduled(x, *weights)))
    parallel = nn.parallel.DistributedDataParallel(model)

    def step() -> None:
        parallel.zero_grad()
        parallel(x).backward()

    step()
    reduced = [parameter.grad for parameter in model.parameters()]
    with torch.no_grad():
        close = all(
            torch.allclose(ours / count, theirs, atol=1e-6)
            for ours, theirs in zip(scheduled(x, *weights), reduced, strict=True)
        )
    times: dict[str, list[float]] = {"blocking": [], "overlapped": [], "DDP": []}
    for _ in range(rounds):
        for name, run in (("blocking", plain), ("overlapped", scheduled), ("DDP", None)):
            distributed.barrier()
            begin = time.perf_counter()
            with torch.set_grad_enabled(run is None):
                step() if run is None else run(x, *weights)
            times[name].append(time.perf_counter() - begin)
    if rank == 0:
        found = {name: statistics.median(values) * 1e3 for name, values in times.items()}
        ratios = (f"{found['blocking'] / found['overlapped']:.2f}", f"{found['DDP'] / found['overlapped']:.2f}")
        cells = (
            count,
            *[f"{value:.1f} ms" for value in found.values()],
            *ratios,
            changes,
            "yes" if same and close else "NO",
        )
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    parallel = None  # type: ignore[assignment]  # torch's reducer must be gone before its group
    distributed.barrier()
    distributed.destroy_process_group()


def _port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", default="2,4")
    parser.add_argument("--delays", default="0.2,1,5", help="of the servers, in milliseconds")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--report", action="store_true", help="print what each call overlaps with")
    options = parser.parse_args()
    delays = [float(text) / 1e3 for text in options.delays.split(",")]
    counts = [int(text) for text in options.processes.split(",")]
    print(f"torch {torch.__version__}, {os.cpu_count()} cores\n\n{TABLES} fetches, queries a second")
    print(
        "\n| processes | delay | waiting | overlapped | gain | possible | reached | calls | same results |\n|"
        + "---|" * 9
    )
    for count in counts:
        multiprocessing.spawn(_serve, args=(count, _port(), delays, options.rounds), nprocs=count)
    print("\ndata-parallel steps on gloo, an all-reduce for each gradient\n")
    print("| processes | waiting | overlapped | DDP | gain | beside DDP | calls | same results |\n|" + "---|" * 8)
    for count in counts:
        multiprocessing.spawn(_train, args=(count, _port(), options.rounds), nprocs=count)


if __name__ == "__main__":
    main()
