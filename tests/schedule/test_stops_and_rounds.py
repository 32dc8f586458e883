"""What stops a call from being in flight for longer; work is shared out where calls wait for one another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchgraft
from tests.schedule.test_overlap_remote_calls import LOG, fetch, fill, names
from torchgraft.errors import GraphError
from torchgraft.schedule import OverlapRemoteCalls, overlaps


@torchgraft.wrap
def anything(x: Any) -> Any:
    return x + 1


def scheduled(function: Any, *args: Any, **options: Any) -> Any:
    program = torchgraft.capture(function, args)
    OverlapRemoteCalls(**options)(program)
    return program


def stops(program: Any) -> list[tuple[str, str]]:
    return [(call.start_after, call.wait_before) for call in overlaps(program).calls]


def test_values_and_the_end() -> None:
    def model(x: Any) -> Any:
        key = x + 1
        return fetch(key), x.sin()

    assert stops(scheduled(model, torch.ones(2))) == [("add, whose value it needs", "output, which needs it")]


def test_memory() -> None:
    def model(x: Any) -> Any:
        buffer = torch.zeros(3)
        before = buffer.sin()
        fill(buffer, 2.0)
        return before, buffer.cos(), x.sin()

    program = scheduled(model, torch.ones(2))
    assert stops(program) == [("sin, which uses the same memory", "cos, which needs it")]


def test_what_is_computed_of_an_input_is_no_memory_of_the_input() -> None:
    """A list times two would hold what the list holds; that the input is a tensor is checked."""

    def model(x: Any) -> Any:
        buffer = x * 2
        fill(buffer, 2.0)
        return buffer, x[::2] + 1, x @ x

    program = scheduled(model, torch.ones(2))
    assert stops(program) == [("mul, whose value it needs", "output, which needs it")]
    assert overlaps(program).calls[0].sunk == 3


def test_the_order_of_calls_in_order() -> None:
    def model(x: Any) -> Any:
        second, first = x.clone(), x.sin().cos().clone()
        fill(first, 1.0)
        fill(second, 2.0)
        return first, second

    program = scheduled(model, torch.ones(2))
    assert stops(program)[1][0] == "start_fill, which comes first in every process"


def test_regions() -> None:
    def model(x: Any) -> Any:
        y = x.sin()
        with torch.no_grad():
            z = fetch(x)
        return y.cos() + z

    program = scheduled(model, torch.ones(2))
    (stop,) = stops(program)
    assert stop[0].endswith(", where a region begins") and stop[1].endswith(", where a region ends"), stop


def test_guards() -> None:
    def model(x: Any) -> Any:
        y = x.sin()
        if y.sum() > 0:
            y = y + 1
        return fetch(x) + y

    assert stops(scheduled(model, torch.ones(2)))[0][0].endswith(", a guard")


def test_what_may_do_anything() -> None:
    program = scheduled(lambda x: fetch(x) + anything(x), torch.ones(2))
    assert stops(program) == [("guard, a guard", "anything, which may do anything")]


def test_limits() -> None:
    def model(x: Any) -> Any:
        return fetch(x) + fetch(x + 1) + fetch(x + 2)

    first, second, third = stops(scheduled(model, torch.ones(2), max_in_flight=1))
    assert first[1] == second[1] == "others start, because of max_in_flight=1"
    assert second[0] == third[0] == "others were awaited, because of max_in_flight=1"
    assert third[1].endswith("which needs it")


def test_answers_have_a_size_without_shapes_being_propagated() -> None:
    def model(x: Any) -> Any:
        return fetch(x) + fetch(x + 1)

    halves = [name.split("_")[0] for name in names(scheduled(model, torch.ones(4), max_bytes=20)) if "fetch" in name]
    assert halves == ["start", "wait"] * 2
    halves = [name.split("_")[0] for name in names(scheduled(model, torch.ones(4), max_bytes=32)) if "fetch" in name]
    assert halves == ["start"] * 2 + ["wait"] * 2


def chained(x: Any) -> Any:
    key = fetch(x)
    for _ in range(2):
        key = fetch(key)
    rest = x
    for _ in range(9):
        rest = rest.sin()
    return key + rest


def test_work_is_shared_out_where_calls_wait_for_one_another() -> None:
    order = names(scheduled(chained, torch.ones(2)))
    marks = ["sin" if name.startswith("sin") else name.split("_")[0] for name in order]
    assert marks == [
        "start",
        *["sin"] * 4,
        "wait",
        "start",
        *["sin"] * 4,
        "wait",
        "start",
        "sin",
        "wait",
        "add",
        "output",
    ]


def test_work_is_shared_out_by_flops_where_inputs_are_known() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Any) -> Any:
            late = fetch(fetch(x))
            y = x.sin().cos().sin().cos()
            return late + self.layer(self.layer(y))

    example = torch.ones(2, 64)
    program = torchgraft.capture(Model(), example)
    torchgraft.passes.Pipeline("overlap-remote-calls")(program, check=(example,))
    order = names(program)
    # The two layers are nearly all of the work; by the number of calls the second wait would come before both.
    assert order.index("layer") < order.index("wait_fetch") < order.index("layer_1") < order.index("wait_fetch_1"), (
        order
    )


def test_limits_share_out_too() -> None:
    def model(x: Any) -> Any:
        rest = x
        for _ in range(9):
            rest = rest.sin()
        return fetch(x), fetch(x), fetch(x), rest

    order = names(scheduled(model, torch.ones(2), max_in_flight=1))
    marks = ["sin" if name.startswith("sin") else name.split("_")[0] for name in order]
    assert marks == [*["start", *["sin"] * 3, "wait"] * 3, "output"]


@pytest.mark.parametrize("cost", ["flops", "simulated"])
def test_work_is_estimated_without_asking_anybody(cost: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Any) -> Any:
            return self.layer(x) + fetch(x)

    example = torch.ones(2, 64)
    program = torchgraft.capture(Model(), example)
    LOG.clear()
    OverlapRemoteCalls()(program)
    report = overlaps(program, example, cost=cost)
    assert LOG == []
    (call,) = report.calls
    assert call.work is not None and call.waited is None
    if cost == "flops":
        assert call.work == 2 * 2 * 64 * 64 + 1
    assert ("FLOP" if cost == "flops" else "s") in str(report)
    torchgraft.cost(program, example)
    torchgraft.passes.Pipeline("propagate-shapes")(program, check=(example,))
    assert tuple(next(n for n in program.graph.nodes if n.name == "wait_fetch").meta["tensor_meta"].shape) == (2, 64)


def test_work_by_a_function_of_a_node_and_what_is_no_cost() -> None:
    program = scheduled(lambda x: fetch(x) + x.sin().cos(), torch.ones(2))
    assert overlaps(program, cost=lambda node: 2.0).calls[0].work == 4.0
    with pytest.raises(GraphError, match="no cost is called 'guess'"):
        overlaps(program, torch.ones(2), cost="guess")
