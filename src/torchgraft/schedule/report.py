"""What overlaps in a scheduled program: for each call in flight, how far it moved, what runs meanwhile and what stops it.
The program itself says so; the order was made in `plan.py`, and how much work calls are is found by `work.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torchgraft.ir.guards import is_guard
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_of
from torchgraft.results.shown import Tabular
from torchgraft.results.tables import Table, amount, count, seconds_text
from torchgraft.schedule.work import Cost, work_of

if TYPE_CHECKING:
    from torchgraft.codegen.graph_module import GraphModule

# In the metadata of a wait: how many calls its start moved up over, how many it moved down over itself, and what stopped each.
OVERLAP = "overlap"


@dataclass(frozen=True)
class Overlap:
    """One call in flight: over how many calls its start moved up and its wait down, what runs meanwhile, and what stops both.

    `work` is how much runs meanwhile, in the unit of the `Overlaps`; `waited` are the seconds of the wait itself, where it was
    measured.

    >>> call = Overlap("start", "wait", "model.py:3", 2, 1, 4, "guard, a guard", "add, which needs it", 1e6)
    >>> call.hoisted + call.sunk, call.work
    (3, 1000000.0)
    """

    start: str
    wait: str
    where: str
    hoisted: int
    sunk: int
    meanwhile: int
    start_after: str
    wait_before: str
    work: float | None = None
    waited: float | None = None


@dataclass(frozen=True, repr=False)
class Overlaps(Tabular):
    """The calls in flight of a program, in the order in which they are started; `unit` is that of work, if it has one.

    >>> Overlaps(())
    <Overlaps: 0 calls in flight while others run>
    """

    calls: tuple[Overlap, ...]
    unit: str = ""

    def rows(self) -> list[dict[str, Any]]:
        """One row for each call."""
        return [asdict(call) for call in self.calls]

    def headline(self) -> str:
        """How many there are."""
        return f"{count(len(self.calls), 'call')} in flight while others run"

    def _table(self) -> Table:
        columns = ["call", "line", "moved up", "moved down", "runs meanwhile", "starts after", "awaited before"]
        rows = [[call.start, call.where, f"{call.hoisted}", f"{call.sunk}", *self._stops(call)] for call in self.calls]
        if any(call.work is not None for call in self.calls):
            columns.append("work meanwhile")
            for row, call in zip(rows, self.calls, strict=True):
                row.append(self._amount(call.work or 0.0))
        if any(call.waited is not None for call in self.calls):
            columns.append("waited")
            for row, call in zip(rows, self.calls, strict=True):
                row.append(seconds_text(call.waited or 0.0))
        numbers = frozenset(("moved up", "moved down", "runs meanwhile", "work meanwhile", "waited"))
        return Table(self.headline(), tuple(columns), [tuple(row) for row in rows], numbers)

    @staticmethod
    def _stops(call: Overlap) -> list[str]:
        return [count(call.meanwhile, "call"), call.start_after, call.wait_before]

    def _amount(self, work: float) -> str:
        if self.unit == "seconds":
            return seconds_text(work)
        return amount(work, "FLOP") if self.unit else f"{work:g}"


_UNITS = {"flops": "FLOPs", "simulated": "seconds", "measured": "seconds"}


def overlaps(
    program: GraphModule, args: Any = None, kwargs: Mapping[str, Any] | None = None, *, cost: Cost = "measured"
) -> Overlaps:
    """The calls of a scheduled program that are in flight while others run, how far each moved, and what stops it.

    With example inputs also how much work runs meanwhile. `cost` says how that is found: "measured" runs the program, three
    times, and says too how long is still waited; "flops" and "simulated" (on an H200) estimate it without running or asking
    anybody; or a function of a node, which needs no inputs.

    >>> import torch, torchgraft
    >>> program = torchgraft.capture(lambda x: x.to("meta") * 1 + (x @ x).to("meta"), torch.ones(4, 4))
    >>> torchgraft.schedule.PrefetchCopies()(program).changes
    2
    >>> first, second = overlaps(program, torch.ones(4, 4), cost="flops").calls
    >>> first.work, first.start_after, second.wait_before
    (130.0, 'guard, a guard', 'add, which needs it')
    """
    work = None if args is None and kwargs is None and not callable(cost) else work_of(program, cost, args, kwargs)
    nodes = [node for node in program.graph.nodes if node.op not in ("placeholder", "get_attr")]
    place = {node: number for number, node in enumerate(nodes)}
    found: list[tuple[int, Overlap]] = []
    for wait in nodes:
        if OVERLAP not in wait.meta or not wait.args or not isinstance(start := wait.args[0], Node):
            continue
        hoisted, sunk, after, before = wait.meta[OVERLAP]
        between = [node for node in nodes[place[start] + 1 : place[wait]] if not is_guard(node.target)]
        line = source_of(wait)
        call = Overlap(
            *(start.name, wait.name, line.place if line else "", hoisted, sunk, len(between), after, before),
            work=None if work is None else float(sum(map(work, between))),
            waited=work(wait) if work is not None and cost == "measured" else None,
        )
        found.append((place[start], call))
    unit = _UNITS.get(cost, "") if isinstance(cost, str) else ""
    return Overlaps(tuple(call for _, call in sorted(found, key=lambda item: item[0])), unit)
