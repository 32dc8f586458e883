"""Conditions over inputs, as one function: what is told where one does not hold, and what traced values become."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchgraft
from torchgraft.bridge.conditions import compiled, is_exactly, is_plain_tensor


def refuse(condition: str, left: str, found: Any) -> None:
    raise ValueError(f"{condition}; {left} is {found!r}")


def test_the_first_that_does_not_hold_is_told_with_its_left_side() -> None:
    check = compiled(["x", "n"], ["x.size()[0] == n", "not n % 2", "n < inf"], refuse)
    assert check(torch.ones(4), 4) is None
    with pytest.raises(ValueError, match=r"^x\.size\(\)\[0\] == n; x\.size\(\)\[0\] is 5$"):
        check(torch.ones(5), 3)
    with pytest.raises(ValueError, match=r"^not n % 2; not n % 2 is False$"):
        check(torch.ones(3), 3)


def test_without_conditions_everything_passes() -> None:
    assert compiled([], [], refuse)() is None


def test_traced_values_become_part_of_the_program() -> None:
    check = compiled(["x"], ["is_plain_tensor(x)", "x.size()[0] == 3"], refuse)

    def function(x: torch.Tensor) -> torch.Tensor:
        check(x)
        return x * 2

    program = torchgraft.symbolic_trace(function)
    assert any(node.target is torch._assert for node in program.graph.nodes)
    assert program(torch.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(AssertionError, match="does not hold"):
        program(torch.ones(4))


def test_what_conditions_may_call() -> None:
    class Named(torch.Tensor):
        pass

    labelled = torch.ones(2)
    labelled.label = "cat"  # type: ignore[attr-defined]
    values = (torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Named), labelled, 3)
    assert [is_plain_tensor(value) for value in values] == [True, True, False, False, False]
    assert is_exactly(int, 1) and not is_exactly(int, True) and not is_exactly(float, 1)
