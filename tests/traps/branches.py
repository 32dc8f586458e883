"""Traps: Python that branches on values, sizes, kinds, None and flags, loops until something holds, asserts, and recovers.
Branches on the mode of the model are in `modes.py`; numbers read out of tensors that only flow on are in `reads.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.traps.trap import Call, Collection

TRAPS = Collection()


def _ones() -> torch.Tensor:
    return torch.ones(3, 4)


def _minus_ones() -> torch.Tensor:
    return -torch.ones(3, 4)


@TRAPS.function("branch on a sum", others={"negative": _minus_ones, "positive": _ones})
def branch_on_sum(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x * 2
    return x - 1


@TRAPS.model("branch on a parameter's value")
class BranchOnParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale > 1:
            return x / self.scale
        return x


@TRAPS.model("branch on a parameter's shape")
class BranchOnParameterShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.shape[0] == self.weight.size(1):
            return x @ self.weight
        return x @ self.weight.t()


@TRAPS.function("branch on a size", others={"large": lambda: torch.randn(12, 4)})
def branch_on_size(x: torch.Tensor) -> torch.Tensor:
    return x.mean(0) if x.shape[0] > 4 else x.sum(0)


@TRAPS.function("branch on the rank", others={"three dimensions": lambda: torch.randn(2, 3, 4)})
def branch_on_rank(x: torch.Tensor) -> torch.Tensor:
    if x.dim() == 3:
        return x.mean(dim=1)
    return x.unsqueeze(0) if x.ndim < 2 else x.sum(dim=-1)


@TRAPS.function("branch on the dtype", others={"integers": lambda: torch.arange(12).view(3, 4)})
def branch_on_dtype(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float64:
        return x * 3
    return x * 2 if torch.is_floating_point(x) else x + 1


@TRAPS.function("branch on contiguity", others={"transposed": lambda: torch.randn(4, 3).t()})
def branch_on_contiguity(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1) if x.is_contiguous() else x.sum(0)


@TRAPS.function("branch on the strides", others={"transposed": lambda: torch.randn(4, 3).t()})
def branch_on_strides(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.stride(-1) == 1 else x + 2


@TRAPS.function("branch on requires_grad")
def branch_on_requires_grad(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.requires_grad else x + 1


@TRAPS.function("branch on grad_fn and is_leaf", others={"computed": lambda: torch.randn(3, 4, requires_grad=True) * 1})
def branch_on_history(x: torch.Tensor) -> torch.Tensor:
    if x.grad_fn is None:
        return x * 2
    return x * 3 if x.is_leaf else x * 4


@TRAPS.function("branch on the device", devices=True)
def branch_on_device(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0) if x.device.type == "cpu" else x.sum(1)


def _optional(n: int = 3) -> Any:
    return torch.randn(n, 4), torch.randn(n, 4)


@TRAPS.function("an optional input", inputs=_optional, others={"without": lambda: (torch.randn(3, 4), None)})
def optional_input(x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    if mask is None:
        return x * 2
    return x * mask


@TRAPS.function("a default left out", others={"given": lambda: Call((torch.randn(3, 4), 5.0))})
def default_left_out(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return x * scale


@TRAPS.function(
    "a flag", inputs=lambda n=3: (torch.randn(n, 4), True), others={"off": lambda: (torch.randn(3, 4), False)}
)
def flag(x: torch.Tensor, double: bool) -> torch.Tensor:
    return x * 2 if double else x


@TRAPS.function(
    "one, true and one point zero",
    inputs=lambda n=3: (torch.arange(4 * n).view(n, 4), 1),
    others={"true": lambda: (torch.arange(12).view(3, 4), True), "float": lambda: (torch.arange(12).view(3, 4), 1.0)},
)
def kinds_of_one(x: torch.Tensor, scale: Any) -> torch.Tensor:
    return x - 1 if scale is True else x * scale


@TRAPS.function(
    "a word", inputs=lambda n=3: (torch.randn(n, 4), "sum"), others={"mean": lambda: (torch.randn(3, 4), "mean")}
)
def word(x: torch.Tensor, reduction: str) -> torch.Tensor:
    return getattr(torch, reduction)(x, dim=1)


@TRAPS.function(
    "tensor or number",
    inputs=lambda n=3: (torch.randn(n, 4), torch.tensor(2.0)),
    others={"number": lambda: (torch.randn(3, 4), 2.0)},
)
def tensor_or_number(x: torch.Tensor, scale: Any) -> torch.Tensor:
    return x * scale if isinstance(scale, torch.Tensor) else x + scale


@TRAPS.function("while a value is large", others={"larger": lambda: torch.randn(3, 4) * 100})
def while_large(x: torch.Tensor) -> torch.Tensor:
    while x.abs().max() > 0.5:
        x = x / 2
    return x


@TRAPS.function("assert on values", others={"negative": _minus_ones}, inputs=lambda n=3: torch.rand(n, 4))
def assert_values(x: torch.Tensor) -> torch.Tensor:
    assert x.min() >= 0, "negative"
    return x.sqrt()


@TRAPS.function("assert on sizes", sizes=(2, 5))
def assert_sizes(x: torch.Tensor) -> torch.Tensor:
    assert x.shape[0] < 5 and x.size(-1) == 4
    return x + 1


@TRAPS.function("raise on a bad value", others={"bad": lambda: torch.full((3, 4), float("nan"))})
def raise_on_value(x: torch.Tensor) -> torch.Tensor:
    if torch.isnan(x).any():
        raise ValueError("not a number")
    return x * 2


@TRAPS.function("early return", others={"zeros": lambda: torch.zeros(3, 4)})
def early_return(x: torch.Tensor) -> Any:
    if not x.any():
        return None
    return x / x.abs().max()


@TRAPS.function("any and all", others={"negative": _minus_ones, "positive": _ones})
def any_and_all(x: torch.Tensor) -> torch.Tensor:
    if (x > 0).all():
        return x.log()
    return x.exp() if bool((x < 0).any()) else x


@TRAPS.function("torch.equal", inputs=_optional, others={"equal": lambda: (torch.ones(2, 4), torch.ones(2, 4))})
def equality(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.equal(x, y) else x + y


@TRAPS.function("same tensor", inputs=_optional, others={"same": lambda: (lambda x: (x, x))(torch.ones(2, 4))})
def same_tensor(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 if x is y else x + y


@TRAPS.function("a value in a list", inputs=lambda n=3: torch.tensor(n), others={"out": lambda: torch.tensor(7)})
def value_in_list(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x in [1, 3, 5] else x + 1


@TRAPS.function(
    "a number in a tensor", inputs=lambda n=3: torch.arange(n), others={"out": lambda: torch.tensor([9, 8])}
)
def number_in_tensor(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if 1 in x else x + 1


@TRAPS.function("where instead of a branch")
def where(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.sum() > 0, x * 2, x - 1)


@TRAPS.function("try and recover", others={"transposed": lambda: torch.randn(4, 3).t()})
def try_and_recover(x: torch.Tensor) -> torch.Tensor:
    try:
        return x.view(-1)
    except RuntimeError:
        return x.reshape(-1) * 2


@TRAPS.function("recover from a branch on a value", others={"negative": _minus_ones, "positive": _ones})
def recover_from_branch(x: torch.Tensor) -> torch.Tensor:
    try:
        if x.sum() > 0:
            return x * 2
    except (RuntimeError, ValueError):
        return x * 100
    return x - 1


@TRAPS.function("recover from a conversion", others={"large": lambda: torch.randn(9, 4)})
def recover_from_conversion(x: torch.Tensor) -> torch.Tensor:
    try:
        steps = int(x.shape[0])
    except TypeError:
        steps = 100
    return x * steps


@TRAPS.function("recover from anything", others={"negative": _minus_ones, "positive": _ones})
def recover_from_anything(x: torch.Tensor) -> torch.Tensor:
    try:
        return x * float(x.sum())
    except Exception:
        return x


@TRAPS.function("asking for an attribute")
def asking_for_attribute(x: torch.Tensor) -> torch.Tensor:
    scale = getattr(x, "scale", 2.0)
    return x * scale if not hasattr(x, "mask") else x * x.mask


@TRAPS.function("grad mode asked")
def grad_mode_asked(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.is_grad_enabled() else x * 3


@TRAPS.function("match on a size", sizes=(5, 2, 1))
def match_on_size(x: torch.Tensor) -> torch.Tensor:
    match x.shape[0]:
        case 1:
            return x * 10
        case 2 | 3:
            return x * 20
        case _:
            return x
