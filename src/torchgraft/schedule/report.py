"""What overlaps in a scheduled program: for each call in flight, what runs meanwhile and what stops it from being longer.
The program itself says so; the pass that made it is in `overlap_remote_calls.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torchgraft.codegen.calling import example_inputs
from torchgraft.interpreter import Interpreter
from torchgraft.ir.guards import is_guard
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_of
from torchgraft.results.shown import Tabular
from torchgraft.results.tables import Table, count

if TYPE_CHECKING:
    from torchgraft.codegen.graph_module import GraphModule

# In the metadata of a wait: how many calls its start moved up over, and how many it moved down over itself.
OVERLAP = "overlap"


@dataclass(frozen=True)
class Overlap:
    """One call in flight: over how many calls its start moved up and its wait down, what runs meanwhile, and what stops both.

    `seconds` is the time of what runs meanwhile, and `waited` that of the wait itself, where the program was run to see.
    """

    start: str
    wait: str
    where: str
    hoisted: int
    sunk: int
    meanwhile: int
    start_after: str
    wait_before: str
    seconds: float | None = None
    waited: float | None = None


@dataclass(frozen=True, repr=False)
class Overlaps(Tabular):
    """The calls in flight of a program, in the order in which they are started."""

    calls: tuple[Overlap, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row for each call."""
        return [asdict(call) for call in self.calls]

    def headline(self) -> str:
        """How many there are."""
        return f"{count(len(self.calls), 'call')} in flight while others run"

    def _table(self) -> Table:
        columns = ("call", "line", "moved up", "moved down", "runs meanwhile", "starts after", "awaited before")
        timed = any(call.seconds is not None for call in self.calls)
        cells = [self._cells(call, timed) for call in self.calls]
        numbers = frozenset(("moved up", "moved down", "runs meanwhile", "work meanwhile", "waited"))
        return Table(self.headline(), (*columns, *(("work meanwhile", "waited") if timed else ())), cells, numbers)

    @staticmethod
    def _cells(call: Overlap, timed: bool) -> tuple[str, ...]:
        times = [f"{(value or 0.0) * 1e3:.3f} ms" for value in (call.seconds, call.waited)] if timed else []
        moved = (f"{call.hoisted}", f"{call.sunk}", count(call.meanwhile, "call"))
        return (call.start, call.where, *moved, call.start_after, call.wait_before, *times)


def overlaps(program: GraphModule, args: Any = None, kwargs: Mapping[str, Any] | None = None) -> Overlaps:
    """The calls of a scheduled program that are in flight while others run, and what stops each from being so for longer.

    With example inputs the program is run, three times, to say how much work that is and how long is still waited.
    """
    nodes = [node for node in program.graph.nodes if node.op not in ("placeholder", "get_attr")]
    times = {} if args is None and kwargs is None else node_times(program, args, kwargs)
    place = {node: number for number, node in enumerate(nodes)}
    found = []
    for wait in nodes:
        if OVERLAP not in wait.meta or not wait.args or not isinstance(start := wait.args[0], Node):
            continue
        hoisted, sunk = wait.meta[OVERLAP]
        between = [node for node in nodes[place[start] + 1 : place[wait]] if not _is_guard(node)]
        line = source_of(wait)
        seconds = sum(times[node] for node in between) if times else None
        found.append(
            Overlap(
                *(start.name, wait.name, line.place if line else "", hoisted, sunk, len(between)),
                *(_start_after(start, nodes[: place[start]]), _wait_before(wait, start, nodes[place[wait] + 1 :])),
                *(seconds, times.get(wait)),
            )
        )
    return Overlaps(tuple(sorted(found, key=lambda call: [node.name for node in nodes].index(call.start))))


def _start_after(start: Node, earlier: list[Node]) -> str:
    needed = set(start.all_input_nodes)
    for node in reversed(earlier):
        if node in needed:
            return f"{node.name}, whose value it needs"
        if _is_guard(node):
            return f"{node.name}, a guard"
    return "nothing"


def _wait_before(wait: Node, start: Node, later: list[Node]) -> str:
    touched = {wait, *start.all_input_nodes}
    for node in later:
        if not touched.isdisjoint(node.all_input_nodes):
            return f"{node.name}, which needs it"
    return "the end"


def _is_guard(node: Node) -> bool:
    return node.op == "call_function" and is_guard(node.target)


class _Timed(Interpreter):
    """Runs a program and takes the time of every node."""

    def __init__(self, program: GraphModule) -> None:
        super().__init__(program)
        self.times: dict[Node, float] = {}

    def run_node(self, node: Node) -> Any:
        """Run one node between two looks at the clock."""
        begin = time.perf_counter()
        try:
            return super().run_node(node)
        finally:
            self.times[node] = time.perf_counter() - begin


def node_times(program: GraphModule, args: Any, kwargs: Mapping[str, Any] | None) -> dict[Node, float]:
    """The time of every node, in seconds: the least of three runs."""
    values, keywords = example_inputs(args, kwargs)
    runs = []
    for _ in range(3):
        timed = _Timed(program)
        timed.run(*values, **keywords)
        runs.append(timed.times)
    return {node: min(times[node] for times in runs) for node in runs[0]}
