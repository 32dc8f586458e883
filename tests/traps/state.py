"""Traps: models that keep something from call to call, in Python attributes, buffers, parameters, or outside of themselves.
What lives no longer than the call is in `mutation.py`; what a run sets for the next, without counting, in `leftovers.py`.
"""

from __future__ import annotations

import itertools
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import nn

from tests.traps.trap import Collection

TRAPS = Collection()


@TRAPS.model("a counter")
class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return x * self.step


class InnerCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return self.linear(x) * self.step


@TRAPS.model("a counter in a submodule")
class CounterInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = InnerCounter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x)) + 1


@TRAPS.model("a buffer assigned")
class BufferAssigned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + 1
        return x * self.steps


@TRAPS.model("a buffer added to")
class BufferAdded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("hidden", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.hidden.add_(x.detach().sum(0))
        return x * self.steps + self.hidden


@TRAPS.model("a buffer written, the result unused")
class BufferWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.sum(0), alpha=0.1)
            self.mean[0] = 1
            self.mean.data.clamp_(max=5)
        return x + 1


@TRAPS.model("a running average", sizes=(5,))
class RunningAverage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("started", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.started:
            self.mean.copy_(x.detach().mean(0))
            self.started.fill_(True)
        else:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


@TRAPS.model("a parameter written")
class ParameterWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4) * 3)
        self.embedding = nn.Embedding(4, 4, max_norm=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-1, 1)
        return x * self.weight + self.embedding(torch.arange(4)).sum()


@TRAPS.model("a plain tensor added to")
class PlainTensorAdded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x * self.count


@TRAPS.model("an output kept on self")
class OutputKept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.features: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.features = self.linear(x).detach()
        return self.features * 2


@TRAPS.model("a list on self")
class ListOnSelf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.detach().sum())
        return x * len(self.seen)


@TRAPS.model("a list cleared and filled")
class ListCleared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.parts.clear()
        for number in range(3):
            self.parts.append(x * number)
        result = torch.stack(self.parts).sum(0)
        self.parts.clear()
        return result


@TRAPS.model("dicts, sets, deques and objects on self")
class ContainersOnSelf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts, self.seen, self.recent = {"calls": 0}, set(), deque(maxlen=2)
        self.notes = SimpleNamespace(calls=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts["calls"] += 1
        self.seen.add(x.dim())
        self.recent.append(self.counts["calls"])
        self.notes.calls += 1
        return x * self.counts["calls"] + self.notes.calls


@TRAPS.model("an iterator on self")
class IteratorOnSelf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(self.numbers)


@TRAPS.model("an array on self")
class ArrayOnSelf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hits = numpy.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hits[0] += 1
        return x * float(self.hits[0])


@TRAPS.model("a counter on the class")
class CounterOnClass(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        CounterOnClass.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CounterOnClass.calls += 1
        return x * CounterOnClass.calls


@TRAPS.model("a cache filled at the first call")
class CacheFilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        if n not in self.tables:
            self.tables[n] = torch.arange(n, dtype=torch.float32).unsqueeze(1)
        return x + self.tables[n]


@TRAPS.model("a mask built when it is too small", example=3, sizes=(5, 2))
class MaskGrows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3, 3).tril(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        if n > self.mask.shape[0]:
            self.mask = torch.ones(n, n).tril()
        return self.mask[:n, :n] @ x.to(self.mask)


@TRAPS.model("a buffer registered in forward")
class BufferRegistered(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", x.detach().mean(0))
        return x - self.table


@TRAPS.model("a gradient cleared in forward")
class GradientCleared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.grad = None
        return x * self.weight


@TRAPS.model("an attribute switched and switched back")
class SwitchedBack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        previous, self.scale = self.scale, 5.0
        try:
            return self._scaled(x)
        finally:
            self.scale = previous


_CALLS = {"count": 0}
_TOTAL = torch.zeros(1)


def global_counter(x: torch.Tensor) -> torch.Tensor:
    _CALLS["count"] += 1
    return x * _CALLS["count"]


def global_tensor(x: torch.Tensor) -> torch.Tensor:
    _TOTAL.add_(1)
    return x * _TOTAL


global_counter.watched = _CALLS  # type: ignore[attr-defined]
global_tensor.watched = _TOTAL  # type: ignore[attr-defined]


def _fresh_counter() -> Any:
    _CALLS["count"] = 0
    return global_counter


def _fresh_total() -> Any:
    _TOTAL.zero_()
    return global_tensor


TRAPS.add("a counter in a global", _fresh_counter)
TRAPS.add("a global tensor added to", _fresh_total, skip=frozenset({"deep copy", "pickled"}))


@TRAPS.model("a lazy layer")
class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)
