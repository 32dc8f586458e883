"""Traps: containers of somebody's own kind, given and returned: with attributes beside their items, or an order of their own.
Dataclasses, named tuples and Python's containers are in `containers.py`.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import torch

from tests.traps.trap import Call, Collection

TRAPS = Collection(sizes=(5,))


@dataclasses.dataclass
class Results(OrderedDict[str, Any]):
    """The way transformers returns results: fields, items and attributes at once; copies are made from the fields."""

    first: Any = None
    second: Any = None
    third: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                OrderedDict.__setitem__(self, field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: Any) -> None:
        OrderedDict.__setitem__(self, key, value)
        object.__setattr__(self, key, value)

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))


class Table(OrderedDict[str, Any]):
    pass


class Items(list[Any]):
    pass


class Labelled(list[Any]):
    def __init__(self, label: str, items: Any) -> None:
        super().__init__(items)
        self.label = label


class Row(tuple[Any, ...]):
    pass


class Pair(NamedTuple):
    left: Any
    right: Any


class MarkedPair(Pair):
    pass


class Recent(deque[Any]):
    pass


class Groups(defaultdict[str, Any]):
    pass


def _marked(container: Any, **attributes: Any) -> Any:
    vars(container).update(attributes)
    return container


@TRAPS.function("results in the order of setting")
def order_of_setting(x: torch.Tensor) -> Any:
    results = Results(first=x, third=x * 2)
    results["second"] = x + 1
    return results, list(results), list(results.values())


@TRAPS.function("a dict with an attribute beside its items")
def attribute_of_dict(x: torch.Tensor) -> Any:
    return _marked(Table(first=x), extra=x + 3, first=x * 7)


@TRAPS.function("a list with attributes")
def attributes_of_list(x: torch.Tensor) -> Any:
    return _marked(Items([x, x + 1]), extra=x * 2, rows=x.shape[0])


@TRAPS.function("a list that is not made from items")
def list_made_otherwise(x: torch.Tensor) -> Any:
    return Labelled("two", [x, x * 2])


@TRAPS.function("tuples with attributes")
def attributes_of_tuples(x: torch.Tensor) -> Any:
    return _marked(Row((x, 1)), extra=x * 3), {"pair": _marked(MarkedPair(x, 1), extra=x * 4)}


@TRAPS.function("deques and defaultdicts with attributes")
def attributes_of_others(x: torch.Tensor) -> Any:
    groups = _marked(Groups(list), extra=x * 3)
    groups["all"].append(x)
    return _marked(Recent([x, x + 1], 2), extra=x * 3), groups


@TRAPS.function("a result that holds itself")
def holds_itself(x: torch.Tensor) -> Any:
    table, items = Table(first=x), [x]
    table.itself = table  # type: ignore[attr-defined]
    table["items"] = table.others = items  # type: ignore[attr-defined]
    return table, items


@TRAPS.function("results given", inputs=lambda n=3: Call((Results(first=torch.randn(n, 4), third=torch.randn(n, 4)),)))
def results_given(given: Any) -> Any:
    results = Results(**{key: value * 2 for key, value in given.items()})
    results["second"] = given["first"] + given.third
    return results


@TRAPS.function(
    "a dict given that has an attribute",
    inputs=lambda n=3: Call((_marked(Table(first=torch.randn(n, 4)), extra=torch.randn(n, 4)),)),
)
def dict_given(given: Any) -> torch.Tensor:
    return given.extra + given["first"]


@TRAPS.function(
    "a list given that has attributes",
    inputs=lambda n=3: Call((_marked(Items([torch.randn(n, 4)]), extra=torch.randn(n, 4), factor=2),)),
    others={"another factor": lambda: Call((_marked(Items([torch.randn(3, 4)]), extra=torch.randn(3, 4), factor=5),))},
)
def list_given(given: Any) -> torch.Tensor:
    return given.extra * given.factor + given[0]


@TRAPS.function(
    "a defaultdict given that has an attribute",
    inputs=lambda n=3: Call((_marked(Groups(list, all=[torch.randn(n, 4)]), extra=torch.randn(n, 4)),)),
)
def defaultdict_given(given: Any) -> torch.Tensor:
    given["twice"].append(given["all"][0] * 2)
    given.extra = given.extra + 1
    return given.extra + given["twice"][0]


class Cache:
    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = keys


@TRAPS.function("a cache among results")
def cache_among_results(x: torch.Tensor) -> Any:
    return Results(first=x, second=Cache(x * 2), third=Pair(Cache(x + 1), 2))
