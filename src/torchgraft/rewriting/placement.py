"""Where a replacement may stand: after everything it reads, before everything that uses it, and without passing an
effect. Which nodes match is decided in `matching.py`; nothing is edited here.

A replacement runs at one place, the nodes it replaces may have run at several. Whatever stands between those places
and is not replaced must not notice the move; where that cannot be shown, the match is refused.
"""

from __future__ import annotations

import itertools
import math
from functools import cached_property

from torchgraft.analysis.interference import Interference
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node
from torchgraft.rewriting.matching import InternalMatch, nodes_in
from torchgraft.rewriting.pattern import Pattern

# A place in the program. `(5, math.inf)` is node number 5 itself; `(5, 0)`, `(5, 1)`, … are replacements put just
# before it.
Place = tuple[int, float]

_FIRST: Place = (-1, 0)
_LAST: Place = (1 << 62, 0)


class Placement:
    """The places of accepted matches in one program, all thought of as if they were already replaced."""

    def __init__(self, graph: Graph, pattern: Pattern) -> None:
        self._graph = graph
        self._pattern = pattern
        self._moved: dict[Node, Place] = {}
        self._accepted = 0

    @cached_property
    def _nodes(self) -> list[Node]:
        return list(self._graph.nodes)

    @cached_property
    def _positions(self) -> dict[Node, int]:
        return {node: position for position, node in enumerate(self._nodes)}

    @cached_property
    def _interference(self) -> Interference:
        return Interference(self._graph)

    def find(self, match: InternalMatch, region: list[Node]) -> Node | None:
        """The node before which the replacement of `region`, given in the pattern's order, can go; None if there is
        none.
        """
        if self._pattern.is_simple and _is_one_stretch(region):
            return region[-1]
        positions = [self._positions[node] for node in region]
        last = max(positions)
        place = last if self._pattern.is_simple else self._between_inputs_and_users(match, region, positions)
        if place is None:
            return None
        low, high = min(place, *positions), max(place, last)
        is_in_order = positions == sorted(positions)
        is_one_stretch = high - low < len(region)
        if not is_in_order and self._interference.writes(region):
            return None
        if not is_one_stretch and self._interference.between(low, high, region):
            return None
        return self._nodes[place]

    def accept(self, region: list[Node], before: Node) -> None:
        """Remember that `region` is replaced by something just before the node `before`."""
        if not self._pattern.is_simple:
            place = (self._positions[before], self._accepted)
            self._moved.update(dict.fromkeys(region, place))
        self._accepted += 1

    def _place(self, node: Node) -> Place:
        return self._moved.get(node) or (self._positions[node], math.inf)

    def _between_inputs_and_users(self, match: InternalMatch, region: list[Node], positions: list[int]) -> int | None:
        inside = set(region)
        inputs = map(self._place, nodes_in(match.placeholder_nodes))
        returned = (match.nodes_map[node] for node in self._pattern.returned if node.op != "placeholder")
        users = [self._place(user) for node in returned for user in node._users if user not in inside]
        low, high = max(inputs, default=_FIRST), min(users, default=_LAST)
        for position in itertools.chain(sorted(positions, reverse=True), (high[0],)):
            if low < (position, self._accepted) < high:
                return position
        return None


def _is_one_stretch(region: list[Node]) -> bool:
    """Whether the nodes stand side by side in just this order: the common case, decided without numbering the
    program.
    """
    node = region[-1]
    for expected in region[-2::-1]:
        node = node.prev
        if node is not expected:
            return False
    return True
