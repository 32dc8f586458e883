"""What must run before what in a program, beyond the values that nodes hand to one another, and which region is around each.
Effects of single nodes are known to `analysis/effects`; which node goes to which part is decided in `strategies.py`.

A part may be called at another time than its nodes ran, so these orders must hold between parts:
- of two nodes of which one writes memory that the other reads or writes, the first stays first;
- random draws stay in their order, so that a seed means what it meant;
- nothing passes a node that may do anything;
- no write that came after a guard comes before it.
A region (`with torch.no_grad():`) is no node of a part: each part opens it again around the nodes that were in it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from torchgraft.analysis.effects import Effects, effects_of
from torchgraft.analysis.effects.findings import OUTSIDE
from torchgraft.analysis.interference import ANYTHING, Interference
from torchgraft.ir import guards
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node

# What opens a region, and what closes it.
_MARKS = (
    (enter_context, exit_context),
    (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast),
)


_NONE = Effects()


class Order:
    """The calls of one program (guards of computed values among them, the marks of regions not), and what binds their order.

    >>> graph = Graph()
    >>> x = graph.placeholder("x")
    >>> read, write = graph.call_function(torch.sin, (x,)), graph.call_method("add_", (x, 1))
    >>> later = graph.call_function(torch.cos, (x,))
    >>> order = Order(graph)
    >>> order.before(write), order.before(later)
    ([sin], [add_])
    """

    def __init__(
        self,
        graph: Graph,
        open_regions: bool = True,
        known: Mapping[Node, Effects] | None = None,
        guards_in_parts: bool = False,
    ) -> None:
        self.graph = graph
        # What somebody knows better than `effects_of` does.
        self._known = known or {}
        self.nodes = list(graph.nodes)
        # Without opening regions again, their marks are calls like others, and nothing passes them.
        self.exits = _find_regions(self.nodes) if open_regions else {}
        # What only checks inputs and the model's mode is in no part, unless the parts run without the outer program.
        self._checks = dict.fromkeys(node for node in self.nodes if is_guard(node) and _checks_inputs(node))
        self.outer_guards = [] if guards_in_parts else [*self._checks]
        elsewhere = {*self.exits, *self.exits.values(), *self.outer_guards}
        self.calls = [node for node in self.nodes if is_call(node) and node not in elsewhere]
        self._all_calls = set(self.calls)
        self.position = {node: number for number, node in enumerate(self.nodes)}
        self.regions = self._regions_around()

    def before(self, node: Node) -> list[Node]:
        """The calls that must have run before this one: those it takes values from, and those that effects bind it to."""
        return [*dict.fromkeys([*self.values(node), *self._bound_by_effects.get(node, ())])]

    def values(self, node: Node) -> list[Node]:
        """The calls whose values the node needs, those that the regions around it need included."""
        regions = self.regions.get(node, ())
        sources = node.all_input_nodes if not regions else [*node.all_input_nodes, *self.region_inputs(node)]
        return [source for source in sources if is_call(source) and source not in self.exits]

    def region_inputs(self, node: Node) -> list[Node]:
        """What the regions around a node are opened with."""
        return [source for enter in self.regions.get(node, ()) for source in enter.all_input_nodes]

    def why(self, first: Node, second: Node) -> str:
        """Why the first must run before the second, in words."""
        if first in self.values(second):
            return f"needs the value of '{first.name}'"
        return f"must run after '{first.name}', because of what one of them writes, checks or draws"

    # ---- units ----

    @cached_property
    def units(self) -> list[list[Node]]:
        """The calls in groups that belong in one part, in an order in which they can run.

        What only takes a result apart goes with what made it, and a guard goes with the value that it checks, or with the next
        call where it checks inputs or the model's mode.
        """
        units: list[list[Node]] = []
        home: dict[Node, int] = {}
        checks: list[Node] = []
        for node in self.calls:
            if node in self._checks:
                checks.append(node)
                continue
            leader = self._leader(node)
            number = None if leader is None else home[leader]
            group = [node, *checks]
            if number is None or any(home.get(source, 0) > number for one in group for source in self.before(one)):
                number = len(units)
                units.append([])
            units[number] += group
            home.update(dict.fromkeys(group, number))
            checks = []
        if checks:
            units[-1:] = [[*itertools.chain.from_iterable(units[-1:]), *checks]]
        return units

    def _leader(self, node: Node) -> Node | None:
        if is_guard(node):
            sources = self.values(node)
            return max(sources, key=self.position.__getitem__) if sources else None
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
            return None
        takes_apart = node.target is getattr or (node.target is operator.getitem and isinstance(node.args[1], int))
        return node.args[0] if takes_apart and node.args[0] in self._all_calls else None

    # ---- regions ----

    def _regions_around(self) -> dict[Node, tuple[Node, ...]]:
        result: dict[Node, tuple[Node, ...]] = {}
        if not self.exits:
            return result
        closing = set(self.exits.values())
        around: tuple[Node, ...] = ()
        for node in self.nodes:
            if node in self.exits:
                around = (*around, node)
            elif node in closing:
                around = around[:-1]
            elif around and is_call(node):
                result[node] = around
        return result

    # ---- effects ----

    @cached_property
    def _bound_by_effects(self) -> dict[Node, list[Node]]:
        effects = {node: effects_of(node) if node.is_impure() else _NONE for node in self.calls}
        effects.update(self._known)
        if not any(effects.values()):
            return {}
        memory = _Memory(Interference(self.graph, self._known)) if any(map(_writes_memory, effects.values())) else None
        bound: dict[Node, list[Node]] = {}
        barrier: list[Node] = []
        since: list[Node] = []
        guards: list[Node] = []
        draws: list[Node] = []
        for node, effect in effects.items():
            guard, writes = is_guard(node), bool(effect.writes) or effect.unknown
            if writes and not guard and may_do_anything(effect):
                bound[node] = [*barrier, *since]
                barrier, since, guards, draws = [node], [], [], []
                if memory is not None:
                    memory.forget()
                continue
            found = list(barrier)
            if memory is not None:
                found += memory.meet(node, writes and not guard)
            if writes and not guard:
                found += guards
            if effect.random:
                found += draws
                draws = [node]
            if guard:
                guards.append(node)
            since.append(node)
            if found:
                bound[node] = found
        return bound


class _Memory:
    """Who wrote and who read each piece of memory last, while walking through a program."""

    def __init__(self, interference: Interference) -> None:
        self._interference = interference
        self.forget()

    def forget(self) -> None:
        self._writer: dict[Any, Node] = {}
        self._readers: dict[Any, list[Node]] = {}
        # How many of those who may read anything the last writer of a piece comes after, and so whoever comes after it.
        self._behind: dict[Any, int] = {}

    def meet(self, node: Node, writes: bool) -> list[Node]:
        """The earlier nodes that this one must not pass, which is then one of them itself."""
        touched = self._interference.touched([node])
        written = self._interference.written([node]) if writes else set()
        if ANYTHING in touched:
            found = [*self._writer.values()]
        else:
            found = [self._writer[piece] for piece in (*touched, ANYTHING) if piece in self._writer]
        for piece in written:
            found += self._readers.pop(piece, ())
        if ANYTHING in written:
            found += [reader for readers in self._readers.values() for reader in readers]
            found += self._writer.values()
            self.forget()  # whoever comes after this node comes after all of them
        elif written:
            readers = self._readers.get(ANYTHING, [])
            is_behind = ANYTHING in touched or written <= touched
            found += readers[min(self._behind.get(piece, 0) for piece in written) if is_behind else 0 :]
            self._behind.update(dict.fromkeys(written, len(readers)))
        for piece in touched:
            self._readers.setdefault(piece, []).append(node)
        for piece in written:
            self._writer[piece] = node
        return [*dict.fromkeys(earlier for earlier in found if earlier is not node)]


def is_call(node: Node) -> bool:
    """Whether the node computes something."""
    return node.op not in ("placeholder", "get_attr", "output")


def is_guard(node: Node) -> bool:
    """Whether the node only checks that the program runs in the situation it was captured for."""
    return node.op == "call_function" and guards.is_guard(node.target)


def _checks_inputs(node: Node) -> bool:
    return not node._users and not any(map(is_call, node.all_input_nodes))


def is_mark(node: Node) -> bool:
    """Whether the node opens or closes a region."""
    return node.op == "call_function" and any(node.target is mark for pair in _MARKS for mark in pair)


def may_do_anything(effects: Effects) -> bool:
    """Whether a node must not be passed by any other."""
    return effects.unknown or OUTSIDE in effects.writes


def _writes_memory(effects: Effects) -> bool:
    return bool(effects.writes) and not may_do_anything(effects)


def _find_regions(nodes: list[Node]) -> dict[Node, Node]:
    """The mark that closes each region, by the one that opens it; where they are not properly nested, none.

    Marks that are no region are calls like others, and nothing passes them.
    """
    regions: dict[Node, Node] = {}
    open_marks: list[Node] = []
    for node in nodes:
        if node.op != "call_function":
            continue
        for opener, closer in _MARKS:
            if node.target is opener:
                open_marks.append(node)
            elif node.target is closer:
                enter = open_marks.pop() if open_marks else None
                if enter is None or enter.target is not opener or list(enter._users) != [node]:
                    return {}
                regions[enter] = node
    return {} if open_marks else regions
