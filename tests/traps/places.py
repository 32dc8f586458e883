"""Traps: state in odd places: the environment, iterators, queues, byte arrays, values of a thread, a list that is shuffled.
State in closures, classes and other Python modules is in `outside.py`.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import itertools
import os
import queue
import random
import threading
import types
from collections.abc import Callable
from random import shuffle
from typing import Any

import torch
from torch import nn

from tests.traps.trap import Collection

TRAPS = Collection(sizes=(5,))

OPTIONS = argparse.Namespace(step=0)
WAITING: queue.Queue[int] = queue.Queue()
COUNTER = itertools.count(1)
ROUND = itertools.cycle([1, 2, 3])
TABLE: collections.UserDict[str, int] = collections.UserDict(calls=0)
LAYERED = collections.ChainMap({"calls": 0})
OF_A_THREAD = threading.local()
VARIABLE = contextvars.ContextVar("VARIABLE", default=0)


def _reset() -> None:
    global COUNTER, ROUND
    OPTIONS.step = OF_A_THREAD.calls = TABLE["calls"] = LAYERED["calls"] = 0
    os.environ["TORCHGRAFT_TRAP"] = "0"
    VARIABLE.set(0)
    WAITING.queue.clear()
    COUNTER, ROUND = itertools.count(1), itertools.cycle([1, 2, 3])


def _in_an_odd_place(name: str) -> Callable[[Any], Any]:
    """Add a function that is called on inputs, with the places empty when it is built."""

    def decorate(function: Any) -> Any:
        def build() -> Any:
            _reset()
            return function

        TRAPS.add(name, build)
        return function

    return decorate


@_in_an_odd_place("a count in the environment")
def environment(x: torch.Tensor) -> torch.Tensor:
    calls = int(os.environ["TORCHGRAFT_TRAP"]) + 1
    os.environ["TORCHGRAFT_TRAP"] = str(calls)
    return x * calls


@_in_an_odd_place("a count among the options of the command line")
def command_line(x: torch.Tensor) -> torch.Tensor:
    OPTIONS.step += 1
    return x * OPTIONS.step


@_in_an_odd_place("a global queue")
def global_queue(x: torch.Tensor) -> torch.Tensor:
    WAITING.put(1)
    return x * WAITING.qsize()


@_in_an_odd_place("a global iterator")
def global_iterator(x: torch.Tensor) -> torch.Tensor:
    return x * next(COUNTER)


@_in_an_odd_place("a global cycle")
def global_cycle(x: torch.Tensor) -> torch.Tensor:
    return x * next(ROUND)


@_in_an_odd_place("a global dict of Python's own")
def global_user_dict(x: torch.Tensor) -> torch.Tensor:
    TABLE["calls"] += 1
    LAYERED["calls"] += 1
    return x * TABLE["calls"] + LAYERED["calls"]


@_in_an_odd_place("a count of the thread")
def count_of_thread(x: torch.Tensor) -> torch.Tensor:
    OF_A_THREAD.calls += 1
    return x * OF_A_THREAD.calls


@_in_an_odd_place("a context variable that counts")
def context_variable(x: torch.Tensor) -> torch.Tensor:
    VARIABLE.set(VARIABLE.get() + 1)
    return x * VARIABLE.get()


@_in_an_odd_place("a count in a module imported on the way")
def imported_on_the_way(x: torch.Tensor) -> torch.Tensor:
    import tests.traps.places as here

    here.OPTIONS.step += 1
    return x * here.OPTIONS.step


@TRAPS.function("a list that is shuffled")
def shuffled(x: torch.Tensor) -> torch.Tensor:
    order = list(range(4))
    random.shuffle(order)
    return x[:, order]


@TRAPS.function("a list that is shuffled by name")
def shuffled_by_name(x: torch.Tensor) -> torch.Tensor:
    random.seed(3)
    order = list(range(4))
    shuffle(order)
    return x[:, order] * random.random()


@TRAPS.model("layers in a shuffled order")
class ShuffledLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.order = [0, 1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        random.shuffle(self.order)
        for number in self.order:
            x = self.layers[number](x).tanh()
        return x


@TRAPS.model("bytes on self")
class BytesOnSelf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = bytearray(4)
        self.sums = array.array("d", [0.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memoryview(self.seen)[0] += 1
        self.sums[0] += 2
        return x * self.seen[0] + self.sums[0]


@TRAPS.model("a count deep inside an object")
class DeepInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        make = types.SimpleNamespace
        self.settings = make(parts=[{"first": make(rest=(make(calls=0),))}])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.settings.parts[0]["first"].rest[0]
        inner.calls += 1
        return x * inner.calls


class _Taking(nn.Module):
    """Takes one number from an iterator at every call."""

    def __init__(self, iterator: Any) -> None:
        super().__init__()
        self.iterator = iterator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken = next(self.iterator)
        return x * (taken if isinstance(taken, int) else sum(taken))


TRAPS.add("a cycle on self", lambda: _Taking(itertools.cycle([1, 2, 3])))
TRAPS.add("a chain on self", lambda: _Taking(itertools.chain([1, 2], [3, 4, 5, 6])))
TRAPS.add("a zip on self", lambda: _Taking(zip([1, 2, 3, 4, 5], itertools.count(1), strict=False)))
TRAPS.add("a slice of an iterator on self", lambda: _Taking(itertools.islice(itertools.count(1), 100)))
