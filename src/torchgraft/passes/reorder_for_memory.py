"""Run the nodes of a program in an order that keeps less memory alive at once.
What must stay before what is gathered here from the facts of `analysis/aliases.py`; sizes come from `propagate-shapes`.

Writes, random draws, guards and the ends of regions keep their order among each other, and no node moves before a guard
that stood before it. A new order is taken only if its peak, as reckoned from the shapes, is lower.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torchgraft.analysis.aliases import REGION_ENDS, Aliases
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.answers import ANSWER
from torchgraft.ir.guards import is_guard
from torchgraft.ir.node import Node
from torchgraft.ir.printing import known_value
from torchgraft.passes.definition import Pass


@dataclass(frozen=True)
class ReorderForMemory(Pass):
    """Move nodes so that results are made later and used up earlier, where that lowers the peak.

    >>> import torch, torchgraft
    >>> def function(x):
    ...     a, b = x.repeat(8, 1), x.repeat(9, 1)
    ...     return a.sum() + b.sum()
    >>> program = torchgraft.symbolic_trace(function)
    >>> torchgraft.passes.Pipeline("propagate-shapes, reorder-for-memory")(program, check=torch.ones(4, 4)).passes[1].changes
    1
    >>> [node.name for node in program.graph.nodes]
    ['x', 'repeat', 'sum_1', 'repeat_1', 'sum_2', 'add', 'output']
    """

    def run(self, module: GraphModule) -> int:
        """Reorder, and return how many nodes were moved."""
        moved = 0
        if not _sizes(module):
            return 0
        while True:
            plan = _Plan(module)
            order = plan.better_order()
            if plan.peak(order) >= plan.peak(plan.nodes):
                return moved
            moved += put_in_order(module, order)

    def notes(self, module: GraphModule) -> list[str]:
        """Say so where nothing could be done for want of sizes."""
        return [] if _sizes(module) else ["no shapes are known, so nothing was moved; run propagate-shapes before"]


class _Plan:
    """What is known of one program: the memory each node makes and frees, and what must come before what."""

    def __init__(self, module: GraphModule) -> None:
        self.memory = Aliases(module.graph)
        self.nodes = list(module.graph.nodes)
        memory = self.memory
        self.bytes = _sizes(module)
        # The memory of a class is alive until its last use; every node is one use of what it makes and of what it reads.
        self.touches: dict[Node, list[Any]] = {}
        self.uses: dict[Any, int] = {}
        self.size: dict[Node, int] = {}
        for node in self.nodes:
            places = {memory.class_of(source) for source in node._inputs} | {memory.class_of(node)}
            held = [place for place in places if place not in memory.held_outside]
            self.touches[node] = held
            for place in held:
                self.uses[place] = self.uses.get(place, 0) + 1
            is_new = node._op in ("call_function", "call_method", "call_module") and memory.is_fresh(node)
            self.size[node] = self.bytes.get(node, 0) if is_new else 0

    # ---- how good an order is ----

    def peak(self, order: Iterable[Node]) -> int:
        """The most bytes alive at once."""
        state = _Alive(self)
        for node in order:
            state.run(node)
        return state.most

    # ---- a better order ----

    def better_order(self) -> list[Node]:
        """Each stretch between the ends of regions and unknown calls, in an order of its own."""
        result: list[Node] = []
        state = _Alive(self)
        for stretch in self._stretches():
            result += _Scheduler(self, stretch, state).order()
        return result

    def _stretches(self) -> list[list[Node]]:
        stretches: list[list[Node]] = [[]]
        for node in self.nodes:
            is_wall = (
                node._target in REGION_ENDS if node._op == "call_function" else node._op in ("placeholder", "output")
            )
            if is_wall or self.memory.places_written(node) is None:
                stretches += [[node], []]
            else:
                stretches[-1].append(node)
        return [stretch for stretch in stretches if stretch]

    def constraints(self, stretch: list[Node]) -> dict[Node, list[Node]]:
        """For each node those that must come before it."""
        memory = self.memory
        inside = set(stretch)
        before: dict[Node, list[Node]] = {}
        last_effect: Node | None = None
        last_guard: Node | None = None
        last_write: dict[Any, Node] = {}
        readers: dict[Any, list[Node]] = {}
        has_writes = memory.has_writes
        for node in stretch:
            needed = [source for source in node._inputs if source in inside]
            checks = node._op == "call_function" and is_guard(node._target)
            if last_guard is not None:
                needed.append(last_guard)
            if node in memory.effects or checks:
                if last_effect is not None:
                    needed.append(last_effect)
                last_effect = node
            if checks:
                last_guard = node
            if has_writes:
                written = memory.places_written(node) or set()
                for place in written:
                    needed += readers.pop(place, ())
                for place in memory.places_read(node) | written:
                    if place in last_write:
                        needed.append(last_write[place])
                    readers.setdefault(place, []).append(node)
                last_write.update(dict.fromkeys(written, node))
            before[node] = [other for other in dict.fromkeys(needed) if other is not node]
        return before


class _Alive:
    """What is alive while an order is being made."""

    def __init__(self, plan: _Plan) -> None:
        self.plan = plan
        self.left = dict(plan.uses)
        self.held: dict[Any, int] = {}
        self.bytes = self.most = 0

    def change(self, node: Node) -> int:
        """By how much the memory grows if the node is run now."""
        freed = 0
        size = self.plan.size[node]
        for place in self.plan.touches[node]:
            if self.left[place] == 1:
                freed += self.held.get(place, 0)
        return size - freed

    def run(self, node: Node) -> list[Any]:
        """Run a node; return the classes that have one use left."""
        size = self.plan.size[node]
        if size:
            place = self.plan.memory.class_of(node)
            self.held[place] = self.held.get(place, 0) + size
            self.bytes += size
            self.most = max(self.most, self.bytes)
        nearly = []
        for place in self.plan.touches[node]:
            self.left[place] -= 1
            if self.left[place] == 1:
                nearly.append(place)
            elif not self.left[place]:
                self.bytes -= self.held.pop(place, 0)
        return nearly


class _Scheduler:
    """Runs, of the nodes of one stretch that may run, always the one after which least memory is alive."""

    def __init__(self, plan: _Plan, stretch: list[Node], alive: _Alive) -> None:
        self.plan = plan
        self.stretch = stretch
        self.alive = alive
        before = plan.constraints(stretch)
        # Fetching an attribute costs nothing and is best done where it is needed.
        self.fetches = {node for node in stretch if node._op == "get_attr" and not before[node]}
        self.missing = {node: sum(other not in self.fetches for other in before[node]) for node in stretch}
        self.after: dict[Node, list[Node]] = {}
        for node, others in before.items():
            for other in others:
                self.after.setdefault(other, []).append(node)
        self.waiting_for: dict[Any, set[Node]] = {}
        self.heap: list[tuple[float, int, Node]] = []

    def order(self) -> list[Node]:
        result: list[Node] = []
        done: set[Node] = set()
        for node in self.stretch:
            if node not in self.fetches and not self.missing[node]:
                self._ready(node)
        while self.heap:
            node = heapq.heappop(self.heap)[2]
            if node in done:
                continue
            for source in node._inputs:
                if source in self.fetches and source not in done:
                    done.add(source)
                    self.alive.run(source)
                    result.append(source)
            done.add(node)
            result.append(node)
            for place in self.alive.run(node):
                for other in list(self.waiting_for.get(place, ())):
                    if other not in done:
                        self._push(other)
            for place in self.plan.touches[node]:
                self.waiting_for.get(place, set()).discard(node)
            for other in self.after.get(node, ()):
                self.missing[other] -= 1
                if not self.missing[other] and other not in self.fetches:
                    self._ready(other)
        rest = [node for node in self.stretch if node not in done]
        for node in rest:
            self.alive.run(node)
        return result + rest

    def _ready(self, node: Node) -> None:
        for place in self.plan.touches[node]:
            self.waiting_for.setdefault(place, set()).add(node)
        self._push(node)

    def _push(self, node: Node) -> None:
        heapq.heappush(self.heap, (self.alive.change(node), self.plan.memory.position[node], node))


def _sizes(module: GraphModule) -> dict[Node, int]:
    """The bytes that calls return, where they are known."""
    calls = ("call_function", "call_method", "call_module")
    nodes = [node for node in module.graph.nodes if node._meta is not None and node._op in calls]
    return {node: size for node in nodes if (size := bytes_of_value(node))}


def bytes_of_value(node: Node) -> int:
    """The bytes of the value of a node where its shape is known, else 0."""
    return _bytes_of(known_value(node)) or _bytes_of(node.meta.get(ANSWER))


def _bytes_of(known: Any) -> int:
    if isinstance(known, (tuple, list)) and not hasattr(known, "shape"):
        return sum(map(_bytes_of, known))
    shape, dtype = getattr(known, "shape", None), getattr(known, "dtype", None)
    if shape is None or dtype is None:
        return 0
    return math.prod(map(int, shape)) * dtype.itemsize


def put_in_order(module: GraphModule, order: list[Node]) -> int:
    """Move what does not stand where the order has it; return how many nodes that were."""
    moved = 0
    graph = module.graph
    cursor = graph._root
    for node in order:
        if cursor._next is not node:
            graph._move(node, cursor._next)
            moved += 1
        cursor = node
    return moved
