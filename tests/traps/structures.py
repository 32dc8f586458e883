"""Traps: what goes in and comes out: stars, defaults, keywords, nested containers, dataclasses, named tuples, own classes.
Values inside of the containers are ordinary; what is written into them is in `mutation.py`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.traps.trap import Call, Collection

TRAPS = Collection()
_COPIES_OF_OBJECTS = frozenset({"double", "gradients", "captured without gradients"})


class Pair(NamedTuple):
    """Two values."""

    first: Any
    second: Any


@dataclass
class Batch:
    """Tensors that belong together."""

    values: torch.Tensor
    scale: float
    mask: torch.Tensor | None = None


@dataclass(frozen=True)
class Result:
    """What a model returns."""

    loss: torch.Tensor
    details: dict[str, Any]


class Cache:
    """An object that torch knows nothing of."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []

    def update(self, key: torch.Tensor) -> torch.Tensor:
        self.keys.append(key)
        return torch.stack(self.keys).sum(0)


@TRAPS.function(
    "any number of tensors",
    inputs=lambda n=3: (torch.randn(n, 4), torch.randn(n, 4)),
    others={"three": lambda: tuple(torch.randn(3, 3, 4)), "one": lambda: (torch.randn(3, 4),)},
)
def any_number(*tensors: torch.Tensor) -> torch.Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total * 2 + tensor
    return total / len(tensors)


def _keywords(n: int = 3) -> Call:
    return Call((torch.randn(n, 4),), {"b": torch.randn(n, 4), "a": torch.randn(n, 4)})


@TRAPS.function(
    "keywords handed through",
    inputs=_keywords,
    others={
        "another order": lambda: Call((torch.randn(3, 4),), {"a": torch.randn(3, 4), "b": torch.randn(3, 4)}),
        "another keyword": lambda: Call((torch.randn(3, 4),), {"b": torch.randn(3, 4), "c": torch.randn(3, 4)}),
        "none": lambda: Call((torch.randn(3, 4),)),
    },
)
def keywords(x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
    for number, value in enumerate(others.values()):
        x = x * 2 + value * number
    return x - others["a"] if "a" in others else x


def _three(n: int = 3) -> Call:
    return Call((torch.randn(n, 4),), {"y": torch.randn(n, 4)})


@TRAPS.function(
    "positions and keywords",
    inputs=_three,
    others={
        "by position": lambda: Call((torch.randn(3, 4), torch.randn(3, 4))),
        "by keyword": lambda: Call((), {"y": torch.randn(3, 4), "x": torch.randn(3, 4)}),
        "with the default": lambda: Call((torch.randn(3, 4), torch.randn(3, 4), 5.0)),
    },
)
def positions_and_keywords(x: torch.Tensor, y: torch.Tensor, scale: float = 3.0, *, shift: float = 1.0) -> torch.Tensor:
    return x * scale - y + shift


@TRAPS.function(
    "a list of tensors",
    inputs=lambda n=3: ([torch.randn(n, 4), torch.randn(n, 4)],),
    others={
        "longer": lambda: ([torch.randn(3, 4)] * 3,),
        "shorter": lambda: ([torch.randn(3, 4)],),
        "tuple": lambda: ((torch.randn(3, 4), torch.randn(3, 4)),),
    },
)
def list_of_tensors(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(values).sum(0) / len(values) if isinstance(values, list) else values[0]


@TRAPS.function(
    "a dict of tensors",
    inputs=lambda n=3: ({"a": torch.randn(n, 4), "b": torch.randn(n, 4)},),
    others={
        "another order": lambda: ({"b": torch.randn(3, 4), "a": torch.randn(3, 4)},),
        "another key": lambda: ({"a": torch.randn(3, 4), "c": torch.randn(3, 4)},),
        "one more": lambda: ({"a": torch.randn(3, 4), "b": torch.randn(3, 4), "c": torch.randn(3, 4)},),
    },
)
def dict_of_tensors(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch["a"] * 2 - batch.get("b", torch.ones(4)) + len(batch)


@TRAPS.function(
    "nested containers in",
    inputs=lambda n=3: (
        {"x": [torch.randn(n, 4), (torch.randn(4), 2.0)], "none": None},
        Pair(torch.randn(n, 4), "word"),
    ),
)
def nested_in(tree: dict[str, Any], pair: Pair) -> torch.Tensor:
    x, (y, scale) = tree["x"]
    return (x + y) * scale - pair.first if tree["none"] is None else x


@TRAPS.function("a named tuple in and out", inputs=lambda n=3: Call((Pair(torch.randn(n, 4), torch.randn(n, 4)),)))
def named_tuple(pair: Pair) -> Pair:
    return Pair(pair.second * 2, pair._replace(first=pair.second))


@TRAPS.function(
    "a dataclass in",
    inputs=lambda n=3: Call((Batch(torch.randn(n, 4), 2.0),)),
    others={
        "another scale": lambda: Call((Batch(torch.randn(3, 4), 3.0),)),
        "a mask": lambda: Call((Batch(torch.randn(3, 4), 2.0, torch.ones(4)),)),
    },
    skip=_COPIES_OF_OBJECTS,
)
def dataclass_in(batch: Batch) -> torch.Tensor:
    return batch.values * batch.scale if batch.mask is None else batch.values * batch.mask


@TRAPS.function(
    "an object in", inputs=lambda n=3: Call((SimpleNamespace(x=torch.randn(n, 4), y=2.0),)), skip=_COPIES_OF_OBJECTS
)
def object_in(batch: Any) -> torch.Tensor:
    return batch.x * batch.y


@TRAPS.function("a dataclass out")
def dataclass_out(x: torch.Tensor) -> Result:
    return Result(x.sum(), {"rows": x.shape[0], "parts": [x * 2, None, "text"], "batch": Batch(x + 1, 2.0)})


@TRAPS.function("containers out")
def containers_out(x: torch.Tensor) -> Any:
    ordered = OrderedDict([("b", x), ("a", (x * 2, None))])
    counted = defaultdict(list)
    counted["x"].append(x + 1)
    return [ordered, counted, {1: x - 1, "t": ()}, (), [], (3.5, True, "word", torch.float32)]


@TRAPS.function("objects out")
def objects_out(x: torch.Tensor) -> Any:
    cache = Cache()
    cache.update(x * 2)
    cache.update(x * 3)
    return cache, SimpleNamespace(y=x + 1, n=2)


@TRAPS.function("results of torch's own kind", sizes=(5, 1))
def torch_results(x: torch.Tensor) -> Any:
    return x.max(dim=1), torch.sort(x), torch.var_mean(x), x.topk(2).values


@TRAPS.function("the input returned")
def input_returned(x: torch.Tensor) -> Any:
    return x, [x], x.view_as(x), x.contiguous()


@TRAPS.function("the same tensor twice in the result")
def same_twice(x: torch.Tensor) -> Any:
    y = x * 2
    return y, {"again": y, "view": y[0:1]}


@TRAPS.function("nothing computed")
def nothing_computed(x: torch.Tensor) -> Any:
    return None


@TRAPS.function("a constant returned")
def constant_returned(x: torch.Tensor) -> Any:
    return 3, "word", torch.ones(2), [1.5, None]


@TRAPS.model("a parameter returned")
class ParameterReturned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> Any:
        return self.weight, self.table, x


def _shared_input(n: int = 3) -> Any:
    x = torch.randn(n, 4)
    return x, x


@TRAPS.function(
    "one tensor given twice",
    inputs=_shared_input,
    others={"two tensors": lambda: (torch.randn(3, 4), torch.randn(3, 4))},
)
def given_twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 - y


def _overlapping(n: int = 3) -> Any:
    x = torch.randn(n + 1, 4)
    return x[:n], x[1:]


@TRAPS.function(
    "overlapping inputs written", inputs=_overlapping, others={"apart": lambda: (torch.randn(3, 4), torch.randn(3, 4))}
)
def overlapping(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return y * 2


@TRAPS.function(
    "numbers given",
    inputs=lambda n=3: (torch.randn(n, 4), 2, 0.5),
    others={"other numbers": lambda: (torch.randn(3, 4), 3, 0.25)},
)
def numbers_given(x: torch.Tensor, power: int, scale: float) -> torch.Tensor:
    return x**power * scale


@TRAPS.function("no tensor given", inputs=lambda n=3: (n, 4))
def no_tensor(rows: int, columns: int) -> torch.Tensor:
    return torch.ones(rows, columns) * rows


@TRAPS.function("an integer tensor given", inputs=lambda n=3: (torch.randn(n, 4), torch.arange(n)))
def integer_tensor(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.gather(0, index.unsqueeze(1).expand(-1, 4)) + index.unsqueeze(1)


@TRAPS.function(
    "transposed input", inputs=lambda n=3: torch.randn(4, n).t(), others={"contiguous": lambda: torch.randn(3, 4)}
)
def transposed_input(x: torch.Tensor) -> Any:
    return x * 2, x.contiguous() + 1, x.reshape(-1)


@TRAPS.function(
    "channels last",
    inputs=lambda n=3: torch.randn(1, 3, n, n).to(memory_format=torch.channels_last),
    others={"contiguous": lambda: torch.randn(1, 3, 3, 3)},
    sizes=(5, 2),
)
def channels_last(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).copy_(x) * 2
