"""Traps: what is around the calls of a program: context managers of every kind, switches, modes of torch, decorators.
The plain ones (no_grad, autocast) are in `regions.py`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.traps.trap import Collection

TRAPS = Collection(sizes=(5, 1))


@TRAPS.function("contexts on a stack")
def on_a_stack(x: torch.Tensor) -> torch.Tensor:
    with contextlib.ExitStack() as stack:
        y = x * 2
        stack.enter_context(torch.no_grad())
        z = x * 3
    return y + z


@TRAPS.function(
    "a context chosen by a flag",
    inputs=lambda n=3: (torch.randn(n, 4), True),
    others={"off": lambda: (torch.randn(3, 4), False)},
)
def chosen(x: torch.Tensor, frozen: bool) -> torch.Tensor:
    with torch.no_grad() if frozen else contextlib.nullcontext():
        y = x * 2
    return y + x


@TRAPS.function("a context entered by hand")
def by_hand(x: torch.Tensor) -> torch.Tensor:
    region = torch.no_grad()
    region.__enter__()
    y = x * 2
    region.__exit__(None, None, None)
    return y + x


@TRAPS.function("a context entered by hand and left in between")
def left_in_between(x: torch.Tensor) -> torch.Tensor:
    first, second = torch.no_grad(), torch.enable_grad()
    first.__enter__()
    y = x * 2
    second.__enter__()
    z = x * 3
    second.__exit__(None, None, None)
    w = x * 5
    first.__exit__(None, None, None)
    return y + z + w


@contextlib.contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    flags = [parameter.requires_grad for parameter in module.parameters()]
    module.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, flag in zip(module.parameters(), flags, strict=True):
            parameter.requires_grad_(flag)


@TRAPS.model("a context that freezes parameters")
class FrozenWithin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with _frozen(self.linear):
            y = self.linear(x)
        return y + self.linear(x)


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    before = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(before)


@TRAPS.model("a context that evaluates")
class EvaluatedWithin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with _evaluating(self.drop):
            y = self.drop(x)
        return y + self.drop(x)


class Doubling(TorchFunctionMode):
    """Doubles every result of relu."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function in (torch.relu, torch.Tensor.relu) else result


@TRAPS.function("a mode for functions inside")
def function_mode(x: torch.Tensor) -> torch.Tensor:
    with Doubling():
        y = torch.relu(x) + x.relu()
    return y + torch.relu(x)


class Negating(TorchDispatchMode):
    """Turns the result of every cosine round."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return -result if function is torch.ops.aten.cos.default else result


@TRAPS.function("a mode for operators inside")
def dispatch_mode(x: torch.Tensor) -> torch.Tensor:
    with Negating():
        y = torch.cos(x)
    return y + torch.cos(x)


@TRAPS.function("torch functions disabled")
def functions_disabled(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    with torch._C.DisableTorchFunction():
        y.add_(1)
        z = y * 3
    return y + z


@TRAPS.function("subclasses disabled")
def subclasses_disabled(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    with torch._C.DisableTorchFunctionSubclass():
        y.add_(1)
        z = y * 3
    return y + z


@TRAPS.function("a seed within")
def seed_within(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        y = F.dropout(x, 0.5)
    return y + torch.rand_like(x)


@TRAPS.function("the kernel of attention chosen", inputs=lambda n=3: torch.randn(1, 2, n, 4))
def attention_kernel(x: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(x, x, x, is_causal=x.shape[2] > 1)


@TRAPS.function("flags of a backend switched")
def backend_flags(x: torch.Tensor) -> torch.Tensor:
    with torch.backends.mkldnn.flags(enabled=False):
        return x @ x.t()


@TRAPS.function("warnings caught")
def warnings_caught(x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.sum(x, dim=0) * 2


@TRAPS.function("autocast in autocast", skip=frozenset({"double"}))
def nested_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.t()
        with torch.autocast("cpu", enabled=False):
            z = x @ x.t()
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            w = x @ x.t()
    return y.float() + z + w.float()


class Casting(torch.autograd.Function):
    """Wants single precision, whatever the surroundings."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 5


@TRAPS.function("an own function under autocast", skip=frozenset({"double"}))
def casting(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return Casting.apply(x) + (x @ x.t()).sum().float()


def _logged(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function(function.__name__):
            return function(*args, **kwargs)

    return wrapper


@TRAPS.model("a decorated forward")
class DecoratedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @_logged
    @torch.no_grad()
    def forward(self, x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
        return self.linear(x) * scale


@TRAPS.model("a forward in inference mode", skip=frozenset({"gradients", "captured without gradients"}))
class InferenceForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))

    @torch.inference_mode()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + 1


@TRAPS.function("inference mode switched off within", skip=frozenset({"captured without gradients"}))
def inference_off(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        y = x * 2
        with torch.inference_mode(False):
            z = x * 3
    return y.clone() + z


@TRAPS.function("gradients switched in a generator")
def in_a_generator(x: torch.Tensor) -> torch.Tensor:
    def parts() -> Iterator[torch.Tensor]:
        with torch.no_grad():
            yield x * 2
            yield x * 3
        yield x * 5

    total = x
    for part in parts():
        total = total + part * x
    return total


@TRAPS.function("gradients switched by a decorated generator")
def decorated_generator(x: torch.Tensor) -> torch.Tensor:
    @torch.no_grad()
    def parts() -> Iterator[torch.Tensor]:
        yield x * 2
        yield x * 3

    return sum(part * x for part in parts()) + x


@TRAPS.function("a device as a context for factories", devices=True)
def device_context(x: torch.Tensor) -> torch.Tensor:
    with torch.device(x.device):
        y = torch.ones(4)
    return x + y


@TRAPS.function("the default device set", devices=True)
def default_device(x: torch.Tensor) -> torch.Tensor:
    torch.set_default_device(x.device)
    y = torch.ones(4)
    torch.set_default_device(None)
    return x + y


@TRAPS.function("deterministic algorithms switched on")
def deterministic(x: torch.Tensor) -> torch.Tensor:
    torch.use_deterministic_algorithms(True)
    try:
        return x.cumsum(0)
    finally:
        torch.use_deterministic_algorithms(False)


@TRAPS.function("the number of threads set")
def threads_set(x: torch.Tensor) -> torch.Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    y = x @ x.t()
    torch.set_num_threads(before)
    return y


@TRAPS.function("multithreading of gradients switched off")
def multithreading(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.set_multithreading_enabled(False):
        return x * 2


@TRAPS.function("a profiler inside", sizes=(5,))
def profiler(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.profiler.profile(enabled=False):
        return x * 2
