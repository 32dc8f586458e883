"""`log_calls`: every torch call of one run, with its name, arguments, result, module, source line and time.
The run is watched by `call_watch.py`; this file says what a log can be asked.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple, overload

from torchgraft.codegen.calling import example_inputs
from torchgraft.errors import RunError, one_line
from torchgraft.ir.origin import source_line
from torchgraft.recording.call_watch import ModuleSpan, RawCall, TensorBrief, Watch, qualified_name
from torchgraft.results.files import written
from torchgraft.results.shown import Tabular, plain
from torchgraft.results.tables import Table, count, seconds_text

LEVELS = ("function", "dispatch")


class LoggedCall(NamedTuple):
    """One call; `shape` and `dtype` are those of the result where it is a tensor, `start` and `seconds` are times of the wall."""

    number: int
    name: str
    arguments: str
    result: str
    shape: tuple[int, ...] | None
    dtype: str | None
    module: str
    line: str
    start: float
    seconds: float
    error: str = ""

    def __str__(self) -> str:
        outcome = f"raised {self.error}" if self.error else self.result
        return f"{self.name}({self.arguments}) -> {outcome}"


class CallLog(Tabular, Sequence[LoggedCall]):
    """The calls of one run in order: a sequence that can be printed, filtered and exported.

    `result` is what the function returned. `names` and `counts` are the shortest summaries.
    """

    def __init__(self, calls: list[LoggedCall], level: str) -> None:
        self.calls = calls
        self.level = level
        self.result: Any = None
        self._modules: list[ModuleSpan] = []
        self._started = 0

    @overload
    def __getitem__(self, index: int) -> LoggedCall: ...
    @overload
    def __getitem__(self, index: slice) -> CallLog: ...
    def __getitem__(self, index: int | slice) -> LoggedCall | CallLog:
        return self._with(self.calls[index]) if isinstance(index, slice) else self.calls[index]

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[LoggedCall]:
        return iter(self.calls)

    def headline(self) -> str:
        return f"{count(len(self), 'call')} at level {self.level}, {seconds_text(sum(call.seconds for call in self.calls))}"

    @property
    def names(self) -> list[str]:
        """The name of every call, in order."""
        return [call.name for call in self.calls]

    @property
    def counts(self) -> dict[str, int]:
        """How often each function was called, most often first."""
        return dict(Counter(self.names).most_common())

    def filter(
        self, name: str | None = None, module: str | None = None, where: Callable[[LoggedCall], bool] | None = None
    ) -> CallLog:
        """The calls whose name and module match the patterns (`*` and `?` as in a shell) and for which `where` is true.

        A name without dots is that of the function alone; a module includes everything inside it.

        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
        >>> log = log_calls(model, torch.ones(2, 3))
        >>> log.filter(name="relu").names, log.filter(module="0").names
        (['torch.nn.functional.relu'], ['torch.nn.functional.linear'])
        """
        chosen = [
            call
            for call in self.calls
            if (name is None or _name_matches(call.name, name))
            and (module is None or _module_matches(call.module, module))
            and (where is None or where(call))
        ]
        return self._with(chosen)

    def _with(self, calls: list[LoggedCall]) -> CallLog:
        log = CallLog(calls, self.level)
        log.result, log._modules, log._started = self.result, self._modules, self._started
        return log

    # ---- other forms ----

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each call."""
        return [{**call._asdict(), "shape": None if call.shape is None else list(call.shape)} for call in self.calls]

    def to_dict(self) -> dict[str, Any]:
        return {"level": self.level, "calls": self.rows()}

    def to_chrome_trace(self, path: str | PathLike[str] | None = None) -> str:
        """The run as a trace that chrome://tracing and Perfetto open: calls inside the modules that made them."""
        events = [_event(span.path or "model", "module", span.start - self._started, span.end - span.start, {})
                  for span in self._modules]  # fmt: skip
        for call in self.calls:
            details = {key: value for key, value in call._asdict().items() if key not in ("name", "start", "seconds")}
            events.append(_event(call.name, self.level, call.start * 1e9, call.seconds * 1e9, details))
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
        return written(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), path)

    def _table(self) -> Table:
        cells: list[tuple[str, ...]] = [
            (
                str(call.number),
                call.name,
                call.arguments,
                f"raised {call.error}" if call.error else call.result,
                call.module,
                seconds_text(call.seconds),
                _short_line(call.line),
            )
            for call in self.calls
        ]
        return Table(
            "",
            ("#", "call", "arguments", "result", "module", "time", "line"),
            cells,
            frozenset(("#", "time")),
            frozenset([position for position, call in enumerate(self.calls) if call.error]),
            self.headline(),
        )


@overload
def log_calls(*, level: str = "function") -> contextlib.AbstractContextManager[CallLog]: ...
@overload
def log_calls(
    fn: Callable[..., Any], args: Any = (), kwargs: Mapping[str, Any] | None = None, *, level: str = "function"
) -> CallLog: ...
def log_calls(
    fn: Callable[..., Any] | None = None,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    level: str = "function",
) -> CallLog | contextlib.AbstractContextManager[CallLog]:
    """Call `fn` on the inputs and log every torch call it makes in this thread; without `fn`, log those of a `with` block.

    `fn` is a model, a program, an exported program or any function. `level` is "function" (what Python calls, before autograd
    and autocast) or "dispatch" (the operators that run below them). The calls, their names and their order are those that a
    bare `TorchFunctionMode` or `TorchDispatchMode` would see. Grad mode and the like are yours: call it under `torch.no_grad()`
    if that is what you want to see. On an accelerator the times are those of starting an operation.

    If `fn` raises, RunError is raised from its error, with the log until then as `partial`. The log of a block is complete when
    the block ends, and whatever the block raises passes through.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
    >>> log_calls(model, torch.ones(2, 3)).names
    ['torch.nn.functional.linear', 'torch.nn.functional.relu']
    >>> with torch.inference_mode(), log_calls(level="dispatch") as log:
    ...     y = model(torch.ones(2, 3))
    >>> print(log[1])
    aten.linear.default(float32[2, 3], float32[4, 3], float32[4]) -> float32[2, 4]
    """
    if level not in LEVELS:
        raise ValueError(f'level must be "function" or "dispatch", not {level!r}')
    if fn is None:
        return _logging(CallLog([], level), None)
    function = _runnable(fn)
    values, keywords = example_inputs(args, kwargs)
    log = CallLog([], level)
    try:
        with _logging(log, function):
            log.result = function(*values, **keywords)
    except Exception as error:
        raise RunError(_failure(fn, error, log), log) from error
    return log


@contextlib.contextmanager
def _logging(log: CallLog, function: Any) -> Iterator[CallLog]:
    """Fill a log with the calls that this thread makes inside the block."""
    watch = Watch(function, log.level)
    qualified_name(len)  # torch makes its table of names once, which takes a while and is no part of the run
    started = time.perf_counter_ns()
    try:
        with watch.running():
            yield log
    finally:
        log.calls[:] = _logged_calls(watch, started)
        log._modules, log._started = watch.spans, started


def _runnable(fn: Any) -> Callable[..., Any]:
    """What to call: an exported program is run through the module it makes of itself."""
    if hasattr(fn, "graph_signature") and callable(getattr(fn, "module", None)):
        return fn.module()
    if not callable(fn):
        raise TypeError(f"expected a model, a program or a function to call, got {type(fn).__name__}")
    return fn


def _logged_calls(watch: Watch, started: int) -> list[LoggedCall]:
    generated = watch.generated_code()
    origins: dict[tuple[int, int], tuple[str, str]] = {}
    for raw in watch.calls:
        # By identity: the hash of a code object is computed from everything in it.
        key = id(raw.code), raw.instruction
        if key not in origins:
            line = str(source_line(raw.code, raw.instruction) or "")
            path, original = generated[raw.code].origin(raw.instruction) if raw.code in generated else ("", "")
            origins[key] = path, original or line
    return [_logged(number, raw, origins, started) for number, raw in enumerate(watch.calls)]


def _logged(number: int, raw: RawCall, origins: dict[tuple[int, int], tuple[str, str]], started: int) -> LoggedCall:
    path, line = origins[id(raw.code), raw.instruction]
    # Inside a program's own call the nodes know more than the running module, which is the program.
    module = f"{raw.path}.{path}" if raw.path and path else raw.path or path
    arguments = [str(item) for item in raw.args] + [f"{key}={v}" for key, v in raw.kwargs.items()]
    tensor = raw.result if isinstance(raw.result, TensorBrief) else None
    return LoggedCall(
        number,
        qualified_name(raw.function),
        ", ".join(arguments),
        "" if raw.error else str(raw.result),
        tensor.shape if tensor else None,
        str(tensor.dtype).removeprefix("torch.") if tensor else None,
        module,
        line,
        (raw.start - started) / 1e9,
        (raw.end - raw.start) / 1e9,
        raw.error,
    )


def _failure(fn: Any, error: Exception, log: CallLog) -> str:
    name = type(fn).__name__ if not hasattr(fn, "__name__") else fn.__name__
    last = f", the last one {log[-1].name}" + (f" at {log[-1].line}" if log[-1].line else "") if log.calls else ""
    return f"{name} raised {one_line(error)} after {count(len(log), 'call')}{last}"


def _name_matches(name: str, pattern: str) -> bool:
    if fnmatch.fnmatchcase(name, pattern):
        return True
    # aten.add.Tensor is known as add, torch.nn.functional.relu as relu.
    return "." not in pattern and any(fnmatch.fnmatchcase(part, pattern) for part in name.split(".")[1:])


def _module_matches(path: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, f"{pattern}.*")


def _short_line(line: str) -> str:
    """A source line as the name of the file, the number and the text."""
    place, quote, text = line.partition(' "')
    return place.replace("\\", "/").rsplit("/", 1)[-1] + (f" {text.removesuffix(chr(34))}" if quote else "")


def _event(name: str, category: str, start: float, duration: float, details: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": start / 1e3, "dur": duration / 1e3}
    return {"name": name, "cat": category, "ph": "X", **times, "pid": 1, "tid": 1, "args": plain(details)}
