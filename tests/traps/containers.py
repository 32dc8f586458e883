"""Traps: containers and objects of every kind that go in, come out, or are built on the way.
The usual ones (lists, dicts, named tuples, a dataclass) are in `structures.py`.
"""

from __future__ import annotations

import collections
import enum
import queue
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import numpy
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from tests.traps.trap import Call, Collection

TRAPS = Collection(sizes=(5, 1))
_COPIES_OF_OBJECTS = frozenset({"double", "gradients", "captured without gradients"})
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Frozen:
    """Slots, and nothing can be assigned."""

    values: torch.Tensor
    scale: float = 2.0


@dataclass
class Node:
    """Holds others of its kind."""

    value: torch.Tensor
    children: list[Node] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Checked:
    """Computes something when it is made."""

    values: torch.Tensor
    total: Any = None

    def __post_init__(self) -> None:
        if self.total is None:
            self.total = self.values.sum()


@dataclass
class Box(Generic[T]):
    """Holds anything."""

    content: T


class Point(NamedTuple):
    """A named tuple with a method and a default."""

    x: torch.Tensor
    y: torch.Tensor
    scale: float = 2.0

    @property
    def total(self) -> torch.Tensor:
        return (self.x + self.y) * self.scale


class Spot(Point):
    """A subclass of a named tuple."""

    def shifted(self) -> Spot:
        return self._replace(x=self.x + 1)


class Attributes(dict[str, Any]):
    """A dict whose items are attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Outputs(OrderedDict[str, Any]):
    """A dict that can be indexed by numbers, as libraries have it."""

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())


class Slotted:
    """Slots without a dataclass."""

    __slots__ = ("_cache", "values")

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self._cache: Any = None

    @property
    def doubled(self) -> torch.Tensor:
        if self._cache is None:
            self._cache = self.values * 2
        return self._cache


class Colour(enum.Enum):
    """A kind."""

    RED = 1
    BLUE = 2


class Flags(enum.Flag):
    """Kinds that add up."""

    SHIFT = enum.auto()
    SCALE = enum.auto()


class Request(TypedDict):
    """A dict with known keys."""

    values: torch.Tensor
    scale: float


@TRAPS.function(
    "a frozen dataclass with slots",
    inputs=lambda n=3: Call((Frozen(torch.randn(n, 4)),)),
    others={"other scale": lambda: Call((Frozen(torch.randn(3, 4), 3.0),))},
    skip=_COPIES_OF_OBJECTS,
)
def frozen_dataclass(batch: Frozen) -> Frozen:
    return replace(batch, values=batch.values * batch.scale)


def _tree(n: int = 3) -> Call:
    return Call(
        (Node(torch.randn(n, 4), [Node(torch.randn(n, 4)), Node(torch.randn(n, 4), extra={"a": torch.ones(4)})]),)
    )


@TRAPS.function(
    "a tree of dataclasses",
    inputs=_tree,
    others={"a leaf": lambda: Call((Node(torch.randn(3, 4)),))},
    skip=_COPIES_OF_OBJECTS,
)
def tree_of_dataclasses(node: Node) -> torch.Tensor:
    return node.value + sum(tree_of_dataclasses(child) for child in node.children) + sum(node.extra.values())


@TRAPS.function("a tree that is changed", inputs=_tree, skip=_COPIES_OF_OBJECTS)
def tree_changed(node: Node) -> torch.Tensor:
    node.children[0].value = node.value * 2
    node.extra["seen"] = node.value + 1
    node.children.append(Node(node.value))
    return node.children[0].value


@TRAPS.function("a dataclass that computes when it is made")
def computing_dataclass(x: torch.Tensor) -> Checked:
    return Checked(x * 2)


@TRAPS.function("a generic dataclass", inputs=lambda n=3: Call((Box([torch.randn(n, 4)]),)), skip=_COPIES_OF_OBJECTS)
def generic_dataclass(box: Box[list[torch.Tensor]]) -> Box[torch.Tensor]:
    return Box(box.content[0] * 2)


@TRAPS.function(
    "a named tuple with methods",
    inputs=lambda n=3: Call((Point(torch.randn(n, 4), torch.randn(n, 4)),)),
    others={"other scale": lambda: Call((Point(torch.randn(3, 4), torch.randn(3, 4), 5.0),))},
)
def named_tuple_methods(point: Point) -> Any:
    return point.total, point._replace(scale=3.0), point._asdict()


@TRAPS.function(
    "a subclass of a named tuple",
    inputs=lambda n=3: Call((Spot(torch.randn(n, 4), torch.randn(n, 4)),)),
    others={"the base": lambda: Call((Point(torch.randn(3, 4), torch.randn(3, 4)),))},
)
def named_tuple_subclass(point: Any) -> Any:
    return point.shifted() if isinstance(point, Spot) else point.total


@TRAPS.function(
    "a dict with attributes",
    inputs=lambda n=3: Call((Attributes(x=torch.randn(n, 4), y=2.0),)),
    others={"another key": lambda: Call((Attributes(x=torch.randn(3, 4), z=2.0),))},
)
def dict_with_attributes(batch: Any) -> Any:
    return Attributes(result=batch.x * getattr(batch, "y", 5.0), n=len(batch))


@TRAPS.function(
    "outputs like a library's", inputs=lambda n=3: Call((Outputs(a=torch.randn(n, 4), b=torch.randn(n, 4)),))
)
def library_outputs(batch: Outputs) -> Outputs:
    first, second = batch.to_tuple()
    return Outputs(loss=batch[0] - second, logits=(first, batch["b"] * 2))


@TRAPS.function("an object with slots", inputs=lambda n=3: Call((Slotted(torch.randn(n, 4)),)), skip=_COPIES_OF_OBJECTS)
def object_with_slots(batch: Slotted) -> torch.Tensor:
    return batch.doubled + batch.doubled


@TRAPS.function(
    "an enumeration given",
    inputs=lambda n=3: (torch.randn(n, 4), Colour.RED),
    others={"blue": lambda: (torch.randn(3, 4), Colour.BLUE)},
)
def enumeration_given(x: torch.Tensor, colour: Colour) -> Any:
    return (x * 2 if colour is Colour.RED else x + 1), colour


@TRAPS.function(
    "flags given",
    inputs=lambda n=3: (torch.randn(n, 4), Flags.SHIFT | Flags.SCALE),
    others={"one": lambda: (torch.randn(3, 4), Flags.SHIFT)},
)
def flags_given(x: torch.Tensor, flags: Flags) -> torch.Tensor:
    x = x + 1 if Flags.SHIFT in flags else x
    return x * 2 if flags & Flags.SCALE else x


@TRAPS.function(
    "a typed dict",
    inputs=lambda n=3: Call((Request(values=torch.randn(n, 4), scale=2.0),)),
    others={"other scale": lambda: Call((Request(values=torch.randn(3, 4), scale=3.0),))},
)
def typed_dict(request: Request) -> torch.Tensor:
    return request["values"] * request["scale"]


@TRAPS.function(
    "a defaultdict given",
    inputs=lambda n=3: Call((defaultdict(lambda: 3.0, x=torch.randn(n, 4)),)),
    skip=frozenset({"pickled", "deep copy"}),
)
def defaultdict_given(batch: Any) -> torch.Tensor:
    return batch["x"] * (batch["missing"] if "missing" in batch else 2.0)


@TRAPS.function("a defaultdict that grows", inputs=lambda n=3: Call((defaultdict(list, x=[torch.randn(n, 4)]),)))
def defaultdict_grows(batch: Any) -> torch.Tensor:
    batch["y"].append(batch["x"][0] * 2)
    return batch["y"][0]


@TRAPS.function("a deque given", inputs=lambda n=3: Call((deque([torch.randn(n, 4), torch.randn(n, 4)], maxlen=2),)))
def deque_given(history: Any) -> torch.Tensor:
    return torch.stack(list(history)).sum(0)


@TRAPS.function(
    "a deque that moves on", inputs=lambda n=3: Call((deque([torch.randn(n, 4), torch.randn(n, 4)], maxlen=2),))
)
def deque_moves_on(history: Any) -> torch.Tensor:
    history.append(history[0] + history[1])
    return history[0]


@TRAPS.function(
    "user-made containers",
    inputs=lambda n=3: Call((UserDict({"x": torch.randn(n, 4)}), UserList([torch.randn(n, 4)]))),
    skip=_COPIES_OF_OBJECTS,
)
def user_containers(table: Any, items: Any) -> torch.Tensor:
    return table["x"] + items[0]


@TRAPS.function(
    "a chain of dicts",
    inputs=lambda n=3: Call((ChainMap({"x": torch.randn(n, 4)}, {"y": torch.ones(4)}),)),
    skip=_COPIES_OF_OBJECTS,
)
def chain_of_dicts(table: Any) -> torch.Tensor:
    return table["x"] * table["y"]


@TRAPS.function(
    "a dict that cannot be written",
    inputs=lambda n=3: Call((MappingProxyType({"x": torch.randn(n, 4)}),)),
    skip=_COPIES_OF_OBJECTS | {"pickled", "deep copy"},
)
def read_only_dict(table: Any) -> torch.Tensor:
    return table["x"] * 2


@TRAPS.function(
    "sets and frozen sets given",
    inputs=lambda n=3: (torch.randn(n, 4), {1, 2}, frozenset({"a"})),
    others={"others": lambda: (torch.randn(3, 4), {1, 2, 3}, frozenset({"a"}))},
)
def sets_given(x: torch.Tensor, numbers: set[int], words: frozenset[str]) -> torch.Tensor:
    return x * len(numbers) + ("a" in words)


@TRAPS.function(
    "odd values given",
    inputs=lambda n=3: (torch.randn(n, 4), slice(0, 2), range(2), b"ab", ...),
    others={"others": lambda: (torch.randn(3, 4), slice(0, 3), range(3), b"abc", ...)},
)
def odd_values(x: torch.Tensor, part: slice, steps: range, data: bytes, dots: Any) -> torch.Tensor:
    return x[dots, part] * len(steps) + len(data)


@TRAPS.function(
    "types and dtypes given",
    inputs=lambda n=3: (torch.randn(n, 4), torch.float64, torch.device("cpu"), torch.strided),
    others={"half": lambda: (torch.randn(3, 4), torch.float16, torch.device("cpu"), torch.strided)},
)
def types_given(x: torch.Tensor, dtype: torch.dtype, device: torch.device, layout: torch.layout) -> torch.Tensor:
    return x.to(device, dtype) + torch.ones(4, dtype=dtype, device=device, layout=layout)


@TRAPS.function("a size given as a size", inputs=lambda n=3: (torch.randn(n, 4), torch.Size([n, 2, 2])))
def size_given(x: torch.Tensor, size: torch.Size) -> torch.Tensor:
    return x.view(size) * size.numel()


def _twice(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def _thrice(value: torch.Tensor) -> torch.Tensor:
    return value * 3


@TRAPS.function(
    "a function given",
    inputs=lambda n=3: (torch.randn(n, 4), _twice),
    others={"another": lambda: (torch.randn(3, 4), _thrice), "torch's": lambda: (torch.randn(3, 4), torch.relu)},
)
def function_given(x: torch.Tensor, function: Any) -> torch.Tensor:
    return function(x) + 1


@TRAPS.function(
    "a lambda given", inputs=lambda n=3: (torch.randn(n, 4), lambda value: value * 2), skip=frozenset({"pickled"})
)
def lambda_given(x: torch.Tensor, function: Any) -> torch.Tensor:
    return function(x) + 1


_LAYER = nn.Linear(4, 4)


@TRAPS.function(
    "a module given", inputs=lambda n=3: (torch.randn(n, 4), _LAYER), skip=frozenset({"double", "deep copy", "pickled"})
)
def module_given(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    return layer(x) + 1


@TRAPS.function(
    "a generator of random numbers given",
    inputs=lambda n=3: (torch.randn(n, 4), torch.Generator().manual_seed(3)),
    skip=frozenset({"deep copy", "pickled"}),
)
def generator_given(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x + torch.randn(x.shape, generator=generator)


@TRAPS.function(
    "numpy given",
    inputs=lambda n=3: (torch.randn(n, 4), numpy.arange(4.0)),
    others={"another": lambda: (torch.randn(3, 4), numpy.ones(4))},
)
def numpy_given(x: torch.Tensor, scale: Any) -> torch.Tensor:
    return x * torch.from_numpy(scale).to(x.dtype)


@TRAPS.function(
    "a tuple of tuples with None",
    inputs=lambda n=3: Call((((torch.randn(n, 4), None), (None, torch.randn(n, 4))),)),
    others={"the other way": lambda: Call((((None, torch.randn(3, 4)), (torch.randn(3, 4), None)),))},
)
def tuples_with_none(caches: Any) -> torch.Tensor:
    return sum(first * 2 if first is not None else second for first, second in caches)


@TRAPS.function(
    "a dict with keys of every kind",
    inputs=lambda n=3: Call(({1: torch.randn(n, 4), ("a", 2): torch.randn(n, 4), None: 2.0},)),
)
def keys_of_every_kind(table: dict[Any, Any]) -> Any:
    return {2: table[1] * table[None], ("b",): table["a", 2], True: 1}


@TRAPS.function("counters and sets out")
def counters_out(x: torch.Tensor) -> Any:
    return Counter({"a": 2}), {1, 2}, frozenset({3}), deque([x * 2], maxlen=3), range(3), slice(1, 2)


@TRAPS.function("a generator out", skip=frozenset({"pickled", "deep copy"}))
def generator_out(x: torch.Tensor) -> Any:
    return tuple(part for part in (x * factor for factor in (1.0, 2.0)))


@TRAPS.function("an iterator out", skip=frozenset({"deep copy", "pickled"}))
def iterator_out(x: torch.Tensor) -> Any:
    return iter([x * 2, x * 3])


@TRAPS.function("a lazy iterator out")
def lazy_out(x: torch.Tensor) -> Any:
    return map(x.mul, [1.0, 2.0])


@TRAPS.function("a distribution out")
def distribution_out(x: torch.Tensor) -> Any:
    return torch.distributions.Normal(x, torch.ones_like(x))


@TRAPS.function("numpy out")
def numpy_out(x: torch.Tensor) -> Any:
    return (x * 2).detach().numpy(), float(x.sum()), x.tolist()


@TRAPS.function(
    "a packed sequence in and out",
    inputs=lambda n=3: Call((pack_padded_sequence(torch.randn(4, n, 2), torch.full((n,), 4)),)),
    skip=_COPIES_OF_OBJECTS,
)
def packed_in_and_out(sequence: PackedSequence) -> Any:
    padded, lengths = pad_packed_sequence(sequence)
    return sequence._replace(data=sequence.data * 2), padded + 1, lengths


@TRAPS.function("a queue on the way")
def queue_on_the_way(x: torch.Tensor) -> torch.Tensor:
    waiting: queue.Queue[Any] = queue.Queue()
    for factor in (1.0, 2.0):
        waiting.put(x * factor)
    return waiting.get() - waiting.get()


@TRAPS.function("sorted and grouped on the way")
def grouped(x: torch.Tensor) -> torch.Tensor:
    groups: dict[int, list[torch.Tensor]] = collections.defaultdict(list)
    for number, column in enumerate(x.unbind(1)):
        groups[number % 2].append(column)
    return sum(torch.stack(group).prod(0) * key for key, group in sorted(groups.items(), reverse=True))


@TRAPS.function("a list appended to while it is read")
def list_read_and_written(x: torch.Tensor) -> torch.Tensor:
    values = [x.sum()]
    for value in values:
        if len(values) < 4:
            values.append(value + 1)
    return torch.stack(values).sum()


@TRAPS.function("an object built in steps")
def built_in_steps(x: torch.Tensor) -> Any:
    result = Node(x)
    result.extra["a"] = x * 2
    result.children = [Node(x + 1), result.children]  # type: ignore[list-item]
    setattr(result, "b" + "c", x * 3)
    return result


@TRAPS.function("an object that holds itself")
def holds_itself(x: torch.Tensor) -> torch.Tensor:
    node = Node(x * 2)
    node.children.append(node)
    return node.children[0].children[0].value


@TRAPS.function(
    "inputs that hold one another",
    inputs=lambda n=3: (lambda node: Call(((node, [node]),)))(Node(torch.randn(n, 4))),
    skip=_COPIES_OF_OBJECTS,
)
def inputs_hold_another(pair: Any) -> torch.Tensor:
    node, (again,) = pair
    node.value = node.value * 2
    return again.value + 1


@TRAPS.function("an output that shares an input's object", inputs=lambda n=3: Call(({"x": torch.randn(n, 4)},)))
def output_shares_input(batch: dict[str, Any]) -> Any:
    batch["y"] = batch["x"] * 2
    return batch


@TRAPS.function("an input dict emptied", inputs=lambda n=3: Call(({"x": torch.randn(n, 4), "y": torch.randn(n, 4)},)))
def dict_emptied(batch: dict[str, Any]) -> torch.Tensor:
    x = batch.pop("x")
    return x * 2 + len(batch)


@TRAPS.function(
    "keywords taken out",
    inputs=lambda n=3: Call((torch.randn(n, 4),), {"scale": 2.0, "mask": None}),
    others={"others": lambda: Call((torch.randn(3, 4),), {"mask": torch.ones(4)})},
)
def keywords_taken(x: torch.Tensor, **options: Any) -> torch.Tensor:
    mask = options.pop("mask", None)
    x = x if mask is None else x * mask
    return _scaled(x, **options)


def _scaled(x: torch.Tensor, scale: float = 3.0, *rest: Any, shift: float = 1.0) -> torch.Tensor:
    return x * scale + shift + len(rest)


@TRAPS.function(
    "positions only and keywords only",
    inputs=lambda n=3: Call((torch.randn(n, 4), torch.randn(n, 4)), {"shift": 2.0}),
    others={"others": lambda: Call((torch.randn(3, 4), torch.randn(3, 4), 3.0), {"shift": 2.0})},
)
def positions_only(x: torch.Tensor, /, y: torch.Tensor, scale: float = 2.0, *, shift: float) -> torch.Tensor:
    return x * scale - y + shift


@TRAPS.function(
    "everything at once",
    inputs=lambda n=3: Call((torch.randn(n, 4), torch.randn(n, 4), torch.randn(n, 4)), {"b": torch.randn(n, 4)}),
    others={"fewer": lambda: Call((torch.randn(3, 4),), {"b": torch.randn(3, 4)})},
)
def everything(x: torch.Tensor, *others: torch.Tensor, scale: float = 2.0, **named: torch.Tensor) -> torch.Tensor:
    return x * scale + sum(others) - sum(named.values())
