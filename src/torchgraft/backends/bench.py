"""A model on several backends, batches and numbers of threads, beside eager, torch.compile and runtimes without torchgraft.
How single calls are timed is in `auto.py`; the command is `graft bench`.
"""

from __future__ import annotations

import gc
import html
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from torchgraft.analysis.comparison import tensors_in
from torchgraft.analysis.simulate.plot import colour_of, picture_svg
from torchgraft.backends.auto import EAGER, candidates, in_turns
from torchgraft.backends.backend import Options, backend_names, find_backend
from torchgraft.backends.lower import lower
from torchgraft.backends.onnxruntime import onnx_session
from torchgraft.backends.openvino import openvino_model
from torchgraft.backends.verifying import left_as_it_was
from torchgraft.bridge.exporting import Exported, exported_model
from torchgraft.codegen.calling import copied_inputs, of_batch
from torchgraft.errors import BackendError, one_line
from torchgraft.results.progress import stage
from torchgraft.results.shown import Tabular
from torchgraft.results.tables import Table, number_text, seconds_text

COMPILE = "torch.compile"


@dataclass(frozen=True)
class Row:
    """One way to run a model at one batch with one number of threads; `seconds` is None where it failed."""

    batch: int
    threads: int
    way: str
    seconds: float | None
    times_eager: float | None
    ready: float
    note: str = ""


class Bench(Tabular):
    """What `graft bench` found."""

    def __init__(self, name: str, results: Sequence[Row]) -> None:
        self.name, self.results = name, list(results)

    def headline(self) -> str:
        """The model, and the best that was seen."""
        best = max((row.times_eager or 0.0 for row in self.results), default=0.0)
        return f"{self.name}: up to {best:.2f} times eager"

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each way, batch and number of threads."""
        return [asdict(row) for row in self.results]

    def _table(self) -> Table:
        cells = [
            (
                *(str(row.batch), str(row.threads), row.way),
                *("-" if row.seconds is None else seconds_text(row.seconds), number_text(row.times_eager)),
                *(seconds_text(row.ready), row.note),
            )
            for row in self.results
        ]
        columns = ("batch", "threads", "runs", "a call", "times eager", "ready in", "note")
        return Table(self.headline(), columns, cells, frozenset(columns) - {"runs", "note"})

    def svg(self) -> str:
        """The same as bars, one group for each batch and number of threads."""
        return _bars(self)


def bench(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    backends: Sequence[str] | None = None,
    batches: Sequence[int] = (1,),
    threads: Sequence[int] | None = None,
    time_limit: float = 120.0,
    name: str = "",
) -> Bench:
    """Time a model in every way that is asked for; `backends` are all that can be used here unless told.

    `time_limit` is how many seconds one way may take to get ready.
    """
    for wanted in backends or ():
        if wanted not in backend_names():
            find_backend(wanted)  # says which there are
    before = torch.get_num_threads()
    title = name or type(model).__name__
    results: list[Row] = []
    cases = [(batch, count) for batch in batches for count in threads or (before,)]
    try:
        for number, (batch, count) in enumerate(cases, 1):
            torch.set_num_threads(count)
            with stage(f"batch {batch}, {count} threads", number, len(cases)):
                given, named = copied_inputs(*of_batch(args, kwargs, batch))
                with left_as_it_was(model):
                    with torch.no_grad():
                        model(*given, **named)  # what the model itself refuses, it says best
                    results += _rows(_ways(model, given, named, backends, time_limit), batch, count)
    finally:
        torch.set_num_threads(before)
    return Bench(title, results)


def _ways(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], backends: Sequence[str] | None, time_limit: float
) -> dict[str, Callable[[], Callable[[], Any]]]:
    """How to make each call, by its name."""
    device = next((tensor.device.type for tensor in tensors_in((args, kwargs))), "cpu")
    names = list(backends) if backends is not None else [backend.name for backend in candidates(device)]
    ways: dict[str, Callable[[], Callable[[], Any]]] = {EAGER: lambda: lambda: model(*args, **kwargs)}
    if backends is None or "inductor" in names:
        ways[COMPILE] = lambda: _called(torch.compile(model), args, kwargs)

    def lowered(backend: str) -> Callable[[], Callable[[], Any]]:
        return lambda: _called(lower(model, args, kwargs, backend=backend, time_limit=time_limit), args, kwargs)

    def alone(backend: str) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            find_backend(backend)
            return ALONE[backend](exported_model(model, args, kwargs), Options())

        return make

    for backend in names:
        if backend in ALONE:
            ways[f"{backend} alone"] = alone(backend)
        ways[f"lower, {backend}"] = lowered(backend)
    return ways


def _alone_on_onnxruntime(program: Exported, options: Options) -> Callable[[], Any]:
    session = onnx_session(program, options)
    names = [item.name for item in session.get_inputs()]
    tensors = tensors_in(program.inputs)

    def run() -> list[torch.Tensor]:
        feeds = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        return [torch.from_numpy(item) for item in session.run(None, feeds)]

    return run


def _alone_on_openvino(program: Exported, options: Options) -> Callable[[], Any]:
    compiled = openvino_model(program, options)
    request = compiled.create_infer_request()
    tensors = tensors_in(program.inputs)

    def run() -> list[torch.Tensor]:
        results = request.infer([tensor.numpy() for tensor in tensors], share_inputs=True)
        return [torch.from_numpy(results[port]) for port in compiled.outputs]

    return run


# Runtimes as their makers' pages use them, from tensors to tensors, on inputs that are known.
ALONE: dict[str, Callable[[Exported, Options], Callable[[], Any]]] = {
    "openvino": _alone_on_openvino,
    "onnxruntime": _alone_on_onnxruntime,
}


def _called(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    return lambda: function(*args, **kwargs)


def _rows(ways: dict[str, Callable[[], Callable[[], Any]]], batch: int, threads: int) -> list[Row]:
    runs: dict[str, Callable[[], Any]] = {}
    ready: dict[str, float] = {}
    notes: dict[str, str] = {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, (way, make) in enumerate(ways.items(), 1):
            begin = time.monotonic()
            with stage(way, number, len(ways)):
                try:
                    run = make()
                    run()
                    runs[way] = run
                except Exception as error:
                    is_ours = isinstance(error, BackendError)
                    notes[way] = str(error).partition("\n")[0] if is_ours else one_line(error)
            ready[way] = time.monotonic() - begin
        times = in_turns(runs)
    eager = times.get(EAGER)
    runs.clear()
    gc.collect()  # a runtime that is not used any more gives back its threads
    return [
        Row(batch, threads, way, took, eager / took if took and eager else None, ready[way], notes.get(way, ""))
        for way in ways
        for took in [times.get(way)]
    ]


# ---- bars ----

_WIDTH, _LINE, _LEFT = 760, 20, 200


def _bars(result: Bench) -> str:
    """A bar for each way, as long as it is quick."""
    most = max((row.times_eager or 0.0 for row in result.results), default=1.0) or 1.0
    ways = list(dict.fromkeys(row.way for row in result.results))
    parts, top = [], 44
    group: tuple[int, int] | None = None
    for row in result.results:
        if (row.batch, row.threads) != group:
            group = (row.batch, row.threads)
            top += 14
            label = f"batch {row.batch}, {row.threads} thread{'' if row.threads == 1 else 's'}"
            parts.append(f'<text x="12" y="{top + 4}" font-weight="bold">{label}</text>')
            top += _LINE
        length = (row.times_eager or 0.0) / most * (_WIDTH - _LEFT - 130)
        colour = colour_of(ways.index(row.way))
        text = "failed" if row.seconds is None else f"{row.times_eager:.2f} × ({seconds_text(row.seconds)})"
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 4}" text-anchor="end">{html.escape(row.way)}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{top - 9}" width="{max(length, 1):.1f}" height="15" fill="{colour}"/>')
        parts.append(f'<text x="{_LEFT + max(length, 1) + 6:.1f}" y="{top + 4}" fill="#555">{text}</text>')
        top += _LINE
    return picture_svg(f"{result.name}: times eager", _WIDTH, top + 12, parts)
