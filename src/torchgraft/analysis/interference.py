"""Whether nodes that change places could notice: one writes memory that the other reads or writes.
What a node writes is known to `analysis/effects`, and whose memory its value shares to `aliases.py`.

Here the pieces of memory of each value are kept apart: a `cat` of two views does not make one class of what they are views of.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from torchgraft.analysis.aliases import Aliases
from torchgraft.analysis.effects import Effects, effects_of, is_impure
from torchgraft.analysis.effects.findings import OUTSIDE
from torchgraft.analysis.effects.state import INPUTS, Places
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node

# A piece of memory is named by the node that made it, by a path of module state, as what lies outside of the program or what
# the caller passed in, or it is any piece at all.
ANYTHING = "<anything>"

# A value that may share more pieces than these is taken to share any; keeps long chains of "perhaps" linear.
_PIECES_TOLD_APART = 64

# More nodes than these are not looked at one by one for a single match; it is taken that one of them would notice.
_LOOKED_AT = 256

Pieces = frozenset[Any] | set[Any]
_NONE = Effects()


class Interference:
    """Answers for one program, whose nodes are numbered from 0."""

    def __init__(self, graph: Graph, known: Mapping[Node, Effects] | None = None) -> None:
        """`known` has what somebody knows better than `effects_of` does: of nodes that write nothing but elements of tensors."""
        self._known = known or {}
        self._nodes = list(graph.nodes)
        self._aliases = Aliases(graph)
        self._effects: dict[Node, Effects] = dict(known or {})

    def between(self, low: int, high: int, region: list[Node]) -> bool:
        """Whether anything at positions low to high (excluded), other than the region, could notice that it moved."""
        is_writer = self.writes(region)
        others = range(low, high) if is_writer else self._writers_between(low, high)
        if len(others) > _LOOKED_AT + len(region):
            return True
        inside = set(region)
        crossed = [node for node in map(self._nodes.__getitem__, others) if node not in inside and _is_call(node)]
        if not crossed:
            return False
        written, touched = self.written(region), self.touched(region)
        return any(_meet(self.written([node]), touched) or _meet(written, self.touched([node])) for node in crossed)

    def writes(self, region: list[Node]) -> bool:
        """Whether the region does more than compute."""
        return any(_is_call(node) and _writes(self._effects_of(node)) for node in region)

    def _writers_between(self, low: int, high: int) -> list[int]:
        start, end = bisect.bisect_left(self._writers, low), bisect.bisect_left(self._writers, high)
        return self._writers[start:end]

    @cached_property
    def _writers(self) -> list[int]:
        return [
            position for position, node in enumerate(self._nodes) if _is_call(node) and _writes(self._effects_of(node))
        ]

    def _effects_of(self, node: Node) -> Effects:
        effects = self._effects.get(node)
        if effects is None:
            effects = self._effects[node] = effects_of(node) if is_impure(node) else _NONE
        return effects

    # ---- pieces of memory ----

    def written(self, nodes: Iterable[Node]) -> Pieces:
        """The pieces that the nodes may write."""
        written: set[Any] = set()
        for node in nodes:
            effects = self._effects_of(node) if _is_call(node) else None
            if effects is None or not _writes(effects):
                continue
            if effects.unknown or OUTSIDE in effects.writes:
                return {ANYTHING}
            for place in effects.writes:
                written |= self._pieces[place] if isinstance(place, Node) else {place}
        return self._joined(written)

    def touched(self, nodes: Iterable[Node]) -> Pieces:
        """The pieces that the nodes may read or write."""
        touched: set[Any] = set()
        for node in nodes:
            touched |= self._pieces[node]
            for source in node.all_input_nodes:
                touched |= self._pieces[source]
            if node.op in ("call_module", "get_attr"):
                touched.add(node.target)
        return self._joined(touched)

    @cached_property
    def _pieces(self) -> dict[Node, Pieces]:
        """For every value, the pieces that it may be or hold."""
        pieces: dict[Node, Pieces] = {}
        for node in self._nodes:
            if node.op in ("placeholder", "output"):
                pieces[node] = {INPUTS}
                continue
            places = self._aliases.shares(node)
            # What is fetched has a name already, its path.
            shared: set[Any] = set() if node.op == "get_attr" and places else {node}
            for place in places:
                shared |= pieces[place] if isinstance(place, Node) else {place}
            too_many = len(shared) > _PIECES_TOLD_APART or ANYTHING in shared
            pieces[node] = frozenset((ANYTHING,)) if too_many else shared
        return pieces

    # ---- pieces that became one ----

    def _joined(self, pieces: Pieces) -> Pieces:
        return {self._places.find(piece) for piece in pieces}

    @cached_property
    def _places(self) -> Places:
        """Pieces that may be or hold one another are one: state under two paths or below a module, contents of a container.

        All of it is joined before anything is looked up.
        """
        places = Places(self._aliases.root)
        for node in self._nodes:
            if node.op in ("placeholder", "output"):
                continue
            effects = self._effects_of(node)
            for place in self._aliases.shares(node) | effects.writes:
                if isinstance(place, str):
                    places.state(place)
            if node.op in ("call_module", "get_attr"):
                places.state(node.target)
            if _writes(effects) and node not in self._known and not self._aliases.writes_only_numbers(node):
                held = [piece for source in node.all_input_nodes for piece in self._pieces[source]]
                for piece in held[1:]:
                    places.join(held[0], piece)
        return places


def _meet(first: Pieces, second: Pieces) -> bool:
    if ANYTHING in first or ANYTHING in second:
        return bool(first) and bool(second)
    return not first.isdisjoint(second)


def _is_call(node: Node) -> bool:
    return node.op not in ("placeholder", "get_attr", "output")


def _writes(effects: Effects) -> bool:
    return bool(effects.writes) or effects.unknown
