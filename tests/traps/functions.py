"""Traps: autograd.Function, scripted functions, function transforms, custom operators, threads: code that torch calls
or that runs where a tracer may not see it. Gradients taken inside a model are in `regions.py`.
"""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap

from tests.traps.trap import Collection

TRAPS = Collection()
_NO_COPIES = frozenset({"pickled", "deep copy"})


class Square(torch.autograd.Function):
    """A square with the wrong gradient on purpose, so that losing it shows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x * 100


class Scale(torch.autograd.Function):
    """Takes numbers, a tuple and None besides tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float, sizes: Any, nothing: Any) -> Any:
        ctx.factor = factor
        return x * factor, x.new_ones(sizes)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, other: Any) -> Any:
        return gradient * ctx.factor * 7, None, None, None


class InPlace(torch.autograd.Function):
    """Writes into its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 5


class Cube(torch.autograd.Function):
    """The newer form, with setup_context."""

    @staticmethod
    def forward(x: torch.Tensor) -> Any:
        return x**3, 3 * x**2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, other: Any) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0] * 11


class Identity(torch.autograd.Function):
    """Hands its input through and turns its gradient round."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


@TRAPS.function("an autograd function")
def autograd_function(x: torch.Tensor) -> torch.Tensor:
    return Square.apply(x * 2) + 1


square = Square.apply


@TRAPS.function("an autograd function under another name")
def autograd_function_named(x: torch.Tensor) -> torch.Tensor:
    return square(x * 2) + 1


@TRAPS.function("an autograd function with other arguments")
def autograd_function_arguments(x: torch.Tensor) -> torch.Tensor:
    y, ones = Scale.apply(x, 2.0 * x.shape[0], (x.shape[0], 4), None)
    return y + ones


@TRAPS.function("an autograd function in place")
def autograd_function_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    InPlace.apply(y)
    return y


@TRAPS.function("an autograd function with a set-up")
def autograd_function_setup(x: torch.Tensor) -> torch.Tensor:
    y, slope = Cube.apply(x)
    return y + slope


@TRAPS.function("a gradient turned round")
def reversal(x: torch.Tensor) -> torch.Tensor:
    return Identity.apply(x) + x * 0.5


@torch.jit.script
def _scripted(x: torch.Tensor) -> torch.Tensor:
    if bool(x.sum() > 0):
        return x * 2
    return x - 1


@TRAPS.function("a scripted function", others={"negative": lambda: -torch.ones(3, 4)})
def scripted_function(x: torch.Tensor) -> torch.Tensor:
    return _scripted(x * 3) + 1


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0):
            return self.linear(x)
        return x


@TRAPS.model("a scripted submodule", others={"negative": lambda: -torch.ones(3, 4)}, skip=_NO_COPIES)
class ScriptedSubmodule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(_Branching())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


@TRAPS.function("vmap inside")
def vmap_inside(x: torch.Tensor) -> torch.Tensor:
    return vmap(lambda row: row.softmax(0) * row.sum())(x) if x.shape[0] else x


@TRAPS.model("vmap over a module", sizes=(5, 1))
class VmapModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return vmap(self.linear)(x) + 1


@TRAPS.function("grad inside")
def grad_inside(x: torch.Tensor) -> torch.Tensor:
    return grad(lambda value: (value**3).sum())(x) + 1


@TRAPS.function("jacobian inside", sizes=(2, 1))
def jacobian_inside(x: torch.Tensor) -> torch.Tensor:
    return jacrev(torch.sin)(x).sum((0, 1)) + 1


@TRAPS.model("functional_call with other weights")
class FunctionalCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed = {name: value * 2 for name, value in self.linear.named_parameters()}
        return functional_call(self.linear, changed, (x,)) + self.linear(x)


@TRAPS.model("an ensemble by vmap and functional_call", sizes=(5, 1))
class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weights = nn.Parameter(torch.randn(2, 4, 4))
        self.biases = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def one(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return functional_call(self.linear, {"weight": weight, "bias": bias}, (x,))

        return vmap(one)(self.weights, self.biases).sum(0)


@TRAPS.function("operators of torch.ops")
def torch_ops(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.relu(x) + torch.ops.aten.add.Tensor(x, x, alpha=2) + torch._C._nn.gelu(x)


@torch.library.custom_op("torchgraft_traps::twice", mutates_args=())
def twice(x: torch.Tensor, factor: float) -> torch.Tensor:
    """An operator of the user's own."""
    return x * 2 * factor


@twice.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, gradient: (gradient * 20, None))


@TRAPS.function("a custom operator")
def custom_operator(x: torch.Tensor) -> torch.Tensor:
    return twice(x, 1.5) + torch.ops.torchgraft_traps.twice(x, 2.0)


@torch.library.custom_op("torchgraft_traps::increase", mutates_args=("x",))
def increase(x: torch.Tensor) -> None:
    """An operator that writes into its input."""
    x.add_(1)


@TRAPS.function("a custom operator that writes")
def custom_operator_writes(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    increase(y)
    return y


@TRAPS.function("partial and lambda")
def partial_and_lambda(x: torch.Tensor) -> torch.Tensor:
    scaled = functools.partial(torch.add, alpha=3)
    return functools.reduce(lambda a, b: a * b, [scaled(x, x), x, x + 1])


@TRAPS.function("a generator function")
def generator_function(x: torch.Tensor) -> torch.Tensor:
    def parts() -> Any:
        for factor in (1.0, 2.0, 3.0):
            yield x * factor

    return sum(parts()) + torch.stack(list(parts())).sum(0)


@TRAPS.function("a pool of threads")
def pool_of_threads(x: torch.Tensor) -> torch.Tensor:
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(lambda factor: x * factor, [1.0, 2.0, 3.0]))
    return torch.stack(parts).sum(0) + 1


@TRAPS.model("layers in threads")
class LayersInThreads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: dict[int, torch.Tensor] = {}

        def work(number: int) -> None:
            with torch.no_grad():
                found[number] = self.layers[number](x)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found[0] - found[1] + x


@TRAPS.function("asynchronous by fork")
def forked(x: torch.Tensor) -> torch.Tensor:
    future = torch.jit.fork(torch.relu, x)
    return torch.jit.wait(future) + x


class Marked(torch.Tensor):
    """A subclass that adds one to every sum."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result + 1 if function in (torch.sum, torch.Tensor.sum) else result


@TRAPS.function("a subclass of Tensor made inside", skip=frozenset({"double"}))
def subclass_inside(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).as_subclass(Marked).sum().as_subclass(torch.Tensor) + x


@TRAPS.function(
    "a subclass of Tensor given", inputs=lambda n=3: torch.randn(n, 4).as_subclass(Marked), skip=frozenset({"double"})
)
def subclass_given(x: torch.Tensor) -> torch.Tensor:
    return x.sum() * 2


@TRAPS.function("sparse inside")
def sparse_inside(x: torch.Tensor) -> torch.Tensor:
    sparse = x.relu().to_sparse()
    return torch.sparse.mm(sparse, torch.ones(4, 2, dtype=x.dtype)) + sparse.to_dense().sum()


@TRAPS.function("einsum and tensordot")
def einsum(x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ij,kj->ik", x, x).sum() + torch.tensordot(x, x, dims=2) + torch.linalg.norm(x)


@TRAPS.function("a function applied to every number", skip=frozenset({"pickled"}))
def applied(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().apply_(lambda value: value * 2)
