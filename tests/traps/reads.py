"""Traps: numbers, lists and arrays that Python reads out of tensors, and what is done with them.
Branches on such numbers are in `branches.py`; sizes in `sizes.py`.
"""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import numpy
import torch

from tests.traps.trap import Collection

TRAPS = Collection()


def _large() -> torch.Tensor:
    return torch.randn(3, 4) * 10


@TRAPS.function("item flows on", others={"large": _large})
def item_flows(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item() + torch.full((2, 4), x.mean().item(), dtype=x.dtype).sum()


@TRAPS.function("item, then a write", others={"large": _large})
def item_then_write(x: torch.Tensor) -> torch.Tensor:
    y = x.clone().flatten()[:1]
    before = y.item()
    y.add_(1)
    return x * before


@TRAPS.function("item twice around a write", others={"large": _large})
def item_twice(x: torch.Tensor) -> torch.Tensor:
    y = x.sum() * 1
    first = y.item()
    y.mul_(2)
    return x * first + y.item()


@TRAPS.function("float of a tensor", others={"large": _large})
def float_of_tensor(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.abs().max())


@TRAPS.function("int of a tensor", others={"large": _large})
def int_of_tensor(x: torch.Tensor) -> torch.Tensor:
    return x * int(x.abs().max() * 3)


@TRAPS.function("bool of a tensor kept", others={"negative": lambda: -torch.rand(3, 4)})
def bool_kept(x: torch.Tensor) -> Any:
    positive = bool(x.sum() > 0)
    return x * positive, positive


@TRAPS.function("a boolean item", others={"negative": lambda: -torch.rand(3, 4)})
def boolean_item(x: torch.Tensor) -> torch.Tensor:
    return x * (x.sum() > 0).item()


@TRAPS.function("mathematics on an item", others={"large": _large})
def mathematics(x: torch.Tensor) -> torch.Tensor:
    value = x.abs().mean().item()
    return x * math.exp(-value) + math.sqrt(value) + value**2 - round(value) + abs(-value)


@TRAPS.function("mathematics on a tensor", others={"large": _large})
def mathematics_on_tensor(x: torch.Tensor) -> torch.Tensor:
    return x * math.sin(x.sum())


@TRAPS.function("clamped item", others={"large": _large})
def clamped_item(x: torch.Tensor) -> torch.Tensor:
    return x / max(x.abs().max().item(), 1.0) + min(x.sum().item(), 0)


@TRAPS.function(
    "an item as a size",
    inputs=lambda n=3: (torch.randn(n, 4), torch.tensor(2)),
    others={"other": lambda: (torch.randn(3, 4), torch.tensor(3))},
)
def item_as_size(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.zeros(k.item(), 4) + x[: k.item()].sum(0)


@TRAPS.function(
    "an item as a range",
    inputs=lambda n=3: (torch.randn(n, 4), torch.tensor(2)),
    others={"other": lambda: (torch.randn(3, 4), torch.tensor(3))},
)
def item_as_range(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    for _ in range(k):
        x = x * 2
    return x


@TRAPS.function(
    "an item as an index",
    inputs=lambda n=3: (torch.randn(n, 4), torch.tensor(2)),
    others={"other": lambda: (torch.randn(3, 4), torch.tensor(0))},
    sizes=(5,),
)
def item_as_index(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return x[k.item()] * [1.0, 2.0, 4.0][k] + x[k]


@TRAPS.function("item in a text", others={"large": _large})
def item_in_text(x: torch.Tensor) -> Any:
    return {f"{x.sum().item():.3f}": x}


@TRAPS.function("tensor in a text", others={"large": _large})
def tensor_in_text(x: torch.Tensor) -> torch.Tensor:
    return x * len(f"{x}") + len(repr(x.sum() * 1000))


@TRAPS.function("item returned", others={"large": _large})
def item_returned(x: torch.Tensor) -> Any:
    return x * 2, x.sum().item(), (x > 0).sum().item(), x.sum().item() > 0


@TRAPS.function("tolist", others={"large": _large})
def tolist(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([sum(row) for row in x.tolist()])


@TRAPS.function("list of lengths", inputs=lambda n=3: (torch.randn(n + 3, 2), torch.tensor([n, 3])), sizes=(5, 1))
def list_of_lengths(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.stack([piece.sum(0) for piece in x.split(lengths.tolist())])


@TRAPS.function("maximum of tensors by Python", others={"large": _large})
def maximum_by_python(x: torch.Tensor) -> torch.Tensor:
    return max(x.sum(), x.mean()) + max(x.flatten()[:3]) if x.numel() else x


@TRAPS.function("sorted by value", others={"reversed": lambda: torch.arange(12.0).flip(0).view(3, 4)})
def sorted_by_value(x: torch.Tensor) -> torch.Tensor:
    return torch.stack(sorted(x.flatten(), key=float)) if x.numel() else x


@TRAPS.function("the kind of numbers", others={"integers": lambda: torch.arange(12).view(3, 4)})
def kind_of_numbers(x: torch.Tensor) -> torch.Tensor:
    smallest = torch.finfo(x.dtype).min if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    return x.masked_fill(x > 0, smallest)


@TRAPS.function("dtype handed on", others={"integers": lambda: torch.arange(12).view(3, 4)})
def dtype_handed_on(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(4, dtype=x.dtype) + x.float().softmax(-1).to(x.dtype).type_as(x)


@TRAPS.function("cast to another dtype", inputs=lambda n=3: (torch.randn(n, 4), torch.randn(n, 4).double()))
def cast_to_other(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.to(y) + y.to(x.dtype) + x.type(torch.float16).to(y.device, y.dtype)


@TRAPS.function("result type asked", inputs=lambda n=3: (torch.randn(n, 4), torch.randn(n, 4).double()))
def result_type(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.zeros(4, dtype=torch.result_type(x, y)) + torch.ones(4, dtype=torch.promote_types(x.dtype, y.dtype))


@TRAPS.function("default dtype asked")
def default_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.get_default_dtype()) + torch.zeros(4)


@TRAPS.function("sizes in bytes")
def size_in_bytes(x: torch.Tensor) -> torch.Tensor:
    return x * x.element_size() + x.itemsize + x.nbytes


@TRAPS.function("numpy and back", others={"large": _large})
def numpy_and_back(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(numpy.tanh(x.detach().numpy())) + x


@TRAPS.function("numpy called on a tensor", others={"large": _large})
def numpy_on_tensor(x: torch.Tensor) -> torch.Tensor:
    return x * float(numpy.mean(numpy.asarray(x.detach())))


@TRAPS.function("a tensor from numbers of tensors", others={"large": _large})
def tensor_of_tensors(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([x.sum(), x.mean(), 1.0]) + torch.as_tensor([x.min().item(), 2.0, 3.0])


@TRAPS.function("copies by Python", others={"large": _large})
def copies(x: torch.Tensor) -> torch.Tensor:
    return copy.deepcopy(x.detach()) * 2 + copy.copy(x)


@TRAPS.function("saved and loaded", others={"large": _large})
def saved_and_loaded(x: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(x.detach(), buffer)
    buffer.seek(0)
    return torch.load(buffer) * 2


@TRAPS.function("through dlpack", others={"large": _large})
def through_dlpack(x: torch.Tensor) -> torch.Tensor:
    return torch.from_dlpack(x.detach() * 2) + 1


@TRAPS.function("through the storage", others={"large": _large})
def through_storage(x: torch.Tensor) -> torch.Tensor:
    y = x.detach() * 2
    return torch.empty(0, dtype=x.dtype).set_(y.untyped_storage(), 0, y.shape) + 1


@TRAPS.function("data and detach")
def data_and_detach(x: torch.Tensor) -> torch.Tensor:
    return x * x.data + x.detach() * x.T.sum() + x.mT.sum() + x.real


@TRAPS.function("the identity of a tensor", others={"large": _large})
def identity_of_tensor(x: torch.Tensor) -> torch.Tensor:
    seen = {id(x): 2.0, x: 3.0}
    return x * seen[id(x)] * seen[x]


@TRAPS.function("numbers compared and stored", others={"large": _large})
def numbers_compared(x: torch.Tensor) -> torch.Tensor:
    flags = [x.max().item() > 1, x.min().item() < -1, x.shape[0] == 3]
    return x * sum(flags) + torch.tensor(flags).sum()
