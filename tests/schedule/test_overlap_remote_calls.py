"""Calls that wait are started early and awaited late, and nothing else about a program changes."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchgraft
from torchgraft import schedule
from torchgraft.errors import GuardError
from torchgraft.schedule import OverlapRemoteCalls, overlaps

POOL = ThreadPoolExecutor(4)
LOG: list[str] = []


def start_fetch(key: Any) -> Any:
    LOG.append("start")
    return POOL.submit(lambda: torch.as_tensor(key).float() * 2)


def wait_fetch(started: Any) -> Any:
    LOG.append("wait")
    return started.result(10)


@schedule.blocking(start=start_fetch, wait=wait_fetch)
def fetch(key: Any) -> Any:
    return wait_fetch(start_fetch(key))


def start_fill(target: Any, value: float) -> Any:
    return POOL.submit(target.fill_, value)


@schedule.blocking(start=start_fill, wait=wait_fetch, writes=["target"], in_order=True)
def fill(target: Any, value: float) -> Any:
    return wait_fetch(start_fill(target, value))


def names(program: Any) -> list[str]:
    return [
        node.name
        for node in program.graph.nodes
        if node.op not in ("placeholder", "get_attr") and "guard" not in node.name
    ]


def overlapped(function: Any, *args: Any, **options: Any) -> Any:
    program = torchgraft.capture(function, args)
    expected = program(*copy.deepcopy(args))
    OverlapRemoteCalls(**options)(program)
    torch.testing.assert_close(program(*copy.deepcopy(args)), expected, rtol=0, atol=0)
    return program


def test_starts_come_first_and_waits_last() -> None:
    def model(x: Any, key: Any) -> Any:
        y = x.sin()
        z = fetch(key) + y
        return z * fetch(key + 1)

    program = overlapped(model, torch.ones(2), torch.ones(2))
    assert names(program) == [
        *("start_fetch", "add_1", "start_fetch_1", "sin", "wait_fetch", "add", "wait_fetch_1", "mul", "output"),
    ]


def test_at_most_so_many_in_flight() -> None:
    def model(x: Any) -> Any:
        return fetch(x) + fetch(x + 1) + fetch(x + 2)

    program = overlapped(model, torch.ones(2), max_in_flight=1)
    halves = [name.split("_")[0] for name in names(program) if "fetch" in name]
    assert halves == ["start", "wait"] * 3
    program = overlapped(model, torch.ones(2), max_in_flight=2)
    halves = [name.split("_")[0] for name in names(program) if "fetch" in name]
    assert halves == ["start", "start", "wait", "start", "wait", "wait"]


def test_results_in_flight_take_no_more_than_max_bytes() -> None:
    def model(x: Any) -> Any:
        return fetch(x) + fetch(x + 1)

    example = torch.ones(4)
    program = torchgraft.capture(model, example)
    for node in program.graph.nodes:
        if node.target is fetch.__torchgraft_original__:  # type: ignore[attr-defined]
            node.meta["val"] = torch.empty(4)
    OverlapRemoteCalls(max_bytes=20)(program)
    halves = [name.split("_")[0] for name in names(program) if "fetch" in name]
    assert halves == ["start", "wait"] * 2
    torch.testing.assert_close(program(example), model(example))


def test_memory_that_is_written_is_looked_at_by_nobody_meanwhile() -> None:
    def model(x: Any) -> Any:
        buffer = torch.zeros(3)
        before = buffer + 1
        view = buffer[:2]
        fill(buffer, 5.0)
        other = x.sin().cos()
        return before, view * 2, other

    program = overlapped(model, torch.ones(3))
    order = names(program)
    assert order.index("add") < order.index("start_fill")
    assert order.index("start_fill") < order.index("sin") < order.index("wait_fetch") < order.index("mul")


def test_what_is_only_read_is_not_written_meanwhile() -> None:
    def model(x: Any) -> Any:
        key = x * 2
        value = fetch(key)
        key.add_(1)
        return value + key

    order = names(overlapped(model, torch.ones(3)))
    assert order.index("wait_fetch") < order.index("add_")


def test_random_draws_and_guards_keep_their_places() -> None:
    def model(x: Any) -> Any:
        if x.sum() > 0:
            x = x + 1
        noise = torch.rand(3)
        return fetch(x) + noise + torch.rand(3)

    program = torchgraft.capture(model, torch.ones(3))
    OverlapRemoteCalls()(program)
    order = [node.name for node in program.graph.nodes]
    assert max(order.index(name) for name in order if name.startswith("guard")) < order.index("start_fetch")
    torch.manual_seed(3)
    expected = model(torch.ones(3))
    torch.manual_seed(3)
    assert torch.equal(program(torch.ones(3)), expected)
    with pytest.raises(GuardError):
        LOG.clear()
        program(-torch.ones(3))
    assert LOG == []


def test_calls_in_order_are_started_in_order() -> None:
    def model(x: Any) -> Any:
        late = x
        for _ in range(20):
            late = late.sin()
        first, second = late.clone(), x.clone()
        fill(first, 1.0)
        fill(second, 2.0)
        return first + second

    program = overlapped(model, torch.ones(3))
    starts = [node for node in program.graph.nodes if node.name.startswith("start_fill")]
    assert [node.args[1] for node in starts] == [1.0, 2.0]


def test_regions_are_not_left() -> None:
    def model(x: Any) -> Any:
        with torch.no_grad():
            y = x * 2
            z = fetch(x.detach())
        return y + z, x.sin()

    program = overlapped(model, torch.ones(3, requires_grad=True))
    y, _ = program(torch.ones(3, requires_grad=True))
    assert not y.requires_grad


def test_a_second_run_changes_nothing() -> None:
    program = overlapped(lambda x: fetch(x) + x.sin(), torch.ones(2))
    before = str(program.graph)
    assert OverlapRemoteCalls()(program).changes == 0
    assert str(program.graph) == before


def test_copies_pickles_and_the_text_name() -> None:
    program = torchgraft.capture(_module_level, torch.ones(2))
    torchgraft.passes.Pipeline("overlap-remote-calls{max_in_flight=2}")(program)
    for other in (copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        assert torch.equal(other(torch.ones(2)), program(torch.ones(2)))
        assert overlaps(other).rows() == overlaps(program).rows()


def _module_level(x: Any) -> Any:
    return fetch(x) + x.sin()


def test_the_report_says_how_far_and_what_stops_it() -> None:
    def model(x: Any) -> Any:
        y = x.sin().cos()
        key = x + 1
        return fetch(key) * y

    program = overlapped(model, torch.ones(2))
    (call,) = overlaps(program, torch.ones(2)).calls
    assert (call.hoisted, call.sunk, call.meanwhile) == (2, 0, 2)
    assert call.start_after == "add, whose value it needs"
    assert call.wait_before == "mul, which needs it"
    assert call.where.startswith("test_overlap_remote_calls.py:")
    assert call.work is not None and call.work > 0
    assert "1 call in flight" in str(overlaps(program))


def test_gradients_flow_through() -> None:
    def model(x: Any) -> Any:
        return (fetch(x) * x.sin()).sum()

    program = torchgraft.capture(model, torch.ones(3))
    OverlapRemoteCalls()(program)
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    program(x).backward()
    model(y).backward()
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


def test_an_error_of_a_call_names_its_line() -> None:
    def failing(key: Any) -> Any:
        return fetch(key)

    program = torchgraft.capture(lambda x: failing(x) + x.sin(), torch.ones(2))
    OverlapRemoteCalls()(program)
    original = POOL.submit
    try:
        POOL.submit = lambda work: original(lambda: 1 / 0)  # type: ignore[method-assign,assignment]
        with pytest.raises(ZeroDivisionError) as caught:
            program(torch.ones(2))
    finally:
        POOL.submit = original  # type: ignore[method-assign]
    notes = "\n".join(getattr(caught.value, "__notes__", []))
    assert "test_overlap_remote_calls.py" in notes and "wait_fetch" in notes


def test_threads() -> None:
    program = overlapped(lambda x: fetch(x) + fetch(x * 3) + x.sin(), torch.ones(4))
    results: list[Any] = [None] * 16

    def work(number: int) -> None:
        results[number] = program(torch.full((4,), float(number)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, result in enumerate(results):
        x = torch.full((4,), float(number))
        torch.testing.assert_close(result, x * 2 + x * 6 + x.sin())


@pytest.mark.parametrize("options", [{"start": 5, "wait": wait_fetch}, {"start": start_fetch, "wait": None}])
def test_wrong_declarations(options: Any) -> None:
    with pytest.raises(TypeError, match="expected a function"):
        schedule.blocking(**options)


def test_unknown_parameters_and_limits() -> None:
    with pytest.raises(TypeError, match="has no parameter 'nothing'"):
        schedule.blocking(start=start_fetch, wait=wait_fetch, writes=["nothing"])(lambda key: key)
    with pytest.raises(ValueError, match="at least 1"):
        OverlapRemoteCalls(max_in_flight=0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), limit=st.integers(1, 4))
def test_random_programs_give_the_same(seed: int, limit: int) -> None:
    choose = random.Random(seed)
    steps = [
        (choose.choice(["sin", "fetch", "add", "write", "fill", "view", "rand"]), choose.random(), choose.random())
        for _ in range(14)
    ]

    class Model(nn.Module):
        def forward(self, x: Any) -> Any:
            values = [x * 1]
            for kind, first, second in steps:
                one, two = values[int(first * len(values))], values[int(second * len(values))]
                if kind == "sin":
                    values.append(one.sin())
                elif kind == "fetch":
                    values.append(fetch(one))
                elif kind == "add":
                    values.append(one + two)
                elif kind == "write":
                    one.mul_(0.5)
                elif kind == "fill":
                    fill(one, first)
                elif kind == "view":
                    values.append(one[...])
                else:
                    values.append(one + torch.rand(3))
            return values

    program = torchgraft.capture(Model(), torch.ones(3))
    torch.manual_seed(seed)
    expected = Model()(torch.ones(3))
    OverlapRemoteCalls(max_in_flight=limit)(program)
    torch.manual_seed(seed)
    for ours, theirs in zip(program(torch.ones(3)), expected, strict=True):
        assert torch.equal(ours, theirs)
