"""A sweep: the cases of a collection one after another, each in a process of its own with a limit of time.
A model that crashes, hangs or spoils the process takes nothing else with it.
"""

from __future__ import annotations

import os
import select
import signal
import time
import traceback
from collections.abc import Callable

from benchmarks.coverage.cases import Case
from benchmarks.coverage.examination import examine
from benchmarks.coverage.large_models import measure
from benchmarks.coverage.rows import Row, from_json, to_json

Examine = Callable[[Case, Callable[[Row], None]], None]


def examine_apart(case: Case, limit: float, with_export: bool) -> Row:
    """The row of a case, from a copy of this process, which has the libraries loaded already."""
    if case.collection == "large":
        return run_apart(case, measure, limit)
    return run_apart(case, lambda given, report: examine(given, report, with_export), limit)


def run_apart(case: Case, work: Examine, limit: float) -> Row:
    """Do the work in a forked process; what it reported last is the answer, however it ended."""
    started = time.perf_counter()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _work(case, work, writing)
    os.close(writing)
    lines, problem = _listen(reading, started + limit)
    if problem:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    row = (
        from_json(lines[-1]) if lines else Row(case.collection, case.name, eager="the process ended without an answer")
    )
    if problem:
        row.note = ", ".join(filter(None, (row.note, f"stopped after {limit:.0f} s")))
    elif status:
        row.note = ", ".join(filter(None, (row.note, f"the process ended with status {status}")))
    row.seconds = round(time.perf_counter() - started, 2)
    return row


def _work(case: Case, work: Examine, writing: int) -> None:
    """The life of the child, which must never come back into the parent's code."""
    status = 1
    try:
        work(case, lambda row: _send(writing, row))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _send(writing: int, row: Row) -> None:
    left = memoryview((to_json(row) + "\n").encode())
    while left:
        left = left[os.write(writing, left) :]


def _listen(reading: int, deadline: float) -> tuple[list[str], bool]:
    """The whole lines that came, and whether the time was up first."""
    received = b""
    late = False
    with os.fdopen(reading, "rb", buffering=0) as stream:
        while True:
            ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.perf_counter()))
            if not ready:
                late = True
                break
            chunk = stream.read(1 << 16)
            if not chunk:
                break
            received += chunk
    return received.decode().split("\n")[:-1], late
