"""`torch.fx._symbolic_trace.is_fx_tracing()`, asked by a library that is being traced, is answered for our traces."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
import torch.fx
from torch.fx._symbolic_trace import is_fx_symbolic_tracing, is_fx_tracing

import torchgraft

QUESTIONS = {"is_fx_tracing": is_fx_tracing, "is_fx_symbolic_tracing": is_fx_symbolic_tracing}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.fx's, which says that there are two questions
        yield


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_traced_library_takes_the_branch_it_has_for_tracing(name: str) -> None:
    question = QUESTIONS[name]

    def function(x: torch.Tensor) -> torch.Tensor:
        if not question():
            assert x.sum() > -100
        return x + 1

    for library in (torch.fx, torchgraft):
        traced: Any = library.symbolic_trace(function)
        assert [node.name for node in traced.graph.nodes] == ["x", "add", "output"]
        assert not question()
    assert not torchgraft._symbolic_trace.is_fx_tracing()


@pytest.mark.parametrize("name", QUESTIONS)
def test_torch_fx_gets_its_own_answer(name: str) -> None:
    answers: list[bool] = []

    def function(x: Any) -> Any:
        answers.append(QUESTIONS[name]())
        return x

    torch.fx.symbolic_trace(function)
    torchgraft.capture(function, (torch.ones(1),))  # which runs for real
    assert answers[0] and not any(answers[1:])


def test_other_threads_are_not_tracing() -> None:
    answers: list[bool] = []

    def ask() -> None:
        answers.append(is_fx_tracing())

    class Tracer(torchgraft.Tracer):
        def create_arg(self, a: Any) -> Any:
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            return super().create_arg(a)

    Tracer().trace(lambda x: x + 1)
    assert answers and not any(answers)


def test_it_ends_with_an_error() -> None:
    def function(x: Any) -> Any:
        raise KeyError("no")

    with pytest.raises(KeyError):
        torchgraft.symbolic_trace(function)
    assert not is_fx_tracing() and not is_fx_symbolic_tracing()


def test_a_compiled_function_says_what_torch_says() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    for library in (torch.fx, torchgraft):
        with pytest.raises(RuntimeError, match="using FX to symbolically trace a dynamo-optimized function"):
            library.symbolic_trace(lambda x: compiled(x) * 2)
