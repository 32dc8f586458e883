"""Traps: unusual ways through a program: recursion, generators, coroutines, loops of modules, code made on the way, threads, own
operators on classes. Plain branches are in `branches.py`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import itertools
import operator
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.traps.trap import Collection

TRAPS = Collection(sizes=(5, 1))
_NO_COPIES = frozenset({"pickled", "deep copy"})


class Block(nn.Module):
    """A layer that calls itself with the next."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.next = Block(depth - 1) if depth else None

    def forward(self, x: torch.Tensor, level: int = 0) -> torch.Tensor:
        x = self.linear(x) * (level + 1)
        return x if self.next is None else self.next(x, level + 1)


TRAPS.add("modules inside modules of their kind", lambda: Block(3))


@TRAPS.model("a module that calls itself")
class CallsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        return x if depth == 0 else self(self.linear(x).tanh(), depth - 1)


@TRAPS.model("slices of layers")
class LayerSlices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.stack = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[1:3]:
            x = layer(x)
        for layer in reversed(self.layers):
            x = x + layer(x)
        return self.stack[:2](x) + nn.Sequential(*self.layers[:2])(x)


@TRAPS.model("layers skipped by a condition", others={"negative": lambda: -torch.ones(3, 4)})
class LayersSkipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.skipped = {2}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index in self.skipped or x.mean() > 10:
                continue
            x = layer(x)
            if x.abs().max() < 1e-3:
                break
        else:
            x = x + 1
        return x


@TRAPS.model(
    "layers by name", inputs=lambda n=3: (torch.randn(n, 4), "b"), others={"a": lambda: (torch.randn(3, 4), "a")}
)
class LayersByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(4)), "b": nn.Parameter(torch.full((4,), 2.0))})
        self.shifts = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))])

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        return self.layers[which](x) * self.scales[which] + sum(self.shifts)


@TRAPS.model("children walked by name")
class ChildrenWalked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for index in range(3):
            self.add_module(f"layer{index}", nn.Linear(4, 4))
        self.alias = self.layer0

    def forward(self, x: torch.Tensor) -> Any:
        features = {}
        for name, layer in self.named_children():
            x = layer(x).tanh()
            features[name] = x
        return features, getattr(self, "layer" + str(1))(x), sum(p.sum() for p in self.parameters())


@TRAPS.model("features collected by hooks inside")
class FeaturesByHooks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.features: dict[str, torch.Tensor] = {}
        self.body[1].register_forward_hook(functools.partial(self._keep, "relu"))

    def _keep(self, name: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.features[name] = output

    def forward(self, x: torch.Tensor) -> Any:
        y = self.body(x)
        return y, self.features["relu"] * 2


@TRAPS.model("forward put on the instance")
class ForwardOnInstance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.forward = functools.partial(self._forward, scale=3.0)  # type: ignore[method-assign]

    def _forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return self.linear(x) * scale


class _Patched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def _patched_layer() -> nn.Module:
    model = nn.Sequential(_Patched(), nn.Linear(4, 4))
    original = model[1].forward
    model[1].forward = lambda x: original(x) * 10  # type: ignore[method-assign]
    return model


TRAPS.add("a layer's forward replaced", _patched_layer, skip=_NO_COPIES)


@TRAPS.model("attributes made up on the way")
class MadeUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("scaled_"):
            return super().__getattr__(name[7:]) * 3
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scaled_weight


@TRAPS.model("a property that computes and keeps")
class PropertyKeeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self._scale: Any = None

    @property
    def scale(self) -> torch.Tensor:
        if self._scale is None:
            self._scale = self.weight.detach().norm()
        return self._scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@TRAPS.function("code made on the way")
def code_made(x: torch.Tensor) -> torch.Tensor:
    scope: dict[str, Any] = {}
    exec("def scaled(value):\n    return value * 2 + value.shape[0]", scope)
    return scope["scaled"](x) + eval("x.sum()", {"x": x})


@TRAPS.function("a coroutine driven by hand")
def coroutine(x: torch.Tensor) -> torch.Tensor:
    async def double(value: torch.Tensor) -> torch.Tensor:
        await asyncio.sleep(0)
        return value * 2

    async def both() -> torch.Tensor:
        return sum(await asyncio.gather(double(x), double(x + 1)))  # type: ignore[return-value]

    return asyncio.run(both())


@TRAPS.function("a generator that is sent values")
def sent_values(x: torch.Tensor) -> torch.Tensor:
    def accumulate() -> Iterator[Any]:
        total = torch.zeros_like(x)
        while True:
            value = yield total
            total = total * 0.5 + value

    running: Any = accumulate()
    next(running)
    for factor in (1.0, 2.0, 3.0):
        result = running.send(x * factor)
    return result


@TRAPS.function("tools for iterators")
def iterator_tools(x: torch.Tensor) -> torch.Tensor:
    sums = list(itertools.accumulate(x.unbind(1), operator.add))
    pairs = [a * b for a, b in itertools.pairwise(sums)]
    return functools.reduce(torch.add, itertools.chain(pairs, itertools.repeat(x.sum(1), 2)))


@TRAPS.function("writes in another thread")
def written_in_thread(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    worker = threading.Thread(target=lambda: y.add_(1))
    worker.start()
    worker.join()
    return y * 3


@TRAPS.model("a buffer written in another thread")
class BufferInThread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(self.steps.add_, 1).result()
        return x * self.steps


@TRAPS.function("values through a context variable")
def context_variable(x: torch.Tensor) -> torch.Tensor:
    current: contextvars.ContextVar[Any] = contextvars.ContextVar("current")
    current.set(x * 2)
    return contextvars.copy_context().run(lambda: current.get() + 1)


@TRAPS.function("warnings and prints")
def warnings_and_prints(x: torch.Tensor) -> torch.Tensor:
    warnings.warn("just so", stacklevel=1)
    print(end="")
    return x * 2


@TRAPS.function("the frame looked at")
def frame_looked_at(x: torch.Tensor) -> torch.Tensor:
    return x * len(sys._getframe().f_code.co_varnames)


class Scaled:
    """A value with operators of its own."""

    def __init__(self, value: torch.Tensor, scale: float) -> None:
        self.value, self.scale = value, scale

    def __add__(self, other: Scaled) -> Scaled:
        return Scaled(self.value + other.value, max(self.scale, other.scale))

    def __matmul__(self, other: Scaled) -> torch.Tensor:
        return (self.value @ other.value.t()) * self.scale

    def __bool__(self) -> bool:
        return bool(self.value.sum() > 0)


@TRAPS.function("operators of a class", others={"negative": lambda: -torch.ones(3, 4)})
def own_operators(x: torch.Tensor) -> torch.Tensor:
    left, right = Scaled(x, 2.0), Scaled(x + 1, 3.0)
    return (left + right) @ right if left else right.value


@TRAPS.function("torch.cond", others={"negative": lambda: -torch.ones(3, 4)}, skip=frozenset({"size 0"}))
def torch_cond(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda value: value * 2, lambda value: value - 1, (x,))


@TRAPS.function(
    "torch.while_loop",
    others={"larger": lambda: torch.randn(3, 4) * 100},
    skip=frozenset({"gradients", "captured without gradients"}),
)
def torch_while_loop(x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.while_loop import while_loop

    result = while_loop(
        lambda value, steps: steps < 3, lambda value, steps: (value / 2, steps + 1), (x, torch.tensor(0))
    )
    return result[0]


def _traced_by_jit() -> nn.Module:
    return nn.Sequential(torch.jit.trace(_Patched(), torch.randn(3, 4)), nn.Linear(4, 4))


TRAPS.add("a module traced by TorchScript", _traced_by_jit, skip=_NO_COPIES)


def _traced_by_fx() -> nn.Module:
    from torch import fx

    return nn.Sequential(fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))), nn.Tanh())


TRAPS.add("a module traced by torch.fx", _traced_by_fx)


def _captured_already() -> nn.Module:
    from torchgraft.capturing.program import capture

    program = capture(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)), (torch.randn(3, 4),))
    program(torch.randn(3, 4))  # whose code is made at the first call
    return program


TRAPS.add("a program captured again", _captured_already, sizes=(5,))


def _method() -> Any:
    return _Patched().forward


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def encode(self, x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
        return self.drop(self.linear(x)) * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)


TRAPS.add("a method other than forward", lambda: _Encoder().encode, skip=_NO_COPIES)
TRAPS.add("forward itself as a method", _method, skip=_NO_COPIES)
TRAPS.add("a function of torch", lambda: torch.relu)
TRAPS.add("a method of Tensor", lambda: torch.Tensor.relu)
TRAPS.add("a partial of a module", lambda: functools.partial(_Encoder().encode, scale=3.0), skip=_NO_COPIES)
TRAPS.add("a layer alone", lambda: nn.Linear(4, 4))
TRAPS.add("dropout alone", lambda: nn.Dropout(0.5))
TRAPS.add("an empty sequence", lambda: nn.Sequential())
