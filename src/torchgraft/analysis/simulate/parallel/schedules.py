"""Schedules of pipelines: in which order each device works on micro-batches, and when everything then happens.
Nothing here knows programs: a stage is a time forward and a time backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torchgraft.errors import GraftError

SCHEDULES = ("gpipe", "1f1b", "interleaved")


class Task(NamedTuple):
    """One micro-batch through one stage, forward or backward."""

    backward: bool
    stage: int
    microbatch: int


class Done(NamedTuple):
    """A task when it was done: on which device, from when to when."""

    task: Task
    device: int
    start: float
    end: float


def orders_of(
    schedule: str, devices: int, microbatches: int, chunks: int = 1, training: bool = True
) -> list[list[Task]]:
    """The tasks of each device in their order. Stage s is on device s modulo the number of devices.

    >>> ["".join("FB"[t.backward] + str(t.microbatch) for t in order) for order in orders_of("1f1b", 2, 3)]
    ['F0F1B0F2B1B2', 'F0B0F1B1F2B2']
    """
    if schedule not in SCHEDULES:
        raise GraftError(f"there is no schedule {schedule!r}\nchoose one of {', '.join(SCHEDULES)}")
    if microbatches < 1:
        raise GraftError(f"there are {microbatches} micro-batches\ngive 1 or more")
    if schedule != "interleaved" and chunks != 1:
        raise GraftError(
            f'the schedule {schedule!r} has one stage on each device, not {chunks}\nuse "interleaved" for more'
        )
    if schedule == "interleaved" and microbatches % devices:
        raise GraftError(
            f"the interleaved schedule takes micro-batches in rounds of {devices}, one for each device, and there are "
            f"{microbatches}\ngive a multiple of {devices}"
        )
    return [_order(schedule, device, devices, microbatches, chunks, training) for device in range(devices)]


def _order(schedule: str, device: int, devices: int, microbatches: int, chunks: int, training: bool) -> list[Task]:
    total = microbatches * chunks
    forward = [_task(number, device, devices, chunks, False) for number in range(total)]
    if not training:
        return forward
    backward = [_task(number, device, devices, chunks, True) for number in range(total)]
    ahead = {
        "gpipe": total,
        "1f1b": devices - device - 1,
        "interleaved": (devices - device - 1) * 2 + (chunks - 1) * devices,
    }[schedule]
    ahead = min(ahead, total)
    order = forward[:ahead]
    for number in range(total - ahead):
        order += [forward[ahead + number], backward[number]]
    return order + backward[total - ahead :]


def _task(number: int, device: int, devices: int, chunks: int, backward: bool) -> Task:
    """The task of that number on a device: `devices` micro-batches go through one chunk before the next chunk has its turn."""
    if chunks == 1:
        return Task(backward, device, number)
    turn, within = divmod(number, devices * chunks)
    chunk, place = divmod(within, devices)
    if backward:
        chunk = chunks - 1 - chunk
    return Task(backward, chunk * devices + device, turn * devices + place)


def run_schedule(
    orders: Sequence[Sequence[Task]], seconds: Callable[[Task], float], transfer: Callable[[int, int], float]
) -> list[Done]:
    """When each task is done: after the one before it on its device, and after what it needs has come over.

    `transfer` has the seconds from one stage to another; devices go on working meanwhile.

    >>> done = run_schedule(orders_of("gpipe", 2, 1), lambda task: 2.0 if task.backward else 1.0, lambda source, target: 0.5)
    >>> max(entry.end for entry in done)
    7.0
    """
    stages = 1 + max(task.stage for order in orders for task in order)
    ended: dict[Task, float] = {}
    free = [0.0] * len(orders)
    place = [0] * len(orders)
    found: list[Done] = []
    waiting = list(range(len(orders)))
    while waiting:
        went_on = False
        for device in waiting:
            while place[device] < len(orders[device]):
                task = orders[device][place[device]]
                ready = _ready(task, stages, ended, transfer)
                if ready is None:
                    break
                start = max(free[device], ready)
                ended[task] = free[device] = start + seconds(task)
                found.append(Done(task, device, start, free[device]))
                place[device] += 1
                went_on = True
        waiting = [device for device in waiting if place[device] < len(orders[device])]
        if waiting and not went_on:
            raise GraftError("the schedule cannot go on: each device waits for another\ngive orders that can be run")
    return sorted(found, key=lambda entry: (entry.start, entry.device))


def _ready(task: Task, stages: int, ended: dict[Task, float], transfer: Callable[[int, int], float]) -> float | None:
    """When what a task needs is there; None while it is not known."""
    stage, microbatch = task.stage, task.microbatch
    if not task.backward:
        if stage == 0:
            return 0.0
        before, source = ended.get(Task(False, stage - 1, microbatch)), stage - 1
    else:
        own = ended.get(Task(False, stage, microbatch))
        if stage == stages - 1 or own is None:
            return own
        before, source = ended.get(Task(True, stage + 1, microbatch)), stage + 1
    return None if before is None else before + transfer(source, stage)


def most_in_flight(done: Sequence[Done], stages: int) -> list[int]:
    """How many micro-batches each stage has begun forward and not ended backward, at most.

    >>> most_in_flight(run_schedule(orders_of("1f1b", 3, 8), lambda task: 1.0, lambda source, target: 0.0), 3)
    [3, 2, 1]
    """
    most, now = [0] * stages, [0] * stages
    for _, change, stage in sorted(_changes(done)):
        now[stage] += change
        most[stage] = max(most[stage], now[stage])
    return most


def most_bytes(done: Sequence[Done], held: Sequence[float]) -> float:
    """The most bytes that one device holds for micro-batches under way, where stage s holds `held[s]` for each."""
    most = now = 0.0
    for _, change, stage in sorted(_changes(done)):
        now += change * held[stage]
        most = max(most, now)
    return most


def _changes(done: Sequence[Done]) -> list[tuple[float, int, int]]:
    """What ends at a time goes before what begins at it."""
    trains = any(entry.task.backward for entry in done)
    found = []
    for entry in done:
        if not entry.task.backward:
            found.append((entry.start, 1, entry.task.stage))
        if entry.task.backward or not trains:
            found.append((entry.end, -1, entry.task.stage))
    return found
