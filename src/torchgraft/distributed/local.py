"""A pipeline run for a try in processes of this machine: what a step takes, and whether it is what one process computes.
In earnest every process calls `Pipeline.schedule` itself, started by torchrun.
"""

from __future__ import annotations

import os
import queue
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch.utils import _pytree

from torchgraft.analysis.effects import effects_of
from torchgraft.codegen.calling import example_inputs, placeholder_values
from torchgraft.distributed.pipeline import Pipeline
from torchgraft.errors import GraphError
from torchgraft.ir.arguments import tensors_of
from torchgraft.results.shown import Tabular
from torchgraft.results.tables import Table


@dataclass(frozen=True)
class Tried:
    """One process of a trial: its stages, and the seconds of a step as it saw them."""

    rank: int
    stages: str
    seconds: float


@dataclass(frozen=True, repr=False)
class Trial(Tabular):
    """A pipeline that was run here: the seconds of a step in one process and in several, and whether the results are the same
    (None where they were not compared, for the reason in `not_compared`).

    >>> Trial("Net", "gpipe", 4, 0.003, True, (Tried(0, "0", 0.001), Tried(1, "1", 0.002))).seconds
    0.002
    """

    name: str
    schedule: str
    microbatches: int
    alone: float
    same: bool | None
    processes: tuple[Tried, ...]
    not_compared: str = ""

    @property
    def seconds(self) -> float:
        """How long a step took."""
        return max(process.seconds for process in self.processes)

    def rows(self) -> list[dict[str, Any]]:
        """One row for each process."""
        return [asdict(process) for process in self.processes]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        about = {key: value for key, value in asdict(self).items() if key != "processes"}
        return {**about, "seconds": self.seconds, **super().to_dict()}

    def headline(self) -> str:
        """What came of it."""
        result = f"results were not compared: {self.not_compared}"
        if self.same is not None:
            result = "the same as one process computes" if self.same else "NOT what one process computes"
        return (
            f"{self.name} by {self.schedule} in {len(self.processes)} processes, {self.microbatches} micro-batches: "
            f"{self.seconds * 1e3:.1f} ms a step ({self.alone * 1e3:.1f} ms in one process), {result}"
        )

    def _table(self) -> Table:
        cells = [(f"{item.rank}", item.stages, f"{item.seconds * 1e3:.1f} ms") for item in self.processes]
        return Table(self.headline(), ("process", "stages", "step"), cells, frozenset(("process", "step")))


def try_pipeline(
    plan: Pipeline,
    args: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    processes: int | None = None,
    schedule: str = "gpipe",
    microbatches: int = 4,
    steps: int = 3,
    time_limit: float = 300.0,
) -> Trial:
    """Run a pipeline forward in processes of this machine (as many as it has stages), and compare with one process.

    `args` are those of one micro-batch, as the pipeline was planned for; the batch has `microbatches` of them.

    >>> from torchgraft.distributed import pipeline
    >>> x = torch.randn(2, 8)
    >>> plan = pipeline(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), x, stages=2)
    >>> try_pipeline(plan, x).same
    True
    """
    values, keywords = example_inputs(args, kwargs)
    inputs = placeholder_values(plan.program, values, keywords)
    divided = {
        id(leaf) for node, value in inputs.items() if node.name not in plan.constants for leaf in tensors_of(value)
    }
    # One micro-batch after the other, as the stages get them: the whole batch may be of a size that the program refuses.
    with torch.no_grad():
        expected = plan.program(*values, **keywords)
        begin = time.perf_counter()
        for _ in range(microbatches):
            plan.program(*values, **keywords)
        alone = time.perf_counter() - begin
    given, keywords = _pytree.tree_map(
        lambda leaf: leaf if id(leaf) not in divided else torch.cat([leaf] * microbatches), (values, keywords)
    )
    count = len(plan.stages) if processes is None else processes
    answers = _started(count, plan, given, keywords, schedule, microbatches, steps, time_limit)
    same, not_compared = None, ""
    if not plan.can_be_joined:
        not_compared = "those of micro-batches cannot be joined to one"
    elif drawn := next((node.name for node in plan.program.graph.nodes if effects_of(node).random), None):
        not_compared = f"'{drawn}' draws random numbers"
    else:
        result = next(answer for _, answer, _ in answers if answer is not None)
        pairs = zip(tensors_of(result), tensors_of(expected), strict=True)
        same = all(
            torch.allclose(ours, torch.cat([theirs] * microbatches), rtol=1e-4, atol=1e-5, equal_nan=True)
            for ours, theirs in pairs
        )
    tried = [Tried(rank, ", ".join(map(str, plan.of_rank(rank, count))), seconds) for rank, _, seconds in answers]
    return Trial(plan.name, schedule, microbatches, alone, same, tuple(tried), not_compared)


def process_context() -> Any:
    """How processes are started here: forked from one that has only imported torch, where the system can do that."""
    known = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in known else "spawn")
    # Not torchgraft: what is imported there is looked for where Python was started, and `sys.path` may have changed since.
    context.set_forkserver_preload(["torch.distributed.pipelining"])
    return context


def _started(count: int, *rest: Any) -> list[tuple[int, Any, float]]:
    *work, limit = rest
    context = process_context()
    answers: Any = context.Queue()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = [
        context.Process(target=_run, args=(rank, count, port, answers, limit, *work), daemon=True)
        for rank in range(count)
    ]
    found: list[tuple[int, Any, float]] = []
    try:
        for process in processes:
            process.start()
        until = time.monotonic() + limit
        while len(found) < count:
            try:
                rank, result, seconds = answers.get(timeout=0.5)
            except queue.Empty:
                _check_that_all_go_on(processes, {rank for rank, *_ in found}, until, limit)
                continue
            if isinstance(seconds, str):
                # What failed may be told before the end of the process that it is about.
                for process in processes:
                    process.join(0.5)
                gone = [
                    f"; process {n} ended with exit code {p.exitcode}" for n, p in enumerate(processes) if p.exitcode
                ]
                raise GraphError(f"process {rank} of the pipeline failed: {seconds}{''.join(gone)}")
            found.append((rank, _pytree.tree_map(_as_tensor, result), seconds))
    finally:
        for process in [process for process in processes if process.pid is not None]:  # those that were started
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
    return sorted(found, key=lambda answer: answer[0])


def _check_that_all_go_on(processes: list[Any], done: set[int], until: float, limit: float) -> None:
    for rank, process in enumerate(processes):
        if rank not in done and process.exitcode is not None:
            raise GraphError(
                f"process {rank} of the pipeline ended with exit code {process.exitcode} and no answer\n"
                "  look above for what it printed; a script that calls this needs an `if __name__ == '__main__':` around its work"
            )
    if time.monotonic() > until:
        raise GraphError(f"the processes of the pipeline did not answer in {limit:g} seconds; give a longer time_limit")


def _run(rank: int, count: int, port: int, answers: Any, limit: float, plan: Pipeline, *work: Any) -> None:
    args, kwargs, schedule, microbatches, steps = work
    try:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
        torch.distributed.init_process_group("gloo", rank=rank, world_size=count, timeout=timedelta(seconds=limit))
        run = plan.schedule(schedule, microbatches=microbatches)
        times = []
        with torch.no_grad():
            for _ in range(steps + 1):
                torch.distributed.barrier()
                begin = time.perf_counter()
                result, _ = run.step(*args, **kwargs)
                times.append(time.perf_counter() - begin)
        # As numpy's arrays: tensors would be in memory that is gone with the process.
        answers.put((rank, _pytree.tree_map(_as_array, result), min(times[1:])))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except Exception as error:
        answers.put((rank, None, f"{type(error).__name__}: {error}"))


def _as_array(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return (leaf.float() if leaf.dtype is torch.bfloat16 else leaf).numpy()


def _as_tensor(leaf: Any) -> Any:
    return torch.as_tensor(leaf) if type(leaf).__name__ == "ndarray" else leaf
