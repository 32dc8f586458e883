"""Whether nodes that change places could notice: one writes memory that the other reads or writes.
What a single node writes and shares is known to `analysis/effects`; here it is put together for a whole program.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from torchgraft.analysis.effects import Effects, effects_of
from torchgraft.ir.node import Node

_OUTSIDE = "<outside>"

# More nodes than these are not looked at one by one for a single match; it is then taken that one of them would notice.
_LOOKED_AT = 256


class Interference:
    """Answers for one program. Memory is told apart as far as it surely is: everything that may share is one piece."""

    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = nodes
        self._effects: dict[Node, Effects] = {}
        self._parents: dict[Any, Any] = {}

    def between(self, low: int, high: int, region: list[Node]) -> bool:
        """Whether anything at positions low to high (excluded), other than the region, could notice that it moved."""
        writes = self._written(region)
        others = range(low, high) if writes else self._writers_between(low, high)
        if len(others) > _LOOKED_AT + len(region):
            return True
        inside = set(region)
        crossed = [node for node in map(self._nodes.__getitem__, others) if node not in inside and _is_call(node)]
        if _OUTSIDE in writes and crossed:
            return True
        touched = self._touched(region)
        return any(
            not touched.isdisjoint(written) or not writes.isdisjoint(self._touched([node])) or _OUTSIDE in written
            for node in crossed
            for written in (self._written([node]),)
        )

    def writes(self, region: list[Node]) -> bool:
        """Whether the region does more than compute."""
        return any(_is_call(node) and _writes(self._effects_of(node)) for node in region)

    def _writers_between(self, low: int, high: int) -> list[int]:
        start, end = bisect.bisect_left(self._writers, low), bisect.bisect_left(self._writers, high)
        return self._writers[start:end]

    @cached_property
    def _writers(self) -> list[int]:
        return [position for position, node in enumerate(self._nodes) if _is_call(node) and self._is_writer(node)]

    def _is_writer(self, node: Node) -> bool:
        # The quick answer does not remember modules, whose code is long to read.
        return _writes(self._effects_of(node)) if node.op == "call_module" else node.is_impure(impure_random=False)

    def _effects_of(self, node: Node) -> Effects:
        effects = self._effects.get(node)
        if effects is None:
            effects = self._effects[node] = effects_of(node)
        return effects

    # ---- pieces of memory ----

    def _written(self, nodes: Iterable[Node]) -> set[Any]:
        """The pieces of memory that the nodes may write; `_OUTSIDE` stands for any."""
        written: set[Any] = set()
        for node in nodes:
            effects = self._effects_of(node) if _is_call(node) else None
            if effects is None or not _writes(effects):
                continue
            if effects.unknown or _OUTSIDE in effects.writes:
                written.add(_OUTSIDE)
            written.update(map(self._piece, effects.writes))
        return written

    def _touched(self, nodes: Iterable[Node]) -> set[Any]:
        """The pieces of memory that the nodes may read or write."""
        touched: set[Any] = set()
        for node in nodes:
            touched.add(self._piece(node))
            touched.update(map(self._piece, node.all_input_nodes))
            if node.op in ("call_module", "get_attr"):
                touched.add(self._piece(node.target))
        return touched

    def _piece(self, value: Any) -> Any:
        """The piece of memory that a node's value or a path of module state belongs to."""
        parents = self._shared
        while (parent := parents.get(value, value)) != value:
            parents[value] = parents.get(parent, parent)
            value = parent
        return value

    @cached_property
    def _shared(self) -> dict[Any, Any]:
        """A forest over values and paths; what may share memory is in one tree."""
        self.__dict__["_shared"] = {}  # for `_piece`, while the forest grows
        paths: set[str] = set()
        inputs = [node for node in self._nodes if node.op == "placeholder"]
        for node in inputs:  # the caller may give the same tensor twice
            self._join(node, inputs[0])
        for node in self._nodes:
            if node.op in ("placeholder", "output"):
                continue
            effects = self._effects_of(node)
            for place in effects.shares:
                self._join(node, place)
            paths.update(place for place in effects.shares | effects.writes if isinstance(place, str))
            if node.op in ("call_module", "get_attr"):
                paths.add(node.target)
        for path in paths:
            for parent in _parents(path):
                if parent in paths:
                    self._join(path, parent)
        return self.__dict__["_shared"]

    def _join(self, first: Any, second: Any) -> None:
        first, second = self._piece(first), self._piece(second)
        if first != second:
            self.__dict__["_shared"][first] = second


def _is_call(node: Node) -> bool:
    return node.op not in ("placeholder", "get_attr", "output")


def _writes(effects: Effects) -> bool:
    return bool(effects.writes) or effects.unknown


def _parents(path: str) -> Iterable[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path
