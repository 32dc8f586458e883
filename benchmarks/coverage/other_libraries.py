"""The other libraries: what torch.fx and torch.export make of a model, and how long torch.export takes.
What torchgraft makes of it is in `examination` and `levels`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.coverage.cases import Inputs
from benchmarks.coverage.judging import described, judge, run
from benchmarks.coverage.rows import EXPORT, EXPORT_CORE, Attempt, Row


def symbolic(model: nn.Module, example: Inputs) -> Attempt:
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


def examine_export(model: nn.Module, example: Inputs, rounds: int, row: Row, report: Callable[[Row], None]) -> None:
    """torch.export as it is, and taken down to core ATen; without the cache that language models return where it must."""
    row.attempts[EXPORT] = Attempt(reasons={"captured": "it did not come to an end in the time given"})
    report(row)
    row.attempts[EXPORT], program, inputs = _exported(model, example, rounds)
    report(row)
    if program is not None:
        row.attempts[EXPORT_CORE] = _decomposed(model, program, inputs, row.attempts[EXPORT].seconds or 0.0, rounds)
        report(row)


def _exported(model: nn.Module, example: Inputs, rounds: int) -> tuple[Attempt, Any, Inputs]:
    from torch.export import export

    attempt = Attempt()
    ways = [example]
    if "use_cache" in _defaults(model, example):
        ways.append(Inputs(example.args, {**example.kwargs, "use_cache": False}))
    for inputs in ways:
        try:
            program, attempt.seconds = _timed(lambda inputs=inputs: export(model, inputs.args, inputs.kwargs), rounds)
        except Exception as error:
            attempt.reasons["captured"] = described(error)
            continue
        attempt.reasons.pop("captured", None)
        if inputs is not example:
            attempt.reasons["cache"] = "exported without its cache"
        _judge_example(attempt, model, program.module(check_guards=False), inputs)
        return attempt, program, inputs
    return attempt, None, example


def _decomposed(model: nn.Module, program: Any, inputs: Inputs, before: float, rounds: int) -> Attempt:
    attempt = Attempt()
    try:
        decomposed, seconds = _timed(program.run_decompositions, rounds)
    except Exception as error:
        attempt.reasons["captured"] = described(error)
        return attempt
    attempt.seconds = before + seconds
    _judge_example(attempt, model, decomposed.module(check_guards=False), inputs)
    return attempt


def _timed(make: Callable[[], Any], rounds: int) -> tuple[Any, float]:
    """What is made, and the least time that took: the first of a kind of model pays for caches."""
    taken: list[float] = []
    while True:
        started = time.process_time()
        made = make()
        taken.append(time.process_time() - started)
        if len(taken) == min(rounds, 2) or taken[0] > 3:
            return made, min(taken)


def _judge_example(attempt: Attempt, model: nn.Module, program: Any, inputs: Inputs) -> None:
    attempt.captured = True
    attempt.nodes = len(program.graph.nodes)
    attempt.verdicts["example"], reason = judge(lambda: run(program, inputs), run(model, inputs))
    if reason:
        attempt.reasons["example"] = reason
