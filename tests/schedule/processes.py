"""Real processes on the loopback for tests: each runs one function, and none outlives its test."""

from __future__ import annotations

import io
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchgraft.distributed.local import process_context


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_processes(
    function: Callable[..., Any],
    count: int,
    *args: Any,
    limit: float = 240.0,
    first_only: bool = False,
    without: Sequence[int] = (),
) -> list[Any]:
    """What `function(rank, count, *args)` returned in each process, or the text of what it raised; all are gone afterwards.

    Nobody waits for the answers of those named by `without`.
    """
    context = process_context()
    answers: Any = context.Queue()
    port = free_port()
    started = [
        context.Process(target=_run, args=(function, rank, count, port, answers, args), daemon=True)
        for rank in range(count)
    ]
    results: dict[int, Any] = {}
    try:
        for process in started:
            process.start()
        while len(results) < count - len(without) and not (first_only and 0 in results):
            rank, value = answers.get(timeout=limit)
            results[rank] = torch.load(io.BytesIO(value), weights_only=False)
    finally:
        for process in started:
            process.join(0 if first_only else 5)
            if process.is_alive():
                process.kill()
                process.join()
    return [results.get(rank) for rank in range(count)]


def _run(function: Any, rank: int, count: int, port: int, answers: Any, args: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    try:
        value = function(rank, count, *args)
    except BaseException:
        value = traceback.format_exc()
    # As bytes: tensors would be in memory that is gone with the process.
    file = io.BytesIO()
    torch.save(value, file)
    answers.put((rank, file.getvalue()))
