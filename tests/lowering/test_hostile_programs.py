"""The traps for torch's own tracers at the levels that `tests/traps` does not try: core ATen programs, and training steps."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.traps.exported import TRAPS
from tests.traps.observation import first_difference, frozen, seed, state_tensors
from tests.traps.trap import Call, Trap
from torchgraft import GraftError, GuardError, capture, capture_training


def _calls(trap: Trap, other: str | None, gradients: bool = False) -> Call:
    inputs = functools.partial(trap.inputs, trap.example) if other is None else trap.others[other]
    seed(7)
    call = Call.of(inputs())
    if gradients:
        pytree.tree_map(_needed, (call.args, call.kwargs))
    return call


def _model(trap: Trap) -> Any:
    seed(5)
    return trap.build()


def _needed(leaf: Any) -> None:
    if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
        leaf.requires_grad_()


# Models that catch errors of torch's and go on: a program raises them.
SURVIVED = ("an error of an operator survived", "an error of values survived")
CASES = [
    pytest.param(trap, captured, run, id=f"{trap.name}: {captured or 'example'}, {run or 'example'}")
    for trap in TRAPS
    for captured, run in [
        (None, None),
        *[(None, name) for name in trap.others],
        *[(name, None) for name in trap.others],
    ]
]


@pytest.mark.slow
@pytest.mark.parametrize(("trap", "captured", "run"), CASES)
def test_core_aten(trap: Trap, captured: str | None, run: str | None) -> None:
    model, other = _model(trap), _model(trap)
    example, call, again = _calls(trap, captured), _calls(trap, run), _calls(trap, run)
    try:
        program = capture(model, example.args, example.kwargs, level="core_aten")
    except GraftError:
        return
    except RuntimeError:
        assert trap.name in SURVIVED
        return
    for _ in range(2):
        seed(3)
        expected = other(*call.args, **call.kwargs)
        try:
            seed(3)
            found = program(*again.args, **again.kwargs)
        except GuardError:
            return
        except RuntimeError:
            assert trap.name in SURVIVED
            return
        assert first_difference(frozen("result", expected), frozen("result", found)) is None
        assert first_difference(frozen("input", [call]), frozen("input", [again])) is None
        _compare_states(other, model)


@pytest.mark.parametrize(("trap", "captured", "run"), CASES)
def test_training(trap: Trap, captured: str | None, run: str | None) -> None:
    model, other = _model(trap), _model(trap)
    example, call, again = (_calls(trap, name, gradients=True) for name in (captured, run, run))
    try:
        programs = capture_training(model, example.args, example.kwargs)
    except (GraftError, RuntimeError):  # the latter where the model itself fails, because a leaf is written
        return
    for _ in range(2):
        try:
            seed(3)
            expected = other(*call.args, **call.kwargs)
        except RuntimeError:  # a leaf that needs a gradient is written
            with pytest.raises(RuntimeError):
                programs.run(*again.args, **again.kwargs)
            return
        try:
            seed(3)
            found, gradients = programs.run(*again.args, **again.kwargs)
        except GuardError:
            return
        except RuntimeError:
            assert trap.name in SURVIVED
            return
        _compare(expected, found)
        _compare_states(other, model)
        parameters = dict(other.named_parameters()) if isinstance(other, nn.Module) else {}
        results = [
            leaf for leaf in pytree.tree_leaves(expected) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        ones = [torch.ones_like(leaf) for leaf in results]
        wanted = torch.autograd.grad(results, list(parameters.values()), ones, allow_unused=True) if parameters else ()
        for name, gradient in zip(parameters, wanted, strict=True):
            _compare(gradient, gradients[name])


def _compare(expected: Any, found: Any) -> None:
    for one, other in zip(pytree.tree_leaves(expected), pytree.tree_leaves(found), strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(other.detach(), one.detach())
        else:
            assert one == other


def _compare_states(expected: Any, found: Any) -> None:
    assert (
        first_difference(frozen("state", dict(state_tensors(expected))), frozen("state", dict(state_tensors(found))))
        is None
    )
