"""The pass `overlap-remote-calls`: calls that wait become a start, as early as possible, and a wait, as late as possible.
Which calls those are is in `blocking.py`; what must stay before what in `splitting/order.py`; what became of it in `report.py`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchgraft.ir.node import Node
from torchgraft.ir.origin import at, source_of
from torchgraft.passes.definition import Pass
from torchgraft.passes.reorder_for_memory import bytes_of_value, put_in_order
from torchgraft.schedule.blocking import Blocking, find_blocking
from torchgraft.schedule.report import OVERLAP
from torchgraft.splitting.order import Order, is_guard

if TYPE_CHECKING:
    from torchgraft.codegen.graph_module import GraphModule


@dataclass(frozen=True)
class OverlapRemoteCalls(Pass):
    """Start remote calls and collectives as early as possible, wait for them as late as possible, and compute in between.

    What a call needs, writes, reads or must not pass (guards, effects) stays where it was relative to it, and collectives are
    started in their order: results are the same, bit for bit, and every process makes the same collectives in the same order.
    At most `max_in_flight` calls are under way at once, whose results take at most `max_bytes` where shapes are known
    (`propagate-shapes`). What became of each call is said by `torchgraft.schedule.overlaps(program)`.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: x + 1)
    >>> OverlapRemoteCalls()(program).changes
    0
    """

    max_in_flight: int = 64
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.max_in_flight < 1:
            raise ValueError(f"overlap-remote-calls: expected max_in_flight of at least 1, got {self.max_in_flight}")

    def run(self, module: GraphModule) -> int:
        """Take the calls apart and put the program in its new order; return how many calls there were."""
        calls = {node: found for node in module.graph.nodes if (found := find_blocking(node)[0]) is not None}
        if not calls:
            return 0
        order = Order(
            module.graph, open_regions=False, known={node: found.effects(node) for node, found in calls.items()}
        )
        plan = _Plan(order, calls, self)
        steps = plan.steps()
        put_in_order(module, _all_nodes(module, order.outer_guards, _in_two_parts(module, order, calls, steps)))
        return len(calls)

    def notes(self, module: GraphModule) -> list[str]:
        """The calls that wait and could not be taken apart, and why."""
        found = [(node, reason) for node in module.graph.nodes if (reason := find_blocking(node)[1])]
        return [f"{node.name} stays as it is{at(source_of(node))}: {reason}" for node, reason in found]


# A step of the new order: a node of the program, or the half of one that is taken apart.
_START, _WAIT, _WHOLE = "start", "wait", "whole"
_Step = tuple[str, Node]


class _Plan:
    """What must come before what, and an order in which starts and what they need come first, and waits last."""

    def __init__(self, order: Order, calls: dict[Node, Blocking], limits: OverlapRemoteCalls) -> None:
        self._order, self._calls, self._limits = order, calls, limits
        self._before: dict[_Step, list[_Step]] = {}
        started: _Step | None = None
        guards: list[_Step] = []
        for node in order.calls:
            needed = [self._end(earlier) for earlier in order.before(node)]
            if node not in calls:
                self._before[_WHOLE, node] = needed
                if is_guard(node):
                    guards.append((_WHOLE, node))
                continue
            if calls[node].in_order and started is not None:
                needed.append(started)
            self._before[_START, node] = [*needed, *guards]
            self._before[_WAIT, node] = [(_START, node)]
            if calls[node].in_order:
                started = (_START, node)

    def _end(self, node: Node) -> _Step:
        return (_WAIT, node) if node in self._calls else (_WHOLE, node)

    def steps(self) -> list[_Step]:
        """The new order."""
        after: dict[_Step, list[_Step]] = {}
        missing: dict[_Step, int] = {}
        for step, earlier in self._before.items():
            unique = dict.fromkeys(earlier)
            missing[step] = len(unique)
            for other in unique:
                after.setdefault(other, []).append(step)
        urgent = self._needed_to_start()
        position = self._order.position
        # Three queues: starts and what they need; the rest; waits. Each in the order of the program.
        queues: list[list[tuple[int, str, _Step]]] = [[], [], []]

        def ready(step: _Step) -> None:
            queue = 2 if step[0] == _WAIT else 0 if step in urgent else 1
            heapq.heappush(queues[queue], (position[step[1]], step[0], step))

        for step, count in missing.items():
            if not count:
                ready(step)
        result: list[_Step] = []
        flight = _Flight(self._limits)
        while any(queues):
            step = self._next(queues, flight)
            flight.note(step)
            result.append(step)
            for other in after.get(step, ()):
                missing[other] -= 1
                if not missing[other]:
                    ready(other)
        return result

    def _next(self, queues: list[list[tuple[int, str, _Step]]], flight: _Flight) -> _Step:
        first, rest, waits = queues
        if first and (first[0][2][0] != _START or flight.has_room(first[0][2][1])):
            return heapq.heappop(first)[2]
        return heapq.heappop(rest or waits or first)[2]

    def _needed_to_start(self) -> set[_Step]:
        pending = [step for step in self._before if step[0] == _START]
        found = set(pending)
        while pending:
            for earlier in self._before[pending.pop()]:
                if earlier not in found:
                    found.add(earlier)
                    pending.append(earlier)
        return found


class _Flight:
    """The calls that are under way."""

    def __init__(self, limits: OverlapRemoteCalls) -> None:
        self._limits = limits
        self._bytes: dict[Node, int] = {}

    def has_room(self, node: Node) -> bool:
        limit = self._limits.max_bytes
        if limit is not None and self._bytes and sum(self._bytes.values()) + bytes_of_value(node) > limit:
            return False
        return len(self._bytes) < self._limits.max_in_flight

    def note(self, step: _Step) -> None:
        if step[0] == _START:
            self._bytes[step[1]] = bytes_of_value(step[1])
        elif step[0] == _WAIT:
            del self._bytes[step[1]]


def _in_two_parts(module: GraphModule, order: Order, calls: dict[Node, Blocking], steps: list[_Step]) -> list[Node]:
    """Put the two calls in the place of each, and return the calls of the program in the new order."""
    nodes = {step: step[1] for step in steps}
    moved = _distances(order, steps)
    graph = module.graph
    for node, found in calls.items():
        with graph.inserting_before(node):
            start = graph.create_node("call_function", found.start, node.args, {**node.kwargs, **dict(found.options)})
            wait = graph.create_node("call_function", found.wait, (start,))
        start._origin = wait._origin = node._origin
        wait.meta.update(node.meta)
        wait.meta[OVERLAP] = moved[node]
        nodes[_START, node], nodes[_WAIT, node] = start, wait
        node.replace_all_uses_with(wait)
        graph.erase_node(node)
    return [nodes[step] for step in steps]


def _distances(order: Order, steps: list[_Step]) -> dict[Node, tuple[int, int]]:
    """For each call that is taken apart, how many others its start now comes before that it came after, and its wait after."""
    place = {step: number for number, step in enumerate(steps)}
    position = order.position
    others = [(position[node], place[half, node], half) for half, node in steps]
    result = {}
    for half, node in steps:
        if half == _START:
            was, start, wait = position[node], place[_START, node], place[_WAIT, node]
            hoisted = sum(old < was and new > start for old, new, other in others if other != _WAIT)
            sunk = sum(old > was and new < wait for old, new, other in others if other != _START)
            result[node] = (hoisted, sunk)
    return result


def _all_nodes(module: GraphModule, first: list[Node], calls: list[Node]) -> list[Node]:
    """The whole program in the order of its calls; an attribute is fetched where it is first needed."""
    nodes = list(module.graph.nodes)
    result = [node for node in nodes if node.op == "placeholder"]
    done = set(result)
    for node in (*first, *calls, *[node for node in nodes if node.op in ("get_attr", "output")]):
        for needed in (*node.all_input_nodes, node):
            if needed not in done:
                done.add(needed)
                result.append(needed)
    return result
