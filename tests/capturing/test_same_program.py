"""Whether two runs made the same program: names of nodes and what is only read or checked make no difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchgraft import capture
from torchgraft.capturing.same_program import does_the_same


def _same(first: Callable[..., Any], second: Callable[..., Any], x: torch.Tensor | None = None) -> bool:
    example = torch.ones(3, 4) if x is None else x
    return does_the_same(capture(first, (example,)).graph, capture(second, (example,)).graph)


def _checked(x: torch.Tensor) -> torch.Tensor:
    assert x.dtype == torch.float32
    return x.view(x.shape[0], -1) * 2


def _unchecked(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0], -1) * 2


def test_a_program_is_the_same_as_itself() -> None:
    assert _same(_checked, _checked)


def test_the_second_may_check_less_but_not_more() -> None:
    assert _same(_checked, _unchecked) and not _same(_unchecked, _checked)


def test_what_a_check_asks_is_compared_too() -> None:
    def different(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x if x is y else x + y

    example = torch.ones(2), torch.ones(2)
    assert does_the_same(capture(different, example).graph, capture(different, example).graph)


def test_other_operations_arguments_and_orders_are_different() -> None:
    assert not _same(lambda x: x * 2, lambda x: x * 3)
    assert not _same(lambda x: x * 2, lambda x: x * 2.0)
    assert not _same(lambda x: x.sum(0), lambda x: x.sum(dim=0))
    assert not _same(lambda x: x.relu() + x.neg(), lambda x: x.neg() + x.relu())
    assert not _same(lambda x: x[:2], lambda x: x[:3])
    assert not _same(lambda x: x * 2, lambda x: (x * 2, x))


def test_writes_keep_their_place() -> None:
    def before(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y + 1
        y.add_(1)
        return y * z

    def after(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.add_(1)
        z = y + 1
        return y * z

    assert _same(before, before) and not _same(before, after)


class Box:
    def __init__(self, value: Any, note: Any) -> None:
        self.value, self.note = value, note


def test_objects_are_what_they_hold() -> None:
    assert _same(lambda x: Box(x * 2, [1, "a"]), lambda x: Box(x * 2, [1, "a"]))
    assert not _same(lambda x: Box(x * 2, [1, "a"]), lambda x: Box(x * 2, [1, "b"]))
    assert not _same(lambda x: Box(x * 2, 0.0), lambda x: Box(x * 2, -0.0))


def test_constants_are_compared_by_their_numbers() -> None:
    first, equal, other = torch.ones(4), torch.ones(4), torch.zeros(4)
    assert _same(lambda x: x + first, lambda x: x + equal)
    assert not _same(lambda x: x + first, lambda x: x + other)
