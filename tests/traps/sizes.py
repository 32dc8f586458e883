"""Traps: Python that computes with sizes as numbers, in loops, keys, texts, arithmetic and built-in functions.
Sizes that only flow into other torch calls are in `shapes.py`; branches on them in `branches.py`.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn

from tests.traps.trap import Collection

TRAPS = Collection()


@TRAPS.function("range over a size")
def range_over_size(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(4, dtype=x.dtype)
    for index in range(x.shape[0]):
        total = total + x[index] * index
    return total


@TRAPS.function("iterate over a tensor")
def iterate(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(4, dtype=x.dtype)
    for row in x:
        total = total * 0.5 + row
    return total


@TRAPS.function("unbind and stack")
def unbind(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([row * index for index, row in enumerate(x.unbind(0))] or [x])


@TRAPS.function("split in pieces", example=4, sizes=(6, 1, 8))
def split(x: torch.Tensor) -> torch.Tensor:
    return sum(piece.sum(0) * (number + 1) for number, piece in enumerate(x.split(2)))


@TRAPS.function("chunks of a batch", example=4, sizes=(6, 1, 2))
def chunks(x: torch.Tensor) -> torch.Tensor:
    return sum(piece.sum(0) * (number + 1) for number, piece in enumerate(torch.chunk(x, 3)))


@TRAPS.function("pieces of a tensor counted", example=4, sizes=(6, 1))
def pieces_counted(x: torch.Tensor) -> torch.Tensor:
    return x * len(x.split(2))


@TRAPS.function("unpack a tensor", inputs=lambda n=3: torch.randn(2, n))
def unpack(x: torch.Tensor) -> torch.Tensor:
    first, second = x
    return first * 2 - second


@TRAPS.function("unpack with a star", sizes=(5, 2, 1))
def unpack_star(x: torch.Tensor) -> torch.Tensor:
    first, *rest = x
    return first + sum(rest)


@TRAPS.function("reversed rows")
def reversed_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([row.unsqueeze(0) for row in reversed(x)]) if len(x) else x


@TRAPS.function("zip of two tensors", inputs=lambda n=3: (torch.randn(n, 4), torch.randn(n, 4)))
def zipped(x: torch.Tensor, y: torch.Tensor) -> Any:
    return [a * b for a, b in zip(x, y, strict=True)]


@TRAPS.function("len of a tensor")
def length(x: torch.Tensor) -> torch.Tensor:
    return x / max(len(x), 1)


@TRAPS.function("rank of a squeezed tensor", sizes=(5, 1))
def squeezed(x: torch.Tensor) -> torch.Tensor:
    y = x.squeeze()
    return y.sum(0) if y.dim() > 1 else y * 3


@TRAPS.function("squeeze and go on", sizes=(5, 1))
def squeeze_and_go_on(x: torch.Tensor) -> torch.Tensor:
    return x.squeeze().softmax(0).unsqueeze(-1)


@TRAPS.function("arithmetic on sizes")
def arithmetic(x: torch.Tensor) -> torch.Tensor:
    n, d = x.shape
    return torch.arange((n * d - 1) // 2 + n % 2 + 1, dtype=x.dtype) * (n / d) + 2**n - (-n)


@TRAPS.function("min, max and sum of sizes", inputs=lambda n=3: (torch.randn(n, 4), torch.randn(2, n)))
def min_max_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    smallest, largest = min(x.shape[0], y.shape[0]), max(x.shape[0], y.shape[1], 2)
    return torch.zeros(smallest, largest) + sum(x.shape) + sum([x.size(0), y.size(0)])


@TRAPS.function("min and max of a list of sizes", inputs=lambda n=3: (torch.randn(n, 4), torch.randn(2, n)))
def min_max_list(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.ones(min([x.shape[0], 3]), max(y.shape)) * max(x.shape, default=0)


@TRAPS.function("sorted sizes", sizes=(5, 1))
def sorted_sizes(x: torch.Tensor) -> torch.Tensor:
    small, large = sorted(x.shape)
    return torch.ones(small, large)


@TRAPS.function("square root of a size", sizes=(5, 1))
def square_root(x: torch.Tensor) -> torch.Tensor:
    return x / math.sqrt(x.size(0)) * x.size(-1) ** -0.5


@TRAPS.function("ceil, floor and round of sizes", sizes=(5, 4, 1))
def rounding(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[0]
    return torch.zeros(math.ceil(n / 2), math.floor(n / 2) + 1) + round(n / 3) + int(n * 0.7)


@TRAPS.function("a float times a size")
def float_times_size(x: torch.Tensor) -> torch.Tensor:
    return x * (2.0 * x.shape[0]) + 0.5 * x.size(1) - x.shape[0] * 0.25


@TRAPS.function("a size asked for its index", sizes=(5, 1))
def index_of_size(x: torch.Tensor) -> torch.Tensor:
    return x * operator.index(x.shape[0]) if isinstance(x.shape[0], numbers.Integral) else x


@TRAPS.function("symbolic functions of torch")
def symbolic_functions(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sym_max(x.shape[0], 4) + torch.sym_float(x.size(0)) + torch.sym_int(x.shape[0] / 2)


@TRAPS.function("product of a shape")
def product(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(math.prod(x.shape)) * x.shape.numel() + x.numel()


@TRAPS.function("numpy on a shape", sizes=(5, 1))
def numpy_on_shape(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(int(numpy.prod(x.shape))) * float(numpy.mean(x.shape))


@TRAPS.function("divmod of a size", sizes=(5, 4, 1))
def division_with_rest(x: torch.Tensor) -> torch.Tensor:
    half, rest = divmod(x.shape[0], 2)
    return x[: half + rest] * half


@TRAPS.function("a list repeated by a size", sizes=(5, 1))
def repeated_list(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([1.0] * x.shape[0], dtype=x.dtype).unsqueeze(1) * x


@TRAPS.function("a size as a key", sizes=(5, 2, 1))
def size_as_key(x: torch.Tensor) -> torch.Tensor:
    return x * {3: 2.0, 5: 7.0}.get(x.shape[0], 1.0)


@TRAPS.function("a size as an index", sizes=(5, 2, 1))
def size_as_index(x: torch.Tensor) -> torch.Tensor:
    return x * [1.0, 2.0, 4.0, 8.0, 16.0, 32.0][x.shape[0]]


@TRAPS.function("a size in a text", sizes=(5, 2, 1))
def size_in_text(x: torch.Tensor) -> torch.Tensor:
    return x * {"rows3": 2.0, "rows5": 7.0}.get(f"rows{x.shape[0]}", 1.0)


@TRAPS.function("a size as a str", sizes=(5, 2, 1))
def size_as_str(x: torch.Tensor) -> torch.Tensor:
    return x * len(str(x.shape[0] * 50)) + int(str(x.size(1)))


@TRAPS.function("a shape in a text", sizes=(5, 2, 1))
def shape_in_text(x: torch.Tensor) -> Any:
    return {f"{tuple(x.shape)}": x * 2}


@functools.lru_cache
def _table(n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32) * 2


def _cached_build() -> Any:
    _table.cache_clear()
    return cached_table


def cached_table(x: torch.Tensor) -> torch.Tensor:
    return x + _table(x.shape[0]).unsqueeze(1)


TRAPS.add("a table in a cache", _cached_build)


@functools.cache
def _factor(n: int) -> float:
    return 2.0 * n


@TRAPS.function("a number in a cache")
def cached_number(x: torch.Tensor) -> torch.Tensor:
    return x * _factor(x.shape[0])


@TRAPS.function("isinstance of a size")
def isinstance_of_size(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[0]
    return x * 2 if isinstance(n, int) else x * 3


@TRAPS.function("the type of a size")
def type_of_size(x: torch.Tensor) -> torch.Tensor:
    n = x.size(0)
    return x * n if type(n) is int else x


def _normalised(shape: Any) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


@TRAPS.function("isinstance inside a library function")
def isinstance_in_library(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(_normalised(x.shape[0]))


@TRAPS.function("a size returned")
def size_returned(x: torch.Tensor) -> Any:
    return x * 2, x.shape[0], x.shape, x.size(1) * 2.0, len(x)


@TRAPS.function("two shapes compared", inputs=lambda n=3: (torch.randn(n, 4), torch.randn(3, 4)), sizes=(5, 1))
def shapes_compared(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y if x.shape == y.shape else x.sum(0) + y.sum(0)


@TRAPS.function("a shape compared with a tuple", sizes=(5, 1))
def shape_compared(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape == (3, 4) or tuple(x.shape) in {(1, 4)} else x


@TRAPS.function("slices of a shape", inputs=lambda n=3: torch.randn(n, 4, 6))
def slices_of_shape(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:-1], 2, -1).transpose(-1, -2).reshape(*x.shape[:1], *(12, 2))


@TRAPS.function("a shape and a list")
def shape_and_list(x: torch.Tensor) -> torch.Tensor:
    sizes = list(x.shape)
    sizes[-1] = 1
    wider = x.shape[:1] + (2,)  # noqa: RUF005 (adding to a torch.Size is the trap)
    return torch.ones(wider).sum() + torch.zeros(sizes)


@TRAPS.function("a size read before a transposition in place", sizes=(5, 2))
def size_before_transposition(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    n = y.size(0)
    y.t_()
    return torch.ones(n) + y.sum()


@TRAPS.function("size of what a mask selects", others={"more": lambda: torch.rand(3, 4) + 1})
def size_of_selection(x: torch.Tensor) -> torch.Tensor:
    chosen = x[x > 0]
    return torch.ones(chosen.shape[0]) * chosen.numel()


@TRAPS.function(
    "branch on what a mask selects", others={"nothing": lambda: -torch.rand(3, 4), "all": lambda: torch.rand(3, 4)}
)
def branch_on_selection(x: torch.Tensor) -> torch.Tensor:
    chosen = torch.nonzero(x > 0)
    return chosen.float().mean() if chosen.size(0) > 0 else x.sum()


@TRAPS.function("layers by size", sizes=(5, 2))
def layers_by_size(x: torch.Tensor) -> torch.Tensor:
    shapes = [(x.shape[0], 4), (2, x.shape[0])]
    return sum(torch.ones(shape).sum() * number for number, shape in enumerate(shapes, 1))


@TRAPS.model("recursion on a size", sizes=(5, 1))
class Recursion(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] <= 1:
            return F.relu(x)
        half = x.shape[0] // 2
        return torch.cat([self.forward(x[half:]), self.forward(x[:half])])
