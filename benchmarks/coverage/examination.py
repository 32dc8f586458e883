"""The examination of one model: it is captured in every way, and each program is compared with the model in every situation.
What stays of it is a `Row`; processes and time limits are in `sweep`.
"""

from __future__ import annotations

import copy
import gc
import inspect
import random
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn

import torchgraft
from benchmarks.coverage.cases import Case, Inputs
from benchmarks.coverage.comparison import difference, is_flat, leaves
from benchmarks.coverage.model_snapshot import Snapshot
from benchmarks.coverage.rows import EQUAL, FAILS, REFUSED, UNDEFINED, WRONG, Attempt, Row

Report = Callable[[Row], None]
LEVELS = {"module": "capture", "function": "capture, functions"}
# Gradients of more are not compared: the arithmetic is the same, and only takes long.
MOST_TO_TRAIN = 40_000_000
SYMBOLIC, EXPORT = "torch.fx", "torch.export"


def examine(case: Case, report: Report, with_export: bool, rounds: int = 5) -> None:
    """Examine one model, and report the row whenever something new is known: the next step may not come to its end."""
    row = Row(case.collection, case.name)
    model, example = _built(case, row)
    if model is None:
        report(row)
        return
    row.parameters = sum(parameter.numel() for parameter in model.parameters())
    # Each capture has a copy of its own: a model may remember that it ran, and all begin with one that never did.
    subjects = {way: copy.deepcopy(model) for way in LEVELS.values()}
    programs = {}
    for level, way in LEVELS.items():
        row.attempts[way], programs[way] = _captured(subjects[way], example, level)
        report(row)
    outcomes = _eager_outcomes(model, case)
    if isinstance(outcomes["example"], tuple) and is_flat(outcomes["example"][0]):
        row.note = "its result is flat"
    for way, program in programs.items():
        if program is not None:
            _try(program, case, outcomes, row.attempts[way])
            report(row)
    _time(model, example, row, rounds)
    report(row)
    _compare_training(model, subjects, programs, case, row)
    report(row)
    row.attempts[SYMBOLIC] = _symbolic(model, example)
    report(row)
    if with_export:
        row.attempts[EXPORT] = Attempt(reasons={"captured": "it did not come to an end in the time given"})
        report(row)
        row.attempts[EXPORT] = _exported(model, example, rounds)
        report(row)


def _built(case: Case, row: Row) -> tuple[nn.Module | None, Inputs]:
    """The model in evaluation mode and its example; where it does not run, the row says why."""
    torch.manual_seed(0)
    try:
        model = case.build().eval()
        _move(model)
        example = _seeded(case.example, "example")
        _run(copy.deepcopy(model), example)
    except Exception as error:
        row.eager = described(error)
        return None, Inputs()
    return model, example


def _move(model: nn.Module) -> None:
    """Move the weights that start as zeros or ones, which would hide differences."""
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                parameter.is_floating_point()
                and parameter.numel()
                and bool((parameter == parameter.flatten()[0]).all())
            ):
                parameter.add_(torch.randn_like(parameter), alpha=0.02)


def _run(function: Callable[..., Any], inputs: Inputs) -> Any:
    """What a run gives: its result, what it did to its inputs, and where it left the random numbers."""
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    given = copy.deepcopy(inputs)
    result = function(*given.args, **given.kwargs)
    return result, given.args, given.kwargs, torch.get_rng_state()


# Capturing


def _captured(model: nn.Module, example: Inputs, level: str) -> tuple[Attempt, Any]:
    """The first capture of a model that never ran: here shows what it leaves behind."""
    attempt = Attempt()
    before = Snapshot(model)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    started = time.process_time()
    try:
        program = torchgraft.capture(model, example.args, example.kwargs, level=level)
    except Exception as error:
        attempt.reasons["captured"] = described(error)
        return attempt, None
    attempt.first_seconds = time.process_time() - started
    attempt.captured = True
    attempt.nodes = len(program.graph.nodes)
    attempt.guards = len(program.guards)
    attempt.kept = dict(program.meta.get("kept_whole", {}))
    changes = before.changes()
    if not torch.equal(state, torch.get_rng_state()):
        changes.append("random state")
    if changes:
        attempt.reasons["untouched"] = ", ".join(changes[:5])
    return attempt, program


def _eager_outcomes(model: nn.Module, case: Case) -> dict[str, Any]:
    """What the model gives in each situation; an exception where it refuses itself."""
    outcomes: dict[str, Any] = {}
    for name, make in {"example": case.example, **case.others}.items():
        try:
            outcomes[name] = _run(model, _seeded(make, name))
        except Exception as error:
            outcomes[name] = error
    return outcomes


def _seeded(make: Callable[[], Inputs], name: str) -> Inputs:
    torch.manual_seed(len(name))
    return make()


def _try(program: Any, case: Case, outcomes: dict[str, Any], attempt: Attempt) -> None:
    for name, make in {"example": case.example, **case.others}.items():
        verdict, reason = judge(lambda make=make, name=name: _run(program, _seeded(make, name)), outcomes[name])
        attempt.verdicts[name] = verdict
        if reason:
            attempt.reasons[name] = reason


def judge(run: Callable[[], Any], expected: Any) -> tuple[str, str]:
    """The verdict about one run of a program, and the reason where it is not "equal"."""
    try:
        found = run()
    except torchgraft.GuardError as error:
        return (UNDEFINED if isinstance(expected, Exception) else REFUSED), str(error)
    except Exception as error:
        return (UNDEFINED if isinstance(expected, Exception) else FAILS), described(error)
    if isinstance(expected, Exception):
        return WRONG, f"answers, where eager raises {type(expected).__name__}: {expected}"
    text = difference(expected, found)
    return (WRONG, text) if text else (EQUAL, "")


# Training mode


def _compare_training(
    model: nn.Module, subjects: dict[str, nn.Module], programs: dict[str, Any], case: Case, row: Row
) -> None:
    """The programs, captured in evaluation mode and switched to training: results, gradients and buffers."""
    if row.parameters > MOST_TO_TRAIN:
        return
    saved = {name: value.clone() for name, value in model.state_dict().items()}

    def outcome(function: nn.Module, owner: nn.Module) -> Any:
        _put_back(owner, saved)
        owner.zero_grad()
        function.train()
        result = _run(function, _seeded(case.example, "example"))
        _backward(result[0])
        gradients = {name: parameter.grad for name, parameter in owner.named_parameters()}
        return _detached((result, gradients, dict(owner.named_buffers())))

    try:
        expected: Any = outcome(model, model)
    except Exception as error:
        expected = error
    for way, program in programs.items():
        if program is None:
            continue
        verdict, reason = judge(lambda program=program, way=way: outcome(program, subjects[way]), expected)
        row.attempts[way].verdicts["training"] = verdict
        if reason:
            row.attempts[way].reasons["training"] = reason
    _put_back(model, saved)
    model.zero_grad()
    model.eval()


def _put_back(model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """Give weights and buffers their values again; `load_state_dict` may do more, and may refuse."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(saved[name])


def _backward(result: Any) -> None:
    tensors = [leaf for _place, leaf in leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if tensors:
        torch.stack([(tensor.float() ** 2).mean() for tensor in tensors]).sum().backward()


def _detached(outcome: Any) -> Any:
    """The tensors of an outcome without what they were made by, which is not compared and cannot be copied."""
    return {place: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for place, leaf in leaves(outcome)}


# Time


def _time(model: nn.Module, example: Inputs, row: Row, rounds: int) -> None:
    """Medians of runs and captures taken in turn, so that a busy moment of the machine hits both."""
    runs: dict[str, Callable[[], Any]] = {"eager": lambda: model(*example.args, **example.kwargs)}
    for level, way in LEVELS.items():
        if row.attempts[way].captured:
            runs[way] = lambda level=level: torchgraft.capture(model, example.args, example.kwargs, level=level)
    taken: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(rounds):
        for way, run in runs.items():
            taken[way].append(_seconds(run))
        if sum(map(sum, taken.values())) > 3:
            break
    medians = {way: statistics.median(values) for way, values in taken.items()}
    row.eager_seconds = medians.pop("eager")
    for way, seconds in medians.items():
        row.attempts[way].seconds = seconds


def _seconds(run: Callable[[], Any]) -> float:
    gc.collect()
    started = time.process_time()
    run()
    return time.process_time() - started


# The other libraries


def _symbolic(model: nn.Module, example: Inputs) -> Attempt:
    """torch.fx as it is, and with every argument that is not given fixed to its default."""
    from torch.fx import symbolic_trace

    attempt = Attempt()
    for concrete in (None, _defaults(model, example)):
        try:
            started = time.process_time()
            program = symbolic_trace(model, concrete_args=concrete)
            attempt.seconds = time.process_time() - started
        except Exception as error:
            attempt.reasons["captured"] = described(error)
            continue
        attempt.reasons.pop("captured", None)
        _judge_example(attempt, model, program, example)
        break
    return attempt


def _defaults(model: nn.Module, example: Inputs) -> dict[str, Any]:
    """The arguments that the example does not give, and what they are then."""
    signature = inspect.signature(model.forward)
    given = signature.bind(*example.args, **example.kwargs).arguments
    return {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if name not in given and parameter.default is not inspect.Parameter.empty
    }


def _exported(model: nn.Module, example: Inputs, rounds: int) -> Attempt:
    """torch.export as it is, and without the cache that language models return, which it does not take."""
    attempt = Attempt()
    ways = [example]
    if "use_cache" in _defaults(model, example):
        ways.append(Inputs(example.args, {**example.kwargs, "use_cache": False}))
    for inputs in ways:
        try:
            program, attempt.seconds = _timed_export(model, inputs, rounds)
        except Exception as error:
            attempt.reasons["captured"] = described(error)
            continue
        attempt.reasons.pop("captured", None)
        if inputs is not example:
            attempt.reasons["cache"] = "exported without its cache"
        _judge_example(attempt, model, program.module(check_guards=False), inputs)
        break
    return attempt


def _timed_export(model: nn.Module, inputs: Inputs, rounds: int) -> tuple[Any, float]:
    """An exported program, and the least time that took: the first export of a kind of model pays for caches."""
    from torch.export import export

    taken: list[float] = []
    while True:
        started = time.process_time()
        program = export(model, inputs.args, inputs.kwargs)
        taken.append(time.process_time() - started)
        if len(taken) == min(rounds, 2) or taken[0] > 3:
            return program, min(taken)


def _judge_example(attempt: Attempt, model: nn.Module, program: Any, inputs: Inputs) -> None:
    attempt.captured = True
    attempt.nodes = len(program.graph.nodes)
    attempt.verdicts["example"], reason = judge(lambda: _run(program, inputs), _run(model, inputs))
    if reason:
        attempt.reasons["example"] = reason


def described(error: BaseException) -> str:
    """An exception in one text: kind, message, and the last lines it came through, ours and the model's."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(_OWN)]
    text = f"{type(error).__name__}: {str(error).strip()[:1500]}"
    if users:
        text += f" | model: {_place(users[-1])}"
    if frames and frames[-1] is not (users[-1] if users else None):
        text += f" | raised: {_place(frames[-1])}"
    return text


_OWN = (
    str(inspect.getfile(torch)).removesuffix("__init__.py"),
    str(inspect.getfile(torchgraft)).removesuffix("__init__.py"),
    __file__,
)


def _place(frame: traceback.FrameSummary) -> str:
    name = frame.filename.split("site-packages/")[-1]
    return f"{name}:{frame.lineno} {frame.line}"
