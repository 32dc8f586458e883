"""Traps: sizes and items where Python wants real numbers: methods of int, texts, keys, libraries, identity, classes.
Plain arithmetic, loops and built-in functions on sizes are in `sizes.py`.
"""

from __future__ import annotations

import bisect
import copy
import datetime
import decimal
import enum
import fractions
import itertools
import json
import math
import operator
import pickle
import statistics
import struct
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn

from tests.traps.trap import Collection

TRAPS = Collection()


class Mode(enum.IntEnum):
    """Kinds of sizes."""

    ONE = 1
    THREE = 3
    FIVE = 5
    NONE = 0


@TRAPS.function("a size asked for SymInt")
def asked_for_symbolic(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[0]
    return x * 100 if isinstance(n, torch.SymInt) else x * 2


@TRAPS.function("the class of a size by attribute")
def class_by_attribute(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[0]
    return x * 2 if n.__class__ is int else x * 100


@TRAPS.function("methods of int on a size")
def methods_of_int(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[0]
    return x * n.bit_length() + n.numerator - n.real + n.conjugate() + n.bit_count()


@TRAPS.function("a size as bytes")
def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x * x.shape[0].to_bytes(2, "little")[0] + struct.unpack("<i", struct.pack("<i", x.shape[0]))[0]


@TRAPS.function("a size through json")
def through_json(x: torch.Tensor) -> torch.Tensor:
    return x * json.loads(json.dumps({"n": x.shape[0]}))["n"]


@TRAPS.function("a size through pickle and copy")
def through_pickle(x: torch.Tensor) -> torch.Tensor:
    n = pickle.loads(pickle.dumps(x.shape[0]))
    return x * n + copy.deepcopy(x.shape[0]) + copy.copy(list(x.shape))[0]


@TRAPS.function("old ways of formatting a size")
def old_formats(x: torch.Tensor) -> torch.Tensor:
    return x * (len("%d" % x.shape[0]) + len(f"{x.shape[0]:>4}") + int(f"{x.shape[0]}"))  # noqa: UP031


@TRAPS.function("an einsum made from the rank", others={"three dimensions": lambda: torch.randn(2, 3, 4)})
def einsum_from_rank(x: torch.Tensor) -> torch.Tensor:
    letters = "abcdefgh"[: x.dim()]
    return torch.einsum(f"{letters},{letters}->{letters[:-1]}", x, x)


@TRAPS.function("an einsum made from a size", sizes=(5, 2))
def einsum_from_size(x: torch.Tensor) -> torch.Tensor:
    names = "".join(chr(ord("a") + index) for index in range(x.shape[0]))
    return torch.einsum(f"{names[0]}b->b{names[0]}" if len(names) < 2 else "zb->bz", x) * len(names)


@TRAPS.function("a size as an enumeration")
def as_enumeration(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if Mode(x.shape[0]) is Mode.THREE else x + Mode(x.shape[0])


@TRAPS.function("sizes in sets and keys")
def in_sets(x: torch.Tensor) -> torch.Tensor:
    table = {(3, 4): 2.0, (5, 4): 3.0}
    return x * table.get((x.shape[0], x.shape[1]), 1.0) * (2 if x.shape[0] in {1, 5} else 3) * len({*x.shape, 4})


@TRAPS.function("a shape as a key")
def shape_as_key(x: torch.Tensor) -> torch.Tensor:
    return x * {torch.Size([3, 4]): 2.0, torch.Size([5, 4]): 3.0}.get(x.shape, 1.0)


@TRAPS.function("a size searched for")
def searched_for(x: torch.Tensor) -> torch.Tensor:
    return x * [5, 3, 1, 0].index(x.shape[0]) + [3, 3, 5].count(x.shape[0]) + bisect.bisect([1, 2, 4], x.shape[0])


@TRAPS.function("a size or a default")
def or_default(x: torch.Tensor) -> torch.Tensor:
    return x + (x.shape[0] or 7) + (x.shape[0] and 2) + (not x.shape[0])


@TRAPS.function("mathematics of whole numbers", sizes=(5, 1))
def whole_numbers(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[0]
    return x * math.isqrt(n) + math.gcd(n, 6) + math.comb(5, n) + math.factorial(n) + math.lcm(n, 4)


@TRAPS.function("mathematics of sizes", sizes=(5, 1))
def real_numbers(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[0]
    return x * math.log2(n) + math.exp(-n) + n**0.5 + math.hypot(n, 1) + math.pow(n, 2) + math.sin(n)


@TRAPS.function("rounding of sizes")
def rounding(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[0]
    return x * round(n / 2) + round(n * 0.37, 1) + int(n * 0.7) + math.ceil(n / 2) + n // 2.0 + (-n) // 2 + ~n + n % 2


@TRAPS.function("fractions and decimals of sizes", sizes=(5, 1))
def fractions_of_sizes(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[0]
    return x * float(fractions.Fraction(n, 7)) + float(decimal.Decimal(n) / 4) + datetime.timedelta(seconds=n).seconds


@TRAPS.function("statistics of a shape")
def of_a_shape(x: torch.Tensor) -> torch.Tensor:
    return (
        x * statistics.mean(x.shape)
        + max(x.shape)
        + sum(x.shape)
        + sorted(x.shape)[0]
        + x.shape.count(4)
        + x.shape.index(4)
    )


@TRAPS.function("numpy on sizes")
def numpy_on_sizes(x: torch.Tensor) -> torch.Tensor:
    steps = numpy.arange(x.shape[0])
    return x * float(numpy.prod(x.shape)) + float(numpy.sqrt(x.shape[0])) + torch.from_numpy(steps).unsqueeze(1)


@TRAPS.function("tensors made of sizes")
def tensors_of_sizes(x: torch.Tensor) -> torch.Tensor:
    sizes = torch.tensor(x.shape)
    return (
        x * sizes.prod() + torch.tensor([x.shape[0], 2]).sum() + x.new_tensor([x.size(0)]) + torch.as_tensor(x.size(1))
    )


@TRAPS.function("old constructors of tensors by sizes")
def old_constructors(x: torch.Tensor) -> torch.Tensor:
    return (
        x
        + torch.Tensor(x.shape[0], 4).zero_()
        + torch.LongTensor([x.shape[0]])
        + torch.FloatTensor(x.size(0), 1).fill_(2)
    )


@TRAPS.function("ranges of sizes", sizes=(5, 1))
def ranges(x: torch.Tensor) -> torch.Tensor:
    order = list(range(x.shape[0]))[::-1]
    return x[order] + len(range(0, x.shape[0], 2)) + operator.length_hint(range(x.shape[0]))


@TRAPS.function("products of ranges", sizes=(5, 1))
def products_of_ranges(x: torch.Tensor) -> torch.Tensor:
    pairs = [(a, b) for a, b in itertools.product(range(x.shape[0]), repeat=2) if a < b]
    return x + len(pairs)


@TRAPS.function("lists multiplied by sizes")
def lists_multiplied(x: torch.Tensor) -> torch.Tensor:
    return x + len([0] * x.shape[0]) + len("a" * x.shape[0]) + len(bytes(x.shape[0]))


@TRAPS.function("slices by sizes", sizes=(5, 2))
def slices(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[0] // 2
    table = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    return x[:half].sum(0) + x[half:].sum(0) * 2 + x[slice(None, half)].mean(0) + sum(table[: x.shape[0]])


@TRAPS.function("an index from the end")
def from_the_end(x: torch.Tensor) -> torch.Tensor:
    return x.narrow(0, x.size(0) - 1, 1) * 2 + x[-1:] if x.numel() else x


@TRAPS.function(
    "a dimension given",
    inputs=lambda n=3: (torch.randn(n, 4), 1),
    others={"first": lambda: (torch.randn(3, 4), 0), "last": lambda: (torch.randn(3, 4), -1)},
)
def dimension_given(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.softmax(dim).sum(dim) * x.size(dim)


@TRAPS.function(
    "a number of steps given",
    inputs=lambda n=3: (torch.randn(n, 4), 2),
    others={"more": lambda: (torch.randn(3, 4), 4), "none": lambda: (torch.randn(3, 4), 0)},
)
def steps_given(x: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        x = x * 1.5
    return x


@TRAPS.function(
    "a rate given",
    inputs=lambda n=3: (torch.randn(n, 4), 0.5),
    others={
        "zero": lambda: (torch.randn(3, 4), 0.0),
        "one": lambda: (torch.randn(3, 4), 1.0),
        "nan": lambda: (torch.randn(3, 4), float("nan")),
    },
)
def rate_given(x: torch.Tensor, rate: float) -> torch.Tensor:
    return F.dropout(x, rate) if rate > 0 else x * (1 - rate)


@TRAPS.function(
    "a size given and compared",
    inputs=lambda n=3: (torch.randn(n, 4), 3),
    others={"other": lambda: (torch.randn(3, 4), 5)},
)
def size_compared(x: torch.Tensor, wanted: int) -> torch.Tensor:
    return x * 2 if x.shape[0] == wanted else F.pad(x, (0, 0, 0, max(0, wanted - x.shape[0])))


@TRAPS.function(
    "numpy numbers given",
    inputs=lambda n=3: (torch.randn(n, 4), numpy.float64(2.0), numpy.int64(3)),
    others={"other": lambda: (torch.randn(3, 4), numpy.float64(3.0), numpy.int64(4))},
)
def numpy_numbers(x: torch.Tensor, scale: Any, steps: Any) -> torch.Tensor:
    return x * float(scale) + int(steps)


@TRAPS.function(
    "large and special numbers given",
    inputs=lambda n=3: (torch.randn(n, 4), 10**20, float("inf"), 2 + 1j),
    others={"other": lambda: (torch.randn(3, 4), 5, 1.0, 1j)},
)
def special_numbers(x: torch.Tensor, big: int, limit: float, turn: complex) -> torch.Tensor:
    return x.clamp(max=limit) + big % 7 + turn.real


@TRAPS.function(
    "an item compared with a size",
    inputs=lambda n=3: (torch.randn(n, 4), torch.tensor(3)),
    others={"other": lambda: (torch.randn(3, 4), torch.tensor(2))},
)
def item_compared(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] == wanted.item() else x + 1


@TRAPS.function(
    "an item as a key",
    inputs=lambda n=3: (torch.randn(n, 4), torch.tensor(1)),
    others={"other": lambda: (torch.randn(3, 4), torch.tensor(0))},
)
def item_as_key(x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
    return {0: torch.relu, 1: torch.tanh}[int(kind)](x)


@TRAPS.model(
    "experts chosen by an item",
    inputs=lambda n=3: (torch.randn(n, 4), torch.tensor(1)),
    others={"other": lambda: (torch.randn(3, 4), torch.tensor(0))},
)
class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return self.experts[which](x) + self.experts[which.item()](x)


@TRAPS.model("experts chosen by the rows", sizes=(5, 1), others={"ones": lambda: torch.ones(3, 4)})
class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(x).argmax(-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(-1)
            if rows.numel() > 0:
                result[rows] = expert(x[rows])
        return result


@TRAPS.function(
    "lengths from a mask",
    inputs=lambda n=3: (torch.randn(n, 4), torch.ones(n, 4, dtype=torch.bool)),
    others={"half": lambda: (torch.randn(3, 4), torch.tensor([[1, 1, 0, 0]] * 3).bool())},
)
def lengths_from_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    longest = int(mask.sum(1).max()) if len(mask) else 0
    return x[:, :longest] * 2


@TRAPS.function(
    "a beam cut at the end", inputs=lambda n=3: torch.arange(n) % 3, others={"ended": lambda: torch.tensor([1, 2, 2])}
)
def cut_at_end(tokens: torch.Tensor) -> torch.Tensor:
    ends = (tokens == 2).nonzero()
    return tokens[: int(ends[0])] if len(ends) else tokens


@TRAPS.function("a product of all but one size", inputs=lambda n=3: torch.randn(n, 2, 2), sizes=(5, 1))
def product_but_one(x: torch.Tensor) -> torch.Tensor:
    features = 1
    for size in x.size()[1:]:
        features *= size
    return x.view(-1, features)


@TRAPS.function("sizes unpacked into views", inputs=lambda n=3: torch.randn(n, 2, 4), sizes=(5, 1))
def unpacked_into_views(x: torch.Tensor) -> torch.Tensor:
    *batch, width = x.shape
    return (
        x.reshape(*batch, 2, width // 2)
        .flatten(0, -2)
        .view((*batch, -1))
        .unflatten(-1, (2, -1))
        .reshape(*x.shape[:-1], -1)
    )


@TRAPS.function("a size kept from before a write", sizes=(5, 2))
def size_before_write(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    before = y.shape[0]
    y = torch.cat([y, y])
    return y[:before] * y.shape[0]


@TRAPS.function("a size in the text of a condition", sizes=(5, 1))
def text_of_condition(x: torch.Tensor) -> torch.Tensor:
    assert f"{x.shape[0]}" in ("3", "5"), f"not {x.shape[0]}"
    return x * 2
