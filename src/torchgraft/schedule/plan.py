"""The order of a program in which calls that wait are two steps: a start, as early as possible, and a wait, as late as possible.
What must stay before what is known to `splitting/order.py`; the program is edited by the passes of this folder.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from torchgraft.analysis.effects import effects_of
from torchgraft.ir.node import Node
from torchgraft.passes.layer_calls import is_metadata_read
from torchgraft.passes.reorder_for_memory import bytes_of_value
from torchgraft.schedule.blocking import Blocking
from torchgraft.splitting.order import Order, is_guard, is_mark, may_do_anything

# A step of the new order: a node of the program, or one half of a call that is taken apart.
START, WAIT, WHOLE = "start", "wait", "whole"
Step = tuple[str, Node]


@dataclass(frozen=True)
class Limits:
    """How many calls may be under way at once, and how many bytes their results may take."""

    calls: int = 64
    bytes: int | None = None

    def __str__(self) -> str:
        return f"max_in_flight={self.calls}" + ("" if self.bytes is None else f", max_bytes={self.bytes}")


class Plan:
    """What must come before what, and an order: starts and what they need come first, then the rest, and waits last.

    Where calls wait for one another (the key of one is the answer of another, or no more may be under way), the rest is shared
    out, so that there is something to do in each round.
    """

    def __init__(
        self,
        order: Order,
        calls: Mapping[Node, Blocking],
        limits: Limits,
        late: Set[Node] = frozenset(),
        ordered: Set[Node] = frozenset(),
        work: Callable[[], Callable[[Node], float]] = lambda: lambda node: 1.0,
    ) -> None:
        """`late` are calls that only wait, `ordered` those that keep their order; `work` is asked for only where it matters."""
        self._order, self._calls, self._limits, self._late = order, calls, limits, late
        self._ordered = ordered
        self._before: dict[Step, list[Step]] = {}
        self._after: dict[Step, list[Step]] = {}
        self._previous: dict[Step, Step] = {}
        self._bind()
        self._urgent = self._needed_to_start()
        self._rounds = self._count_rounds()
        shared_out = self._rounds > 1
        self._work = work() if shared_out else lambda node: 1.0
        self._share = sum(map(self._weight, self._before)) / self._rounds if shared_out else math.inf
        self._held_back: set[Step] = set()
        self.steps = self._in_order()
        self._place = {step: number for number, step in enumerate(self.steps)}

    def _bind(self) -> None:
        started: Step | None = None
        last: Step | None = None
        guards: list[Step] = []
        for node in self._order.calls:
            before = self._order.before(node)
            needed = [self._end(earlier) for earlier in before if not self._leaves_alone(earlier, node)]
            if node in self._calls:
                if self._calls[node].in_order:
                    if started is not None:
                        needed.append(started)
                        self._previous[START, node] = started
                    started = (START, node)
                self._before[START, node] = [*dict.fromkeys((*needed, *guards))]
                self._before[WAIT, node] = [(START, node)]
                continue
            if node in self._ordered:
                if last is not None:
                    needed.append(last)
                last = (WHOLE, node)
            self._before[WHOLE, node] = [*dict.fromkeys(needed)]
            if is_guard(node):
                guards.append((WHOLE, node))
        for step, earlier in self._before.items():
            for other in earlier:
                self._after.setdefault(other, []).append(step)

    def _leaves_alone(self, earlier: Node, node: Node) -> bool:
        """Whether a collective only writes elements of a tensor of which the node asks for the shape or type."""
        found = self._calls.get(earlier)
        return found is not None and not found.returns_result and is_metadata_read(node)

    def _end(self, node: Node) -> Step:
        return (WAIT, node) if node in self._calls else (WHOLE, node)

    def _needed_to_start(self) -> set[Step]:
        pending = [step for step in self._before if step[0] == START]
        found = set(pending)
        while pending:
            for earlier in self._before[pending.pop()]:
                if earlier not in found:
                    found.add(earlier)
                    pending.append(earlier)
        return found

    def _count_rounds(self) -> int:
        """How often one has to wait before others can be started, and once more."""
        depth: dict[Step, int] = {}
        for step, earlier in self._before.items():  # in the order of the program, so that what comes before is known
            depth[step] = max((depth[other] for other in earlier), default=0) + (step[0] == WAIT)
        longest = max((count for step, count in depth.items() if step[0] == WAIT), default=1)
        return max(longest, math.ceil(len(self._calls) / self._limits.calls), 1)

    def _weight(self, step: Step) -> float:
        return self._work(step[1]) if step[0] == WHOLE else 0.0

    # ---- the order ----

    def _in_order(self) -> list[Step]:
        missing = {step: len(earlier) for step, earlier in self._before.items()}
        position = self._order.position
        queues = _Queues()

        def ready(step: Step) -> None:
            queue = queues.of(step, step in self._urgent, step[1] in self._late)
            heapq.heappush(queue, (position[step[1]], step[0], step))

        for step, count in missing.items():
            if not count:
                ready(step)
        result: list[Step] = []
        flight = _Flight(self._limits)
        while queues.any():
            step = self._next(queues, flight)
            flight.note(step, self._weight(step))
            result.append(step)
            for other in self._after.get(step, ()):
                missing[other] -= 1
                if not missing[other]:
                    ready(other)
        return result

    def _next(self, queues: _Queues, flight: _Flight) -> Step:
        held_back = bool(queues.starts) and not flight.has_room(queues.starts[0][2][1])
        if queues.starts and not held_back:
            return heapq.heappop(queues.starts)[2]
        if queues.needed:
            return heapq.heappop(queues.needed)[2]
        if held_back:
            self._held_back.add(queues.starts[0][2])
        # Whoever makes room, or lets others start, is awaited once it had its share of the work.
        waits = queues.urgent_waits or (queues.waits if held_back else [])
        if waits and (not queues.rest or flight.hidden(waits[0][2][1]) >= self._share):
            if held_back:
                self._held_back.add(waits[0][2])
            return heapq.heappop(waits)[2]
        return heapq.heappop(queues.rest or queues.waits)[2]

    # ---- what became of each call ----

    def distances(self, node: Node) -> tuple[int, int]:
        """How many others the start now comes before that it came after, and the wait after."""
        position, place = self._order.position, self._place
        was, start, wait = position[node], place[START, node], place[WAIT, node]
        hoisted = sum(position[step[1]] < was for step in self.steps[start + 1 :] if step[0] != WAIT)
        sunk = sum(position[step[1]] > was for step in self.steps[:wait] if step[0] != START)
        return hoisted, sunk

    def start_after(self, node: Node) -> tuple[Step | Node | None, str]:
        """What the start could not pass, and why."""
        step = (START, node)
        if step in self._held_back:
            return None, f"others were awaited, because of {self._limits}"
        if not (earlier := self._before[step]):
            guards = self._order.outer_guards
            return (guards[-1], "a guard") if guards else (None, "nothing")
        last = max(earlier, key=self._place.__getitem__)
        if last[1] in self._order.values(node):
            return last, "whose value it needs"
        if self._previous.get(step) == last:
            return last, "which comes first in every process"
        return last, self._binds(last[1], "begins")

    def wait_before(self, node: Node) -> tuple[Step | None, str]:
        """What the wait could not pass, and why."""
        step = (WAIT, node)
        if step in self._held_back:
            return None, f"others start, because of {self._limits}"
        later = self._after.get(step)
        if not later:
            output = self._order.graph.output_node()
            return (WHOLE, output) if node in output.all_input_nodes else None, "which needs it"
        first = min(later, key=self._place.__getitem__)
        if node in self._order.values(first[1]):
            return first, "which needs it"
        return first, self._binds(first[1], "ends")

    @staticmethod
    def _binds(other: Node, where: str) -> str:
        if is_mark(other):
            return f"where a region {where}"
        if is_guard(other):
            return "a guard"
        return "which may do anything" if may_do_anything(effects_of(other)) else "which uses the same memory"


class _Queues:
    """The steps that can be next, each kind in the order of the program."""

    def __init__(self) -> None:
        self.starts: list[tuple[int, str, Step]] = []
        self.needed: list[tuple[int, str, Step]] = []  # by starts
        self.rest: list[tuple[int, str, Step]] = []
        self.urgent_waits: list[tuple[int, str, Step]] = []  # that starts need
        self.waits: list[tuple[int, str, Step]] = []

    def of(self, step: Step, is_urgent: bool, is_late: bool) -> list[tuple[int, str, Step]]:
        """The one for a step."""
        if step[0] == START:
            return self.starts
        if step[0] == WAIT or is_late:
            return self.urgent_waits if is_urgent else self.waits
        return self.needed if is_urgent else self.rest

    def any(self) -> bool:
        """Whether there are more steps."""
        return bool(self.starts or self.needed or self.rest or self.urgent_waits or self.waits)


class _Flight:
    """The calls that are under way, and the work that was done since each was started."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bytes: dict[Node, int] = {}
        self._done = 0.0
        self._done_at_start: dict[Node, float] = {}

    def has_room(self, node: Node) -> bool:
        """Whether one more may be started; one alone always may."""
        limit = self._limits.bytes
        if limit is not None and self._bytes and sum(self._bytes.values()) + bytes_of_value(node) > limit:
            return False
        return len(self._bytes) < self._limits.calls

    def hidden(self, node: Node) -> float:
        """How much was done since this call was started."""
        return self._done - self._done_at_start.get(node, 0.0)

    def note(self, step: Step, work: float) -> None:
        """A step was taken."""
        self._done += work
        if step[0] == START:
            self._bytes[step[1]] = bytes_of_value(step[1])
            self._done_at_start[step[1]] = self._done
        elif step[0] == WAIT:
            del self._bytes[step[1]]
