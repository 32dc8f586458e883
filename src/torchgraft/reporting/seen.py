"""Everything that is found out about a model, one step after the other; a step that fails is noted and does not stop the rest.
How it is written down is in `files.py` and `page.py`.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from torchgraft.analysis.memory import Memory, memory
from torchgraft.analysis.simulate import Simulation, WhatIf, machine_names, simulate, what_if
from torchgraft.analysis.surroundings import Surroundings
from torchgraft.codegen.calling import copied_inputs
from torchgraft.errors import GraftError, RunError, one_line
from torchgraft.ir.printing import tensor_text
from torchgraft.recording.calls import CallLog, log_calls
from torchgraft.recording.doctor import Diagnosis, diagnosis_of
from torchgraft.recording.record import record
from torchgraft.recording.recorded import Recording
from torchgraft.recording.statistics import MEASURES
from torchgraft.recording.verify import verify
from torchgraft.reporting.levels import Counts, Level, captured_levels
from torchgraft.results.progress import stage
from torchgraft.view.module_facts import ModelFacts, forward_cost, model_facts, noted_modules
from torchgraft.view.module_summary import ModelSummary

STEPS = 6  # of a report; the last is writing
_Result = TypeVar("_Result")
COLUMNS = ("output", "parameters", "share", "flops", "flops_share", "calls")
CALL_LEVELS = {"function": "what Python calls", "dispatch": "the operators that run below"}


class Failure(NamedTuple):
    """What is unavailable, and why."""

    what: str
    reason: str


@dataclass(frozen=True)
class ScriptTrace:
    """What torch.jit.trace wrote; without a text, `failure` says why."""

    text: str = field(default="", repr=False)
    counts: Counts | None = None
    failure: str = ""


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
    simulation: Simulation | None = None
    machines: WhatIf | None = None
    diagnosis: Diagnosis | None = None
    failures: list[Failure] = field(default_factory=list)

    def programs(self) -> Iterator[Level]:
        """The levels that there is a program of."""
        return (level for level in self.levels.values() if level.program is not None)


def look(name: str, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Seen:
    """Find out everything about a model; it is left as it was.

    The model itself runs for the log of its calls, for each of the two captures, for torch.jit.trace and for the check against
    its program; everything else comes from the captured programs. Raises GraftError if the model does not run on these inputs.
    """
    seen = Seen(name, type(model).__name__, _inputs(model, args, kwargs))
    surroundings = Surroundings(model)
    try:
        with stage("running the model", 1, STEPS):
            facts = _first_run(seen, model, args, kwargs)
        surroundings.restore()
        with stage("capturing", 2, STEPS):
            seen.levels = captured_levels(model, args, kwargs)
        for level in seen.levels.values():
            if level.failure:
                seen.failures.append(Failure(f"the program at level {level.name}", level.failure))
        with stage("tracing with torch.jit.trace", 3, STEPS):
            seen.script = script_trace(model, args, kwargs)
        if seen.script.failure:
            seen.failures.append(Failure("the trace of torch.jit.trace", seen.script.failure))
        with stage("measuring", 4, STEPS):
            _observe(seen, facts, args, kwargs)
        with stage("verifying", 5, STEPS):
            seen.diagnosis = _attempt(seen, "the diagnosis", lambda: _diagnosis(seen, model, args, kwargs))
    finally:
        surroundings.restore()
    if seen.diagnosis is not None and not seen.diagnosis.ok and seen.diagnosis.program is not None:
        reason = "the captured program does not do what the model does"
        seen.failures.append(Failure("the check against the model", reason))
    return seen


def _first_run(seen: Seen, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelFacts:
    """One eager run, which gives the log of calls and what goes in and out of every module."""
    facts = model_facts(model, (), {}, False)
    facts.describe_inputs(args, kwargs)
    given = copied_inputs(args, kwargs)
    try:
        with torch.no_grad(), noted_modules(model, facts), log_calls(level="function") as log:
            log.result = model(*given[0], **given[1])
    except Exception as error:
        raise GraftError(
            f"cannot report on {type(model).__name__}: the model itself raises {one_line(error)}\ngive inputs it accepts"
        ) from error
    seen.calls["function"] = log
    return facts


def _observe(seen: Seen, facts: ModelFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What the captured programs say, without another run of the model."""
    source = seen.levels["function"].program or seen.levels["module"].program
    if source is not None:
        _attempt(seen, "the FLOPs", lambda: facts.add_costs(forward_cost(source, args, kwargs)))
    seen.summary = ModelSummary(facts, None, COLUMNS)
    chosen = next(seen.programs(), None)
    if chosen is None or chosen.name == "joint":
        return
    program = chosen.program
    log = _attempt(seen, "the log of calls at level dispatch", lambda: _operators(program, args, kwargs))
    if log is not None:
        seen.calls["dispatch"] = log
    seen.statistics_level = chosen.name
    seen.statistics = _attempt(seen, "the statistics of one run", lambda: _statistics(program, args, kwargs))
    seen.memory = _attempt(seen, "the memory it needs", lambda: memory(program, args, kwargs))
    seen.simulation = _attempt(seen, "the simulation", lambda: simulate(program, args, kwargs))
    if seen.simulation is not None:
        options: dict[str, Any] = {"machine": machine_names(), "mode": ("eager", "graph")}
        seen.machines = _attempt(seen, "machines beside each other", lambda: what_if(program, args, kwargs, **options))


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


def _operators(program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallLog:
    values, keywords = copied_inputs(args, kwargs)
    with torch.no_grad():
        return log_calls(program, values, keywords, level="dispatch")


def _statistics(program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
    with torch.no_grad():
        return record(program, *copied_inputs(args, kwargs), reduce=MEASURES)


def _diagnosis(seen: Seen, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Diagnosis:
    """The check of the program at level module, on the example and at one other size; `doctor` looks further."""
    level = seen.levels["module"]
    if level.program is None:
        return diagnosis_of(seen.kind, None, level.failure, None)
    verification = verify(model, level.program, args, kwargs, other_values=False, other_sizes=1)
    return diagnosis_of(seen.kind, level.program, "", verification)


def _inputs(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, str]]:
    names = list(inspect.signature(model.forward).parameters)
    named = [(names[place] if place < len(names) else str(place), value) for place, value in enumerate(args)]
    return [(name, tensor_text(value) or type(value).__name__) for name, value in [*named, *kwargs.items()]]


# ---- torch.jit.trace ----


def script_trace(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ScriptTrace:
    """Trace a model with torch.jit.trace, everything inlined. Whatever goes wrong is noted, never raised.

    >>> script_trace(torch.nn.ReLU(), (torch.ones(2),), {}).counts.by_call
    {'aten::relu': 1}
    """
    surroundings = Surroundings(model)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            if kwargs and args:
                return ScriptTrace(failure="torch.jit.trace takes inputs by place or by name, not both")
            given = {"example_kwarg_inputs": kwargs} if kwargs else {"example_inputs": args}
            traced = torch.jit.trace(model, **given, check_trace=False, strict=False)
            graph = traced.inlined_graph
            return ScriptTrace(str(graph), _counts(graph))
    except Exception as error:  # most models of transformers, and it raises nearly anything
        return ScriptTrace(failure=one_line(error))
    finally:
        surroundings.restore()


def _counts(graph: Any) -> Counts:
    kinds: Counter[str] = Counter()
    blocks = [graph]
    while blocks:
        for node in blocks.pop().nodes():
            kinds[node.kind()] += 1
            blocks.extend(node.blocks())
    state = kinds["prim::GetAttr"]
    calls = {kind: count for kind, count in kinds.most_common() if not kind.startswith("prim::")}
    inputs = len(list(graph.inputs())) - 1  # the first is the model itself
    return Counts(sum(kinds.values()), sum(calls.values()), inputs, state, 0, calls)
