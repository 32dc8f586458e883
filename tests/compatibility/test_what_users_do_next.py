"""Levels of capture times what users go on to do, over small models of every kind, with the model itself as the control: every use
that works on the model works on its program and gives the same. Real models of libraries are tried under the marker `zoo`.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchgraft
from tests.compatibility.small_models import MODELS, AttentionBlock, Given
from tests.compatibility.uses import OF_PROGRAMS, SLOW, USES, called

LEVELS = ("symbolic", "module", "function")
# Models that a symbolic trace refuses: one branches on a size, one asks for the names of its inputs, one counts its calls.
NOT_TRACED = {"convolutions", "keywords", "kept whole"}
# A part that no graph can say is kept whole by capture alone; torch.fx cannot assign to an item of a proxy.
NOT_TRACED_AGAIN = {"kept whole": "symbolic_trace", "in place": "torch.fx.symbolic_trace"}
# For the test of every day each model is put to the slow uses at one level, and each level with a third of the models.
_FAST = {(name, LEVELS[1 + number % 2]) for number, name in enumerate(MODELS)}


def captured(model: nn.Module, given: Given, level: str) -> torchgraft.GraphModule:
    """A program that has never run."""
    if level == "symbolic":
        return torchgraft.symbolic_trace(model, {"mask": None} if isinstance(model, AttentionBlock) else None)
    return torchgraft.capture(model, given.args, given.kwargs, level=level)


def cases() -> Iterator[Any]:
    for level in LEVELS:
        for model in MODELS:
            if level == "symbolic" and model in NOT_TRACED:
                continue
            for use in USES:
                if NOT_TRACED_AGAIN.get(model, "-") in use:
                    continue
                is_slow = use in SLOW and (model, level) not in _FAST
                yield pytest.param(level, model, use, marks=[pytest.mark.slow] if is_slow else [])


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def check(make: Callable[[], nn.Module], inputs: Callable[[int], Given], level: str, use: str) -> None:
    """The use on the model, then on its program; skipped where the model does not survive it."""
    torch.manual_seed(0)
    model = make().eval()

    def same_inputs(size: int) -> Given:
        torch.manual_seed(size)
        return inputs(size)

    program = captured(copy.deepcopy(model), same_inputs(2), level)
    try:
        expected = USES[use](copy.deepcopy(model), same_inputs)
    except Exception as error:
        if use in OF_PROGRAMS:
            raise
        pytest.skip(f"the model itself fails: {type(error).__name__}: {str(error).strip().splitlines()[0][:100]}")
    found = USES[use](program, same_inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("level", "model", "use"), list(cases()))
def test_what_works_on_the_model_works_on_the_program(level: str, model: str, use: str) -> None:
    make, inputs = MODELS[model]
    check(make, inputs, level, use)


@pytest.mark.parametrize("model", sorted(NOT_TRACED))
def test_models_that_are_not_traced_symbolically_are_refused(model: str) -> None:
    with pytest.raises(torchgraft.TraceError):
        torchgraft.symbolic_trace(MODELS[model][0]())
