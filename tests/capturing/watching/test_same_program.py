"""Whether two runs did the same: names of nodes, and what is only read or checked, make no difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchgraft import GuardError, capture
from torchgraft.capturing.state.model_state import ModelState
from torchgraft.capturing.watching.run import Run, watched_run
from torchgraft.capturing.watching.same_program import first_difference, has_checks_of
from torchgraft.capturing.watching.watcher import Watcher


def _run(function: Callable[..., Any], *inputs: Any, like: Run | None = None) -> Run:
    watcher = Watcher(nn.Module(), ModelState({}), lambda module, path: False)
    if like is not None:
        watcher.be_plain(like.watcher)
    return watched_run(watcher, function, inputs or (torch.ones(3, 4),), {}, [])


def _same(first: Callable[..., Any], second: Callable[..., Any], is_plain: bool = True) -> bool:
    one = _run(first)
    return first_difference(one.record, _run(second, like=one if is_plain else None).record) is None


def _sizes(x: torch.Tensor) -> torch.Tensor:
    y = x.view(x.shape[0], -1).to(x.dtype) * (x.shape[1] // 2)
    return y[: x.shape[0] - 1] + torch.zeros(x.shape, device=x.device)[0]


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_run_with_plain_numbers_is_the_same(is_plain: bool) -> None:
    assert _same(_sizes, _sizes, is_plain)


@pytest.mark.parametrize("is_plain", [True, False])
def test_other_operations_arguments_and_orders_are_different(is_plain: bool) -> None:
    pairs: list[Any] = [
        (lambda x: x * 2, lambda x: x * 3),
        (lambda x: x * 2, lambda x: x * 2.0),
        (lambda x: x.view(x.shape[0], -1), lambda x: x.view(x.shape[0] // 3, -1)),
        (lambda x: x.sum(0), lambda x: x.sum(dim=0)),
        (lambda x: x.relu() + x.neg(), lambda x: x.neg() + x.relu()),
        (lambda x: x[:2], lambda x: x[:3]),
        (lambda x: x * 2, lambda x: (x * 2, x)),
        (lambda x: x * 2, lambda x: x * 2 * 2),
        (lambda x: {"a": x}, lambda x: {"b": x}),
    ]
    assert [_same(first, second, is_plain) for first, second in pairs] == [False] * len(pairs)


def test_the_second_may_check_less_but_not_more() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        return x * 2

    more, less = _run(checked).record, _run(lambda x: x * 2).record
    assert has_checks_of(more, less) and not has_checks_of(less, more)


class Box:
    def __init__(self, value: Any, note: Any) -> None:
        self.value, self.note = value, note


def test_objects_are_what_they_hold() -> None:
    assert _same(lambda x: Box(x * 2, [x.shape[0], "a"]), lambda x: Box(x * 2, [3, "a"]))
    assert not _same(lambda x: Box(x * 2, [1, "a"]), lambda x: Box(x * 2, [1, "b"]))
    assert not _same(lambda x: Box(x * 2, 0.0), lambda x: Box(x * 2, -0.0))
    assert _same(lambda x: Box(x * 2, float("nan")), lambda x: Box(x * 2, float("nan")))


def test_a_tensor_that_is_another_one_was_made_by_the_run() -> None:
    first, equal = torch.ones(4), torch.ones(4)
    assert _same(lambda x: x + first, lambda x: x + first)
    one = _run(lambda x: x + first)
    difference = first_difference(one.record, _run(lambda x: x + equal, like=one).record)
    assert difference is not None and difference.is_made


# ---- what two runs find ----

seen: dict[str, Any] = {"count": 0, "cache": {}}


class Counts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen["count"] += 1
        return x * seen["count"]


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.counts = nn.Linear(4, 4), Counts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.counts(self.first(x)).relu()


def test_the_module_that_does_something_else_is_kept_whole() -> None:
    program = capture(Holds(), (torch.ones(2, 4),))
    assert [node.target for node in program.graph.find_nodes(op="call_module")] == ["first", "counts"]
    assert 'x * seen["count"]' in program.meta["kept_whole"]["counts"]
    before, x = seen["count"], torch.ones(2, 4)
    ratio = program(x) / program.first(x).relu()
    assert torch.allclose(ratio[ratio.isfinite()], torch.tensor(float(before + 1)))


def test_one_run_sees_no_other_state() -> None:
    assert not capture(Holds(), (torch.ones(2, 4),), runs=1).meta["kept_whole"]
    with pytest.raises(ValueError, match="runs must be 1 or 2"):
        capture(Holds(), (torch.ones(2, 4),), runs=3)


def test_a_cache_that_the_first_run_fills_is_no_difference_later() -> None:
    def cached(x: torch.Tensor) -> torch.Tensor:
        if "ramp" not in seen["cache"]:
            seen["cache"]["ramp"] = torch.arange(4.0)
        return x + seen["cache"]["ramp"]

    seen["cache"].clear()
    program = capture(cached, (torch.ones(2, 4),))
    assert not program.meta["kept_whole"]
    assert torch.equal(program(torch.zeros(3, 4)), cached(torch.zeros(3, 4)))


def test_the_type_of_a_size_and_the_identity_of_a_dtype() -> None:
    """What is handed out for them is another object, which the second run finds out."""

    def is_half(kind: Any) -> bool:
        return kind is torch.float32

    def asks(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if is_half(x.dtype) else x * 3

    program = capture(asks, (torch.ones(2),))
    assert torch.equal(program(torch.ones(2)), asks(torch.ones(2)))
    with pytest.raises(GuardError):
        program(torch.ones(2).double())
