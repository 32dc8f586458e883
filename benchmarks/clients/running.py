"""Runs the cases of one client in this process and writes a row for each: its name, what it returned or why it failed.
Which packages are ported, and the table of all clients, are in `__main__.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy
import torch
import torch._dynamo

from benchmarks.clients.case import cases_of, quiet

SECONDS = 240


class OutOfTime(BaseException):
    """No Exception, so that a case that catches those does not go on."""


def main() -> None:
    file, result, only = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""
    quiet()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _stop)
    with result.open("w", encoding="utf-8") as out:
        for row in _rows(file, only):
            out.write(json.dumps(row) + "\n")
            out.flush()
    # Threads that a client left running have no say in when this process ends.
    os._exit(0)


def _rows(file: Path, only: str) -> Any:
    try:
        module = _load(file)
    except Exception as error:
        yield {"case": "import", "error": _text(error), "trace": traceback.format_exc()}
        return
    for name, body in cases_of(module):
        if only in name:
            yield _run(name, body)


def _load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"cases_of_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _run(name: str, body: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    begin = time.perf_counter()
    row: dict[str, Any] = {"case": name}
    signal.alarm(SECONDS)
    try:
        row["result"] = json.loads(json.dumps(body()))
    except (Exception, OutOfTime) as error:
        row["error"] = _text(error)
        row["trace"] = traceback.format_exc()
    finally:
        signal.alarm(0)
    row["seconds"] = round(time.perf_counter() - begin, 2)
    return row


def _text(error: BaseException) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first.strip()}"[:300]


def _stop(signum: int, frame: FrameType | None) -> None:
    raise OutOfTime(f"not done after {SECONDS} seconds")


if __name__ == "__main__":
    main()
