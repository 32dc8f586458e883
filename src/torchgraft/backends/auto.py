"""Choosing a backend by measuring: each candidate compiles and is verified, then all run in turns on the user's inputs.
What was chosen can be kept in a file and used again on the same machine; compiling itself is in `lower.py`.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from torchgraft.analysis.comparison import tensors_in
from torchgraft.analysis.surroundings import modules_behind
from torchgraft.backends.backend import Backend, backend_names, find_backend
from torchgraft.backends.calls import call_text
from torchgraft.backends.variants import log
from torchgraft.errors import BackendError, one_line
from torchgraft.results.files import write_text
from torchgraft.results.progress import stage
from torchgraft.results.shown import Tabular, plain
from torchgraft.results.tables import Table, number_text, seconds_text

# The quick to compile first, so that a time limit leaves out the slow ones.
_ORDER = ("native", "cudagraphs", "openvino", "onnxruntime", "inductor")
EAGER = "eager"
# Seconds all candidates together may take to compile, unless told.
TIME_LIMIT = 180.0
_ROUNDS = 5
_SECONDS_OF_ROUND = 0.12
# Candidates so close to the quickest are told apart by more rounds, as many as these seconds allow.
_CLOSE, _MORE_ROUNDS, _MORE_SECONDS = 1.15, 12, 6.0
# Threads of a runtime go on spinning for a while after a call; the next one to be measured must not pay for it.
_PAUSE = 0.05


@dataclass(frozen=True)
class Measurement:
    """How one candidate did: seconds for a call (None where it failed), seconds until it was ready, and what went wrong."""

    backend: str
    seconds: float | None
    ready: float
    note: str = ""


class Choice(Tabular):
    """What `lower(..., backend="auto")` measured, the quickest first, and which backend it chose."""

    def __init__(self, key: dict[str, Any], measurements: list[Measurement]) -> None:
        self.key = key
        self.measurements = sorted(measurements, key=lambda item: (item.seconds is None, item.seconds or 0.0))

    @property
    def backend(self) -> str:
        """The name of the quickest backend whose numbers are right."""
        return next(item.backend for item in self.measurements if item.backend != EAGER)

    def headline(self) -> str:
        """What was chosen, and how much quicker than eager it is."""
        eager = next((item.seconds for item in self.measurements if item.backend == EAGER), None)
        best = next(item.seconds for item in self.measurements if item.backend == self.backend)
        ratio = f", {eager / best:.2f} times eager" if eager and best else ""
        return f"{self.backend} for {self.key['model']} on {self.key['inputs']}{ratio}"

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each candidate."""
        return [asdict(item) for item in self.measurements]

    def to_dict(self) -> dict[str, Any]:
        """The choice, what it holds for, and the measurements."""
        return {"backend": self.backend, "key": self.key, "rows": self.rows()}

    def save(self, path: str | PathLike[str]) -> None:
        """Write the choice to a file, which `lower(..., choice=path)` uses."""
        write_text(path, json.dumps(plain(self.to_dict()), indent=1) + "\n")

    def _table(self) -> Table:
        eager = next((item.seconds for item in self.measurements if item.backend == EAGER), None)
        cells = []
        for item in self.measurements:
            ratio = number_text(eager / item.seconds) if eager and item.seconds else ""
            took = seconds_text(item.seconds) if item.seconds is not None else "-"
            cells.append((item.backend, took, ratio, seconds_text(item.ready), item.note))
        columns = ("backend", "a call", "times eager", "ready in", "note")
        return Table(self.headline(), columns, cells, frozenset(columns[1:4]))


def key_of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], precision: str) -> dict[str, Any]:
    """What a choice holds for: the model by its name and how much it holds, inputs, precision, and the machine."""
    is_module = isinstance(model, torch.nn.Module)
    roots = [root for _, root in modules_behind(model)]
    device = next((str(tensor.device.type) for tensor in tensors_in((args, kwargs))), "cpu")
    gpu = torch.cuda.get_device_name() if device == "cuda" else ""
    return {
        "model": type(model).__name__ if is_module else getattr(model, "__name__", "model"),
        "modules": sum(len(list(root.modules())) for root in roots),
        "parameters": sum(parameter.numel() for root in roots for parameter in root.parameters()),
        "inputs": call_text(args, kwargs),
        "precision": precision,
        "device": gpu or platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": str(torch.__version__),
    }


def saved_choice(path: str | PathLike[str] | None, key: dict[str, Any]) -> Choice | None:
    """The choice in a file, if there is one, it is for this, and its backend can be used."""
    if path is None or not Path(path).exists():
        return None
    try:
        content = json.loads(Path(path).read_text())
        choice = Choice(content["key"], [Measurement(**row) for row in content["rows"]])
        if content["backend"] != choice.backend or choice.key != key:
            log.info("the choice in '%s' is for something else, and is made again", os.fspath(path))
            return None
        find_backend(choice.backend)
    except (ValueError, KeyError, TypeError, StopIteration, BackendError) as error:
        log.info("the choice in '%s' cannot be used (%s), and is made again", os.fspath(path), one_line(error))
        return None
    return choice


def candidates(device: str) -> list[Backend]:
    """The backends that can be used here for inputs on a device, the quick to compile first."""
    names = sorted(backend_names(), key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    found = []
    for name in names:
        try:
            backend = find_backend(name)
        except BackendError:
            continue
        if device in backend.devices:
            found.append(backend)
    return found


def measure(
    key: dict[str, Any],
    backends: list[Backend],
    make: Callable[[Backend, float], Callable[[], Any]],
    eager: Callable[[], Any],
    time_limit: float | None,
) -> Choice:
    """Compile the candidates, and run them in turns.

    `make` compiles with a backend in at most so many seconds, verifies, and returns a call; `eager` is the call of the model.
    """
    eager()  # what the model itself refuses, it says best
    end = time.monotonic() + (TIME_LIMIT if time_limit is None else time_limit)
    runs: dict[str, Callable[[], Any]] = {EAGER: eager}
    ready, notes = {EAGER: 0.0}, {EAGER: ""}
    for number, backend in enumerate(backends, 1):
        left = end - time.monotonic()
        begin = time.monotonic()
        try:
            if left <= 0:
                raise BackendError("left out: the time limit was used up")
            with stage(f"compiling with {backend.name}", number, len(backends)):
                runs[backend.name] = make(backend, left)
            notes[backend.name] = ""
        except Exception as error:
            notes[backend.name] = str(error).partition("\n")[0] if isinstance(error, BackendError) else one_line(error)
        ready[backend.name] = time.monotonic() - begin
        took = seconds_text(ready[backend.name])
        log.info("%s: %s: %s (%s)", key["model"], backend.name, notes[backend.name] or "ready", took)
    if len(runs) == 1:
        reasons = "\n  ".join(f"{name}: {note}" for name, note in notes.items() if note)
        raise BackendError(f"no backend can run {key['model']}\n  {reasons}")
    with stage("measuring"):
        times = in_turns(runs)
        _tell_apart(runs, times)
    rows = [Measurement(name, times.get(name), ready[name], note) for name, note in notes.items()]
    choice = Choice(key, rows)
    log.info("%s: auto chooses %s", key["model"], choice.headline())
    return choice


def _tell_apart(runs: dict[str, Callable[[], Any]], times: dict[str, float]) -> None:
    """Time those that are about as quick as the quickest once more."""
    best = min(took for name, took in times.items() if name != EAGER)
    close = {name: run for name, run in runs.items() if name != EAGER and times[name] < _CLOSE * best}
    a_round = sum(max(times[name], _SECONDS_OF_ROUND) + _PAUSE for name in close)
    rounds = min(_MORE_ROUNDS, int(_MORE_SECONDS / a_round))
    if len(close) > 1 and rounds:
        for name, took in in_turns(close, rounds).items():
            times[name] = min(times[name], took)


def in_turns(runs: dict[str, Callable[[], Any]], rounds: int | None = None) -> dict[str, float]:
    """The least seconds of a call of each, measured in turns."""
    best: dict[str, float] = {}
    with torch.no_grad():
        for _ in range(rounds or _ROUNDS):
            for name, run in runs.items():
                time.sleep(_PAUSE)
                begin = time.perf_counter()
                run()
                _wait()
                took = time.perf_counter() - begin
                count = min(2000, int(_SECONDS_OF_ROUND / max(took, 1e-9)))
                if count > 1:
                    begin = time.perf_counter()
                    for _ in range(count):
                        run()
                    _wait()
                    took = (time.perf_counter() - begin) / count
                best[name] = min(best.get(name, took), took)
    return best


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
