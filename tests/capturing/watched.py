"""Comparing a watched capture with the model it was captured from: results, gradients, state, random numbers, inputs.
Which models are compared, and what else is asked of their programs, is said in the tests.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft import GraphModule, GuardError
from torchgraft.ir.structures import attributes_of, has_attributes

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def given(*args: Any, **kwargs: Any) -> Callable[[], Inputs]:
    """Inputs that are made anew for each run: what can be called is called, with the same random numbers each time."""

    def make() -> Inputs:
        torch.manual_seed(11)
        values = [value() if callable(value) else value for value in args]
        return tuple(values), {name: value() if callable(value) else value for name, value in kwargs.items()}

    return make


def normal(*size: int) -> Callable[[], torch.Tensor]:
    """A random tensor, made when it is asked for."""
    return lambda: torch.randn(*size)


def captured_like_eager(
    make: Callable[[], Any],
    example: Callable[[], Inputs],
    others: Iterable[Callable[[], Inputs]] = (),
    levels: tuple[str, ...] = ("module", "function"),
    is_copied: bool = True,
) -> GraphModule:
    """Capture a model at each level, compare with eager on all inputs, also after dead code is removed and as a copy.

    Returns the program of the first level.
    """
    situations = [example, *others]
    programs = []
    for level in levels:
        expected = _observations(_made(make), situations)
        for edit in ("none", "dead code removed", *(["copied"] if is_copied else [])):
            model = _made(make)
            before, arguments = _state(model), example()
            states = torch.get_rng_state()
            program = torchgraft.capture(model, *arguments, level=level)
            assert_same(_state(model), before, "the model after capture")
            assert torch.equal(torch.get_rng_state(), states), "capture used random numbers"
            assert_same(arguments, example(), "the inputs after capture")
            if edit == "dead code removed":
                program.graph.eliminate_dead_code()
            elif edit == "copied":
                program = copy.deepcopy(program)
            elif not programs:
                programs.append(program)
            found = _observations(program, situations)
            assert not isinstance(found[0], GuardError), f"the example is refused: {found[0]}"
            for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
                if not isinstance(ours, GuardError):
                    assert_same(ours, theirs, f"{level}, {edit}, inputs {number}")
    return programs[0]


def refused_in_the_other_mode(make: Callable[[], nn.Module], x: torch.Tensor) -> None:
    """Capture a model in each mode: looked into and as in eager there, and refused where the mode is the other one."""
    for training in (False, True):
        model = make().train(training)
        program = torchgraft.capture(model, (x,))
        assert torch.equal(program(x), model(x)) and is_looked_into(program)
        with pytest.raises(GuardError, match=r"self\.training"):
            program.train(not training)(x)


def is_looked_into(program: GraphModule) -> bool:
    """Whether nothing of the model was kept whole."""
    return not program.meta["kept_whole"]


def runs_free(program: GraphModule, inputs: Callable[[], Inputs]) -> bool:
    """Whether a program accepts inputs of other sizes."""
    args, kwargs = inputs()
    try:
        program(*args, **kwargs)
    except GuardError:
        return False
    return True


def _made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    return make()


def _state(model: Any) -> dict[str, Any]:
    if not isinstance(model, nn.Module):
        return {}
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _observations(function: Any, situations: list[Callable[[], Inputs]]) -> list[Any]:
    """What each run returns, leaves and differentiates to; the GuardError where there is one. The last is all that is left."""
    found = []
    for make_inputs in situations:
        args, kwargs = make_inputs()
        torch.manual_seed(3)
        try:
            output = function(*args, **kwargs)
        except GuardError as error:
            found.append(error)
            continue
        tensors = [leaf for leaf in _leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        sources = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        gradients = None
        if tensors and sources:
            loss = sum([(leaf.real * (place + 1)).sum() for place, leaf in enumerate(tensors)])
            gradients = torch.autograd.grad(loss, sources, allow_unused=True)  # type: ignore[arg-type]
        found.append((_leaves(output), _leaves((args, kwargs)), gradients, torch.rand(1)))
    return found


def _leaves(value: Any) -> list[Any]:
    """Everything in a structure, with the types of its containers."""
    if isinstance(value, torch.Tensor) or value is None or isinstance(value, (int, float, str, bool, complex)):
        return [value]
    if isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, (tuple, list, set, deque)):
        parts = list(enumerate(value))
    else:
        parts = list(attributes_of(value).items()) if has_attributes(value) and not callable(value) else []
    return [type(value), *[key for key, _ in parts], *[leaf for _, part in parts for leaf in _leaves(part)]]


def assert_same(found: Any, expected: Any, what: str) -> None:
    """Fail unless two structures hold the same: types, plain values, and tensors nearly equal."""
    ours, theirs = _leaves(found), _leaves(expected)
    assert len(ours) == len(theirs), what
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, torch.Tensor):
            assert isinstance(one, torch.Tensor) and one.requires_grad == other.requires_grad, what
            torch.testing.assert_close(one, other, equal_nan=True, msg=lambda text: f"{what}: {text}")
        else:
            assert type(one) is type(other) and one == other, f"{what}: {one} instead of {other}"
