"""Traps: hooks and parametrisations of modules, wherever they sit.
Hooks on tensors are in `regions.py`.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.traps.trap import Collection

TRAPS = Collection()


class Net(nn.Module):
    """Two layers; a list for hooks to write into."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.notes: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * 2)


def _note(model: Net) -> Any:
    notes = model.notes

    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        notes.append(output.detach().clone())

    return hook


def _double(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def _shift(module: nn.Module, inputs: Any) -> Any:
    return (inputs[0] + 1,)


def _with(install: Any) -> Any:
    def build() -> nn.Module:
        model = Net()
        install(model)
        return model

    return build


TRAPS.add("a hook that replaces an output", _with(lambda model: model.first.register_forward_hook(_double)))
TRAPS.add("a hook that replaces an input", _with(lambda model: model.first.register_forward_pre_hook(_shift)))
TRAPS.add("a hook that taps", _with(lambda model: model.first.register_forward_hook(_note(model))))
TRAPS.add("a hook on a container", _with(lambda model: model.second.register_forward_hook(_double)))
TRAPS.add("a hook that taps a container", _with(lambda model: model.second.register_forward_hook(_note(model))))
TRAPS.add("a hook on the root", _with(lambda model: model.register_forward_hook(_double)))
TRAPS.add("a hook before the root", _with(lambda model: model.register_forward_pre_hook(_shift)))
TRAPS.add("a hook that taps the root", _with(lambda model: model.register_forward_hook(_note(model))))


def _scale_gradient(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple([None if gradient is None else gradient * 10 for gradient in inputs])


TRAPS.add("a backward hook", _with(lambda model: model.second.register_full_backward_hook(_scale_gradient)))
TRAPS.add("a backward hook on the root", _with(lambda model: model.register_full_backward_hook(_scale_gradient)))
# torch itself forgets the hooks of a parameter when the model is copied.
TRAPS.add(
    "a hook on a parameter",
    _with(lambda model: model.first.weight.register_hook(lambda gradient: gradient * 3)),
    skip=frozenset({"deep copy", "pickled"}),
)


def _keyword_hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {**kwargs, "scale": kwargs.get("scale", 1.0) + 1}


class _Scaled(nn.Module):
    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x * scale


@TRAPS.model("a hook that sees keywords")
class KeywordHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = _Scaled()
        self.scaled.register_forward_pre_hook(_keyword_hook, with_kwargs=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x, scale=3.0)


class _Measured(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x * 2, x.shape[0], x.sum().item()


@TRAPS.model("a hooked module that returns numbers")
class HookedNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.measured = _Measured()
        self.measured.register_forward_hook(lambda module, inputs, output: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, rows, total = self.measured(x)
        return y * rows + total


class _Boxed:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class _Boxing(nn.Module):
    def forward(self, x: torch.Tensor) -> _Boxed:
        return _Boxed(x * 2)


@TRAPS.model("a hooked module that returns an object")
class HookedObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.boxing = _Boxing()
        self.boxing.register_forward_hook(lambda module, inputs, output: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.boxing(x).value + 1


class _Unboxing(nn.Module):
    def forward(self, box: _Boxed) -> torch.Tensor:
        box.value = box.value + 1
        return box.value * 2


@TRAPS.model("a hooked module that takes an object")
class HookedTaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unboxing = _Unboxing()
        self.unboxing.register_forward_hook(lambda module, inputs, output: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        box = _Boxed(x * 3)
        return self.unboxing(box) + box.value


class _Filling(nn.Module):
    def forward(self, x: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
        found.append(x * 3)
        return x * 2


@TRAPS.model("a hooked module that fills a list")
class HookedFilling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filling = _Filling()
        self.filling.register_forward_hook(lambda module, inputs, output: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        return self.filling(x, found) + found[0]


@TRAPS.model("a hook for every module")
class HookForAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 2)
        try:
            return self.linear(x)
        finally:
            handle.remove()


@TRAPS.model("a hook set during the run")
class HookDuring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        handle = self.linear.register_forward_hook(lambda module, inputs, output: found.append(output * 2))
        y = self.linear(x)
        handle.remove()
        return y + found[0]


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
            self.blocks[0].register_forward_hook(_double)
            self.is_prepared = True
        return result


@TRAPS.model("hooks that every run adds")
class HooksAdded(Collecting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.blocks[1].register_forward_hook(_double)
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


class Normed(nn.Module):
    """A layer whose weight is computed from others."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.linear = change(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


def _old_weight_norm() -> nn.Module:
    return Normed(nn.utils.weight_norm)


def _old_spectral_norm() -> nn.Module:
    return Normed(nn.utils.spectral_norm)


TRAPS.add("weight norm", lambda: Normed(parametrizations.weight_norm))
TRAPS.add("spectral norm", lambda: Normed(parametrizations.spectral_norm))
TRAPS.add("orthogonal weights", lambda: Normed(parametrizations.orthogonal))
TRAPS.add("old weight norm", _old_weight_norm)
TRAPS.add("old spectral norm", _old_spectral_norm)


class _Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).t()


def _symmetric(linear: nn.Linear) -> nn.Linear:
    parametrize.register_parametrization(linear, "weight", _Symmetric())
    return linear


TRAPS.add("an own parametrisation", lambda: Normed(_symmetric))


@TRAPS.model("a parametrisation cached")
class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = _symmetric(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return self.linear(self.linear(x))


def _pruned(linear: nn.Linear) -> nn.Linear:
    return prune.l1_unstructured(linear, "weight", amount=0.5)


TRAPS.add("pruned weights", lambda: Normed(_pruned), skip=frozenset({"deep copy"}))
