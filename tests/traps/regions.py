"""Traps: torch's switches and contexts inside a model, and gradients that are computed, cut or changed there.
Contexts of nn.Module (hooks, parametrisations) are in `hooks.py`; autograd.Function is in `functions.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.traps.trap import Collection

TRAPS = Collection()


@TRAPS.model("no_grad in the middle")
class NoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.first(x)
        return self.second(y) + x


@TRAPS.model("enable_grad")
class EnableGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            y = self.linear(x)
        return y, y.requires_grad


@torch.no_grad()
def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x / x.abs().sum().clamp(min=1)


@TRAPS.function("a function decorated with no_grad")
def decorated(x: torch.Tensor) -> torch.Tensor:
    return x * _scaled(x)


@TRAPS.function("inference mode")
def inference_mode(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        y = x * 2
    return y.clone() + x


@TRAPS.function("set_grad_enabled by a condition")
def set_grad_enabled(x: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(x.shape[0] > 3):
        y = x * 3
    return y + x


@TRAPS.function("set_grad_enabled as a call")
def set_grad_called(x: torch.Tensor) -> torch.Tensor:
    previous = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    y = x * 3
    torch.set_grad_enabled(previous)
    return y + x


@TRAPS.model("autocast in the middle")
class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
            with torch.autocast("cpu", enabled=False):
                z = self.linear(x)
        return y.to(x.dtype) + z


@TRAPS.function("autocast asked")
def autocast_asked(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.is_autocast_enabled("cpu")
        y = x @ x.t()
    return y.float() * (2 if inside and not torch.is_autocast_enabled("cpu") else 3)


@TRAPS.function("record_function")
def record_function(x: torch.Tensor) -> torch.Tensor:
    with torch.profiler.record_function("part"):
        return x * 2


@contextlib.contextmanager
def _own_context(switch: bool) -> Iterator[float]:
    with torch.set_grad_enabled(switch):
        yield 2.0


@TRAPS.function("an own context manager")
def own_context(x: torch.Tensor) -> torch.Tensor:
    with _own_context(False) as factor:
        y = x * factor
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        z = x * 3
    return x + y + z


@_own_context(False)
def _in_own_context(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@TRAPS.function("a function decorated with an own context")
def decorated_with_own(x: torch.Tensor) -> torch.Tensor:
    return _in_own_context(x) + x


@TRAPS.function("default dtype switched")
def default_dtype_switched(x: torch.Tensor) -> torch.Tensor:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        table = torch.ones(4)
    finally:
        torch.set_default_dtype(previous)
    return x + table


@TRAPS.function("a device as a context")
def device_context(x: torch.Tensor) -> torch.Tensor:
    with torch.device("cpu"):
        return x + torch.ones(4)


@TRAPS.function("a no_grad left by an exception")
def left_by_exception(x: torch.Tensor) -> torch.Tensor:
    y = x
    try:
        with torch.no_grad():
            y = x * 2
            raise KeyError("left")
    except KeyError:
        pass
    return y + x * 3


@TRAPS.function("a return inside no_grad")
def return_inside(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x * 2 + 1


@TRAPS.function("a hook on a tensor")
def tensor_hook(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 10)
    return y


@TRAPS.model("a hook on an activation")
class ActivationHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if torch.is_grad_enabled():
            y.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return y.relu()


@TRAPS.function("saved tensors changed")
def saved_tensors(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 2, lambda packed: packed):
        return x * x


@TRAPS.function("requires_grad switched on")
def requires_grad_on(x: torch.Tensor) -> Any:
    y = x.detach().requires_grad_()
    z = y * 2
    return z, z.requires_grad


@TRAPS.function("requires_grad assigned")
def requires_grad_assigned(x: torch.Tensor) -> torch.Tensor:
    y = x.detach().clone()
    y.requires_grad = True
    return y * 2


@TRAPS.function("gradient inside", skip=frozenset({"run without gradients"}))
def gradient_inside(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)
    return gradient * x


@TRAPS.model("gradient with respect to the input")
class GradientPenalty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = x if x.requires_grad else x.clone().requires_grad_()
            energy = self.linear(y).tanh().sum()
            force = torch.autograd.grad(energy, y, create_graph=True)[0]
        return energy + force.norm()


@TRAPS.function("backward inside")
def backward_inside(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = x.detach().clone().requires_grad_()
        (y**2).sum().backward()
    return y.grad * 2


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.nn.functional.dropout(self.linear(x).tanh() * scale, 0.3, self.training)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.block, self.use_reentrant = _Block(), use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x * 2, 2.0, use_reentrant=self.use_reentrant) + x


TRAPS.add("checkpoint", lambda: Checkpointed(False))
TRAPS.add("reentrant checkpoint", lambda: Checkpointed(True))


@TRAPS.model("checkpoint of a closure")
class CheckpointedClosure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outer = x.sum()
        return checkpoint(lambda value: self.linear(value).sin() + outer, x, use_reentrant=True)


@TRAPS.function("detached on the way")
def detached(x: torch.Tensor) -> torch.Tensor:
    hard = (x > 0).to(x.dtype)
    soft = x.sigmoid()
    return hard + soft - soft.detach()
