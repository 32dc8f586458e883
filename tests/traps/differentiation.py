"""Traps: gradients taken, changed or stopped inside a model: optimisers, hooks, forward-mode, higher derivatives, own functions.
Regions without gradients are in `regions.py`; simple own functions in `functions.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.func import functional_call, hessian, jacfwd, jvp, stack_module_state, vjp, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.traps.trap import Collection

TRAPS = Collection(sizes=(5, 1))
_NO_COPIES = frozenset({"pickled", "deep copy"})


@TRAPS.model("an optimiser's step inside")
class InnerStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            optimiser = torch.optim.SGD(self.linear.parameters(), lr=0.1)
            optimiser.zero_grad()
            self.linear(x.detach()).pow(2).mean().backward()
            optimiser.step()
            optimiser.zero_grad()
        return self.linear(x)


@TRAPS.model("an optimiser with momentum kept on self", skip=_NO_COPIES)
class KeptOptimiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.optimiser = torch.optim.SGD([self.weight], lr=0.1, momentum=0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            (self.weight * x.detach()).sum().backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        return x * self.weight.detach()


@TRAPS.model("an inner loop of learning")
class InnerLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fast = self.weight
        with torch.enable_grad():
            for _ in range(2):
                loss = (x @ fast).pow(2).mean()
                (gradient,) = torch.autograd.grad(loss, fast, create_graph=True)
                fast = fast - 0.1 * gradient
        return x @ fast


@TRAPS.function("a penalty on the gradient")
def gradient_penalty(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = x if x.requires_grad else x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)
    return gradient.norm(dim=1).mean() + x.sum()


@TRAPS.function("forward mode by dual numbers")
def dual_numbers(x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        tangent = forward_ad.unpack_dual(dual.sin() * dual).tangent
    return tangent + x


@TRAPS.function("jvp and vjp inside")
def jvp_and_vjp(x: torch.Tensor) -> torch.Tensor:
    value, tangent = jvp(torch.sin, (x,), (torch.ones_like(x),))
    _, pull = vjp(torch.cos, x)
    return value + tangent + pull(torch.ones_like(x))[0]


@TRAPS.function("a hessian inside", sizes=(2, 1))
def hessian_inside(x: torch.Tensor) -> torch.Tensor:
    return hessian(lambda value: (value**3).sum())(x).sum((2, 3)) + jacfwd(torch.tanh)(x).sum((2, 3))


@TRAPS.function("vmap over vmap")
def nested_vmap(x: torch.Tensor) -> torch.Tensor:
    return vmap(vmap(lambda a, b: a * b + 1, in_dims=(0, None)), in_dims=(0, 0))(x, x.sum(1))


@TRAPS.function("vmap with random numbers")
def vmap_random(x: torch.Tensor) -> torch.Tensor:
    return vmap(lambda row: row + torch.randn(4), randomness="different")(x)


@TRAPS.model("an ensemble of stacked modules")
class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parameters, buffers = stack_module_state(list(self.members))
        call = lambda p, b, value: functional_call(self.members[0], (p, b), (value,))
        return vmap(call, in_dims=(0, 0, None))(parameters, buffers, x).sum(0)


@TRAPS.function("torch.autograd.functional", sizes=(2, 1))
def autograd_functional(x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.functional.jacobian(lambda value: value.sin().sum(0), x).sum((1, 2)) + x.sum()


class Rounded(torch.autograd.Function):
    """Straight through; may be differentiated once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, step: float = 0.5) -> torch.Tensor:
        ctx.step = step
        return (x / step).round() * step

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 3, None


class Split(torch.autograd.Function):
    """Several outputs, of which one has no gradient and one is not used."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *others: torch.Tensor) -> Any:
        ctx.save_for_backward(x, *others)
        index = x.argmax(-1)
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(False)
        return x * 2, index, sum(others, x * 0)

    @staticmethod
    def backward(ctx: Any, first: Any, index: Any, second: Any) -> Any:
        x, *others = ctx.saved_tensors
        gradient = None if first is None else first * 7
        return gradient, *[None if second is None else second * 5 for _ in others]


class Counting(torch.autograd.Function):
    """Counts its backward runs on the class, and writes into a buffer it is given."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        seen.add_(1)
        ctx.mark_dirty(seen)
        return x * seen

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 2, None


@TRAPS.function("an own function with a default argument")
def own_default(x: torch.Tensor) -> torch.Tensor:
    return Rounded.apply(x) + Rounded.apply(x, 0.25)


@TRAPS.function("an own function with many outputs")
def own_outputs(x: torch.Tensor) -> Any:
    first, index, second = Split.apply(x, x + 1, x * 2)
    return first, index, second


@TRAPS.function("an own function of which one output is used")
def own_output_used(x: torch.Tensor) -> torch.Tensor:
    return Split.apply(x, x + 1)[0]


@TRAPS.model("an own function that takes the model's parameters")
class OwnWithParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Split.apply(x, self.weight.expand_as(x))[2] + Rounded.apply(self.weight)


@TRAPS.function("an own function under vmap")
def own_inside_no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = Rounded.apply(x)
    return y + x


@TRAPS.function("gradients scaled by a hook")
def scaled_by_hook(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 10)
    return y.sum(0)


@TRAPS.function("a hook after accumulation", skip=frozenset({"captured without gradients"}))
def hook_on_node(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).sin()
    if y.grad_fn is not None:
        y.grad_fn.register_hook(lambda inputs, outputs: tuple(item * 3 for item in inputs))
    return y


@TRAPS.function("the straight-through trick")
def straight_through(x: torch.Tensor) -> torch.Tensor:
    hard = (x > 0).to(x.dtype)
    return hard + x.sigmoid() - x.sigmoid().detach()


@TRAPS.function("values by data, gradients by the rest")
def by_data(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.data.clamp_(min=0)
    y.data = y.data + 1
    return y * x


@TRAPS.model("parts frozen by requires_grad")
class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@TRAPS.model("parts frozen in forward")
class FrozenInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.first.parameters():
            parameter.requires_grad_(False)
        y = self.second(self.first(x))
        for parameter in self.first.parameters():
            parameter.requires_grad = True
        return y + self.first(x)


@TRAPS.model("teacher and student")
class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)

    @torch.no_grad()
    def _follow(self) -> None:
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.mul_(0.9).add_(other, alpha=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._follow()
        with torch.no_grad():
            target = self.teacher(x)
        return F.mse_loss(self.student(x), target)


@TRAPS.model("checkpoints of every kind")
class Checkpoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint_sequential(self.layers, 2, x, use_reentrant=False)
        y = checkpoint(self.layers[2], y, use_reentrant=False, preserve_rng_state=False)
        return checkpoint(lambda value, scale: value.sin() * scale, y, 2.0, use_reentrant=False)


@TRAPS.model("a checkpoint only while training")
class CheckpointInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and x.requires_grad:
            return checkpoint(self.linear, x, use_reentrant=False)
        return self.linear(x)


@TRAPS.function("saved on the processor")
def saved_on_cpu(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return (x * x).sin()


@TRAPS.function("anomalies looked for")
def anomalies(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.detect_anomaly(check_nan=False):
        return x.sqrt().sin() if x.min() > 0 else x.sin() if False else x * 2


@TRAPS.function("a gradient kept for an intermediate", skip=frozenset({"captured without gradients"}))
def kept_gradient(x: torch.Tensor) -> Any:
    y = x * 2
    if y.requires_grad:
        y.retain_grad()
    return y, y * 3


@TRAPS.function("in-place on a leaf's view")
def leaf_view(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(4, dtype=x.dtype).requires_grad_()
    z = y.clone()
    z[1:3] = x.sum(0)[1:3]
    return z * 2


@TRAPS.function("clipped and normalised gradients")
def clipped(x: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(4, requires_grad=True)
    with torch.enable_grad():
        (weight * x.detach()).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_([weight], 1.0)
    return x * weight.grad + norm


@TRAPS.model("the shape of a buffer changed in place")
class BufferReshaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(4, 2))
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table.t_()
        self.weight.data = self.weight.data * 0.5
        return x * self.table.sum() + self.table.shape[0] + self.weight.detach()


@TRAPS.model("parameters as one vector")
class AsVector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vector = torch.nn.utils.parameters_to_vector(self.linear.parameters())
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(vector * 0.5, self.linear.parameters())
        return self.linear(x) + vector.sum()
