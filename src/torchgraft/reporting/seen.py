"""Everything that is found out about a model, one step after the other; a step that fails is noted and does not stop the rest.
How it is written down is in `files.py` and `page.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from torchgraft.analysis.memory import Memory, memory
from torchgraft.errors import GraftError, RunError
from torchgraft.ir.printing import tensor_text
from torchgraft.recording.calls import CallLog, log_calls
from torchgraft.recording.doctor import Diagnosis, doctor
from torchgraft.recording.record import record
from torchgraft.recording.recorded import Recording
from torchgraft.recording.runs import Surroundings
from torchgraft.recording.statistics import MEASURES
from torchgraft.reporting.levels import LEVELS, Level, capture_level, one_line
from torchgraft.reporting.script_trace import ScriptTrace, script_trace
from torchgraft.view.module_summary import ModelSummary, summary

Progress = Callable[[str], None]
_Result = TypeVar("_Result")
COLUMNS = ("output", "parameters", "share", "flops", "flops_share", "calls")
CALL_LEVELS = {"function": "what Python calls", "dispatch": "the operators that run below"}


class Failure(NamedTuple):
    """What could not be had, and why."""

    what: str
    reason: str


@dataclass
class Seen:
    """What was found out about a model; None where it could not be."""

    name: str
    kind: str
    inputs: list[tuple[str, str]]
    levels: dict[str, Level] = field(default_factory=dict)
    script: ScriptTrace = field(default_factory=ScriptTrace)
    summary: ModelSummary | None = None
    calls: dict[str, CallLog] = field(default_factory=dict)
    statistics: Recording | None = None
    statistics_level: str = ""
    memory: Memory | None = None
    diagnosis: Diagnosis | None = None
    failures: list[Failure] = field(default_factory=list)

    def programs(self) -> Iterator[Level]:
        """The levels that there is a program of."""
        return (level for level in self.levels.values() if level.program is not None)


def look(name: str, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], progress: Progress) -> Seen:
    """Find out everything about a model; it is left as it was.

    Raises GraftError if the model itself does not run on these inputs.
    """
    seen = Seen(name, type(model).__name__, _inputs(model, args, kwargs))
    surroundings = Surroundings(model)
    try:
        progress("running the model")
        _run_once(model, args, kwargs)
        for level_name in LEVELS:
            progress(f"capturing at level {level_name}")
            level = seen.levels[level_name] = capture_level(level_name, model, args, kwargs)
            if level.failure:
                seen.failures.append(Failure(f"the program at level {level_name}", level.failure))
        progress("tracing with torch.jit.trace")
        seen.script = script_trace(model, args, kwargs)
        if seen.script.failure:
            seen.failures.append(Failure("the trace of torch.jit.trace", seen.script.failure))
        _observe(seen, model, args, kwargs, progress)
    finally:
        surroundings.put_back()
    return seen


def _observe(
    seen: Seen, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], progress: Progress
) -> None:
    progress("summing up parameters and FLOPs")
    seen.summary = _attempt(seen, "the summary", lambda: summary(model, args, kwargs, columns=COLUMNS))
    progress("logging calls")
    for level in CALL_LEVELS:
        log = _attempt(seen, f"the log of calls at level {level}", partial(_log, model, args, kwargs, level))
        if log is not None:
            seen.calls[level] = log
    chosen = next(seen.programs(), None)
    if chosen is not None and chosen.name != "joint":
        progress("recording statistics")
        program = chosen.program
        seen.statistics_level = chosen.name
        seen.statistics = _attempt(seen, "the statistics of one run", lambda: _statistics(program, args, kwargs))
        seen.memory = _attempt(seen, "the memory it needs", lambda: memory(program, *args, kwargs=kwargs))
    progress("verifying the program against the model")
    seen.diagnosis = _attempt(seen, "the diagnosis", lambda: doctor(model, args, kwargs))
    if seen.diagnosis is not None and not seen.diagnosis.ok and seen.diagnosis.program is not None:
        seen.failures.append(
            Failure("the check against the model", "the captured program does not do what the model does")
        )


def _attempt(seen: Seen, what: str, step: Callable[[], _Result]) -> _Result | None:
    """The result of a step; of one that breaks off, what there was until then."""
    try:
        return step()
    except RunError as error:
        seen.failures.append(Failure(what, one_line(error)))
        return error.partial  # type: ignore[return-value]
    except Exception as error:  # a model may raise anything
        seen.failures.append(Failure(what, one_line(error)))
        return None


def _run_once(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:
        raise GraftError(
            f"cannot report on {type(model).__name__}: the model itself raises {one_line(error)}; give inputs it accepts"
        ) from error


def _log(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], level: str) -> CallLog:
    with torch.no_grad():
        return log_calls(model, *args, level=level, **kwargs)


def _statistics(program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
    with torch.no_grad():
        return record(program, *args, reduce=MEASURES, **kwargs)


def _inputs(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, str]]:
    names = list(inspect.signature(model.forward).parameters)
    named = [(names[place] if place < len(names) else str(place), value) for place, value in enumerate(args)]
    return [(name, tensor_text(value) or type(value).__name__) for name, value in [*named, *kwargs.items()]]


__all__ = ["CALL_LEVELS", "Failure", "Progress", "Seen", "look"]
