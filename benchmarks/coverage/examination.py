"""The examination of one model: it is captured in every way, and each program is compared with the model in every situation.
What stays of it is a `Row`; processes and time limits are in `sweep`.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torchgraft
from benchmarks.coverage.cases import Case, Inputs
from benchmarks.coverage.comparison import difference, is_flat, leaves
from benchmarks.coverage.judging import attempted, described, gradient_difference, judge, run, seeded
from benchmarks.coverage.levels import examine_joint, lowered
from benchmarks.coverage.other_libraries import examine_export, symbolic
from benchmarks.coverage.rows import ATEN, CORE_ATEN, FUNCTION, JOINT, MODULE, SYMBOLIC, Attempt, Row

Report = Callable[[Row], None]
LEVELS = {"module": MODULE, "function": FUNCTION}
# Gradients of more are not compared: the arithmetic is the same, and only takes long.
MOST_TO_TRAIN = 40_000_000


def examine(case: Case, report: Report, with_export: bool, rounds: int = 3) -> None:
    """Examine one model, and report the row whenever something new is known: the next step may not come to its end."""
    row = Row(case.collection, case.name)
    model, example = _built(case, row)
    if model is None:
        report(row)
        return
    row.parameters = sum(parameter.numel() for parameter in model.parameters())
    # Each capture has a copy of its own: a model may remember that it ran, and all begin with one that never did.
    subjects = {way: copy.deepcopy(model) for way in LEVELS.values()}
    programs: dict[str, Any] = {}
    for level, way in LEVELS.items():
        row.attempts[way], programs[way] = _captured(subjects[way], example, level)
        report(row)
    for way in (ATEN, CORE_ATEN) if programs[FUNCTION] is not None else ():
        subjects[way], program = subjects[FUNCTION], programs[FUNCTION]
        if row.attempts[FUNCTION].kept:
            # What is kept whole may remember that it ran, too; elsewhere the lower level may hold the same tensors.
            subjects[way], program = copy.deepcopy((subjects[FUNCTION], program))
        row.attempts[way], programs[way] = lowered(subjects[way], program, example, way, rounds)
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
    if row.parameters <= MOST_TO_TRAIN:
        if programs[FUNCTION] is not None:
            joint = examine_joint(model, subjects[FUNCTION], programs[FUNCTION], case, example, rounds)
            row.attempts |= {JOINT: joint} if joint is not None else {}
            report(row)
        _compare_training(model, subjects, programs, case, row)
        report(row)
    row.attempts[SYMBOLIC] = symbolic(model, example)
    report(row)
    if with_export:
        examine_export(model, example, rounds, row, report)


def _built(case: Case, row: Row) -> tuple[nn.Module | None, Inputs]:
    """The model in evaluation mode and its example; where it does not run, the row says why."""
    torch.manual_seed(0)
    try:
        model = case.build().eval()
        _move(model)
        example = seeded(case.example, "example")
        run(copy.deepcopy(model), example)
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


# Capturing


def _captured(model: nn.Module, example: Inputs, level: str) -> tuple[Attempt, Any]:
    """The first capture of a model that never ran: here shows what it leaves behind."""
    attempt, program = attempted(model, lambda: torchgraft.capture(model, example.args, example.kwargs, level=level))
    if program is not None:
        attempt.nodes, attempt.guards = len(program.graph.nodes), len(program.guards)
        attempt.kept = dict(program.meta.get("kept_whole", {}))
    return attempt, program


def _eager_outcomes(model: nn.Module, case: Case) -> dict[str, Any]:
    """What the model gives in each situation; an exception where it refuses itself."""
    outcomes: dict[str, Any] = {}
    for name, make in {"example": case.example, **case.others}.items():
        try:
            outcomes[name] = run(model, seeded(make, name))
        except Exception as error:
            outcomes[name] = error
    return outcomes


def _try(program: Any, case: Case, outcomes: dict[str, Any], attempt: Attempt) -> None:
    for name, make in {"example": case.example, **case.others}.items():
        verdict, reason = judge(lambda make=make, name=name: run(program, seeded(make, name)), outcomes[name])
        attempt.verdicts[name] = verdict
        if reason:
            attempt.reasons[name] = reason


# Training mode


def _compare_training(
    model: nn.Module, subjects: dict[str, nn.Module], programs: dict[str, Any], case: Case, row: Row
) -> None:
    """The programs, captured in evaluation mode and switched to training: results, gradients and buffers."""
    saved = {name: value.clone() for name, value in model.state_dict().items()}

    def outcome(function: nn.Module, owner: nn.Module) -> Any:
        _put_back(owner, saved)
        owner.zero_grad()
        function.train()
        result = run(function, seeded(case.example, "example"))
        _backward(result[0])
        gradients = {name: parameter.grad for name, parameter in owner.named_parameters()}
        return _detached((result, dict(owner.named_buffers()))), _detached_gradients(gradients)

    try:
        expected: Any = outcome(model, model)
    except Exception as error:
        expected = error
    for way, program in programs.items():
        if program is None:
            continue
        verdict, reason = judge(
            lambda program=program, way=way: outcome(program, subjects[way]), expected, _training_difference
        )
        row.attempts[way].verdicts["training"] = verdict
        if reason:
            row.attempts[way].reasons["training"] = reason
    _put_back(model, saved)
    model.zero_grad()
    model.eval()


def _training_difference(expected: Any, found: Any) -> str:
    return difference(expected[0], found[0]) or gradient_difference(expected[1], found[1])


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


def _detached_gradients(gradients: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name: None if value is None else value.detach().clone() for name, value in gradients.items()}


# Time


def _time(model: nn.Module, example: Inputs, row: Row, rounds: int) -> None:
    """Medians of runs and captures taken in turn, so that a busy moment of the machine hits both."""
    runs: dict[str, Callable[[], Any]] = {"eager": lambda: model(*example.args, **example.kwargs)}
    for level, way in LEVELS.items():
        if row.attempts[way].captured:
            runs[way] = lambda level=level: torchgraft.capture(model, example.args, example.kwargs, level=level)
    taken: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(rounds):
        for way, work in runs.items():
            taken[way].append(_seconds(work))
        if sum(map(sum, taken.values())) > 3:
            break
    medians = {way: statistics.median(values) for way, values in taken.items()}
    row.eager_seconds = medians.pop("eager")
    for way, seconds in medians.items():
        row.attempts[way].seconds = seconds


def _seconds(work: Callable[[], Any]) -> float:
    gc.collect()
    started = time.process_time()
    work()
    return time.process_time() - started
