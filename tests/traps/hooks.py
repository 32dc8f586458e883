"""Traps: hooks and parametrisations of modules, wherever they sit.
Hooks on tensors are in `regions.py`, those that a run itself sets in `leftovers.py`.
"""

from __future__ import annotations

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


def double(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def _shift(module: nn.Module, inputs: Any) -> Any:
    return (inputs[0] + 1,)


def _with(install: Any) -> Any:
    def build() -> nn.Module:
        model = Net()
        install(model)
        return model

    return build


TRAPS.add("a hook that replaces an output", _with(lambda model: model.first.register_forward_hook(double)))
TRAPS.add("a hook that replaces an input", _with(lambda model: model.first.register_forward_pre_hook(_shift)))
TRAPS.add("a hook that taps", _with(lambda model: model.first.register_forward_hook(_note(model))))
TRAPS.add("a hook on a container", _with(lambda model: model.second.register_forward_hook(double)))
TRAPS.add("a hook that taps a container", _with(lambda model: model.second.register_forward_hook(_note(model))))
TRAPS.add("a hook on the root", _with(lambda model: model.register_forward_hook(double)))
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
