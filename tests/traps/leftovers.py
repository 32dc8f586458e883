"""Traps: what a run leaves in the model for the next one: hooks that it sets, flags, settings and numbers on `self`.
Hooks that are set beforehand are in `hooks.py`; counters, buffers and what is outside of the model in `state.py`.
"""

from __future__ import annotations

from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.traps.hooks import Net, double
from tests.traps.state import InnerCounter
from tests.traps.trap import Collection

TRAPS = Collection()


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu() + x


class Collecting(nn.Module):
    """Collects what its blocks give, by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_Block(), _Block())


@TRAPS.model("hooks for the time of a run")
class HooksForTheRun(Collecting):
    def forward(self, x: torch.Tensor) -> Any:
        found: list[torch.Tensor] = []
        handles = [block.register_forward_hook(lambda *details: found.append(details[2])) for block in self.blocks]
        try:
            return self.blocks(x), tuple(found)
        finally:
            for handle in handles:
                handle.remove()


_collected: ContextVar[list[torch.Tensor] | None] = ContextVar("collected", default=None)


def _collect(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    found = _collected.get()
    if found is not None:
        found.append(output)


class _Prepared(Collecting):
    """Installs its hooks when it first runs."""

    def _prepare(self) -> None:
        if not getattr(self, "is_prepared", False):
            for block in self.blocks:
                block.register_forward_hook(_collect)
                block.linear.register_forward_hook(_collect)
            self.is_prepared = True


@TRAPS.model("hooks that the first run leaves")
class HooksLeft(_Prepared):
    def forward(self, x: torch.Tensor) -> Any:
        self._prepare()
        found: list[torch.Tensor] = []
        token = _collected.set(found)
        try:
            result = self.blocks(x)
        finally:
            _collected.reset(token)
        return result, tuple(found)


@TRAPS.model("hooks that only the next run has")
class HooksForTheNext(Collecting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.blocks(x)
        if not hasattr(self, "is_prepared"):
            self.blocks[0].register_forward_hook(double)
            self.is_prepared = True
        return result


@TRAPS.model("hooks that every run adds")
class HooksAdded(Collecting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.blocks[1].register_forward_hook(double)
        return self.blocks(x)


@TRAPS.model("a hook that keeps a tensor of the first run")
class HookOfTheFirst(Collecting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "is_prepared"):
            first, rows = x.detach().mean(0), x.shape[0]
            self.blocks[0].register_forward_hook(
                lambda module, inputs, output: output + first if rows > 2 else output * rows
            )
            self.is_prepared = True
        return self.blocks(x)


class _Recorder(nn.Module):
    """No part of any model; counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.seen: list[Any] = []

    def tap(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.count += 1
        self.seen.append(output.shape)


def _recorded() -> nn.Module:
    model, recorder = Net(), _Recorder()
    model.second.register_forward_hook(recorder.tap)
    model.watched = recorder.seen
    return model


TRAPS.add("a hook of a module elsewhere", _recorded, skip=frozenset({"deep copy", "pickled"}))


@TRAPS.model("a flag set by every call")
class FlagSet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.was_called, self.notes = False, {"calls": "none"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.was_called = True
        self.notes["calls"] = "some"
        return x * 2


@TRAPS.model(
    "a setting chosen by the first call",
    inputs=lambda n=3: (torch.randn(n, 4), torch.arange(n) % 4),
    others={"with other labels": lambda: (torch.randn(3, 4), torch.rand(3, 4))},
)
class SettingChosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.settings = SimpleNamespace(kind=None, width=4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.settings.kind is None:
            self.settings.kind = "one" if labels.dtype == torch.long else "many"
        if self.settings.kind == "one":
            return nn.functional.cross_entropy(x, labels)
        return nn.functional.binary_cross_entropy_with_logits(x, labels.to(x))


@TRAPS.model("a first call that is special")
class FirstSpecial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.is_first = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, self.is_first = (2, False) if self.is_first else (3, False)
        return x * scale


@TRAPS.model("a first call that says so in its result")
class FirstSaid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.is_first = True

    def forward(self, x: torch.Tensor) -> Any:
        was_first, self.is_first = self.is_first, False
        return SimpleNamespace(result=x * 2, details=[was_first])


@TRAPS.model("a second call that asks more")
class SecondAsks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.is_ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_ready and x.sum() > 0:
            return x * 3
        self.is_ready = True
        return x * 2 if x.shape[0] == 3 else x * 3


@TRAPS.model("a switch turned by every call")
class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.is_on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.is_on = not self.is_on
        return x + 1


@TRAPS.model("a counter that stops")
class CounterStops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step = min(self.step + 1, 2)
        return x + 1


@TRAPS.model("numbers of the input kept on self")
class NumbersKept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.rank, self.kind, self.is_positive = 0, 0, "", False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows, self.rank, self.kind = int(x.shape[0]), x.dim(), str(x.dtype)
        self.is_positive = bool(x.sum() > 0)
        return x + 1


@TRAPS.model("the largest size so far")
class LargestSoFar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self.rows:
            self.rows = len(range(x.shape[0]))
        return x + 1


@TRAPS.model("a setting read by what is kept whole")
class SettingRead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.settings = SimpleNamespace(scale=1.0)
        self.counting = InnerCounter()
        self.counting.settings = self.settings
        self.counting.register_forward_hook(lambda module, inputs, output: output * module.settings.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.settings.scale = 3.0
        return self.counting(x)
