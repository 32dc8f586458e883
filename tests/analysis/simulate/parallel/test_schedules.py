"""Schedules against their closed formulas for equal stages, what is under way at most, and orders that cannot be wrong."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchgraft.analysis.simulate.parallel.schedules import (
    SCHEDULES,
    Task,
    most_bytes,
    most_in_flight,
    orders_of,
    run_schedule,
)
from torchgraft.errors import GraftError

FORWARD, BACKWARD = 1.0, 2.0


def equal(task):
    return BACKWARD if task.backward else FORWARD


def at_once(source, target):
    return 0.0


def bubble_of(done, devices):
    makespan = max(entry.end for entry in done)
    return 1 - sum(entry.end - entry.start for entry in done) / (makespan * devices)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 7, 32])
def test_the_bubble_of_equal_stages(schedule, devices, microbatches):
    done = run_schedule(orders_of(schedule, devices, microbatches), equal, at_once)
    expected = (devices - 1) / (microbatches + devices - 1)
    assert bubble_of(done, devices) == pytest.approx(expected)
    assert max(entry.end for entry in done) == pytest.approx((microbatches + devices - 1) * (FORWARD + BACKWARD))


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(devices, rounds, chunks):
    microbatches = devices * rounds
    done = run_schedule(orders_of("interleaved", devices, microbatches, chunks), equal, at_once)
    work = microbatches * chunks * (FORWARD + BACKWARD)
    idle = max(entry.end for entry in done) - work
    assert idle == pytest.approx((devices - 1) * (FORWARD + BACKWARD))  # of stages that are 1/chunks of a device's work
    assert bubble_of(done, devices) == pytest.approx((devices - 1) / (microbatches * chunks + devices - 1))


@pytest.mark.parametrize("devices", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 3, 16])
def test_micro_batches_under_way(devices, microbatches):
    flights = {
        name: most_in_flight(run_schedule(orders_of(name, devices, microbatches), equal, at_once), devices)
        for name in ("gpipe", "1f1b")
    }
    assert flights["gpipe"] == [microbatches] * devices
    assert flights["1f1b"] == [min(devices - stage, microbatches) for stage in range(devices)]


def test_bytes_under_way_on_a_device_with_two_stages():
    done = run_schedule(orders_of("interleaved", 2, 4, 2), equal, at_once)
    own = [entry for entry in done if entry.device == 0]
    flights = most_in_flight(done, 4)
    assert most_bytes(own, [10.0, 0.0, 10.0, 0.0]) <= 10 * (flights[0] + flights[2])
    assert most_bytes(own, [1.0, 0.0, 0.0, 0.0]) == flights[0]


def test_without_training_there_is_no_backward():
    orders = orders_of("1f1b", 3, 4, training=False)
    assert not any(task.backward for order in orders for task in order)
    done = run_schedule(orders, equal, at_once)
    assert max(entry.end for entry in done) == 4 + 3 - 1
    assert most_in_flight(done, 3) == [1, 1, 1]


def test_a_slow_stage_sets_the_pace():
    done = run_schedule(orders_of("gpipe", 2, 10, training=False), lambda task: (1.0, 5.0)[task.stage], at_once)
    assert max(entry.end for entry in done) == 1 + 10 * 5


def test_transfers_take_time_but_no_device():
    orders = orders_of("1f1b", 2, 1)
    late = run_schedule(orders, equal, lambda source, target: 10.0)
    assert max(entry.end for entry in late) == 2 * (FORWARD + BACKWARD) + 20
    assert sum(entry.end - entry.start for entry in late) == 2 * (FORWARD + BACKWARD)


@settings(max_examples=60, deadline=None)
@given(
    schedule=st.sampled_from(SCHEDULES),
    devices=st.integers(1, 5),
    rounds=st.integers(1, 3),
    chunks=st.integers(1, 3),
    times=st.lists(st.floats(0.01, 5.0), min_size=15, max_size=15),
    transfer=st.floats(0.0, 2.0),
)
def test_every_schedule_keeps_the_order_of_what_needs_what(schedule, devices, rounds, chunks, times, transfer):
    chunks = chunks if schedule == "interleaved" else 1
    microbatches, stages = devices * rounds, devices * chunks
    orders = orders_of(schedule, devices, microbatches, chunks)
    done = run_schedule(orders, lambda task: times[task.stage] * (1 + task.backward), lambda a, b: transfer)
    by_task = {entry.task: entry for entry in done}
    assert len(by_task) == len(done) == 2 * stages * microbatches
    for task, device, start, end in done:
        assert device == task.stage % devices
        assert end - start == pytest.approx(times[task.stage] * (1 + task.backward))
        if task.backward:
            assert start >= by_task[Task(False, task.stage, task.microbatch)].end - 1e-9
        neighbour = task.stage + (1 if task.backward else -1)
        if 0 <= neighbour < stages:
            assert start >= by_task[Task(task.backward, neighbour, task.microbatch)].end + transfer - 1e-9
    for device in range(devices):
        own = sorted((entry.start, entry.end) for entry in done if entry.device == device)
        assert all(one[1] <= other[0] + 1e-9 for one, other in itertools.pairwise(own))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zigzag", 2, 4), "there is no schedule 'zigzag'\nchoose one of gpipe, 1f1b, interleaved"),
        (("gpipe", 2, 0), "there are 0 micro-batches\ngive 1 or more"),
        (("1f1b", 2, 4, 2), "the schedule '1f1b' has one stage on each device, not 2\nuse \"interleaved\" for more"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(GraftError) as raised:
        orders_of(*arguments)
    assert str(raised.value) == message


def test_interleaving_takes_micro_batches_in_rounds():
    with pytest.raises(GraftError, match="in rounds of 4, one for each device, and there are 6\ngive a multiple of 4"):
        orders_of("interleaved", 4, 6, 2)


def test_orders_that_wait_for_each_other_are_refused():
    orders = [[Task(True, 0, 0), Task(False, 0, 0)]]
    with pytest.raises(GraftError, match="the schedule cannot go on"):
        run_schedule(orders, equal, at_once)
