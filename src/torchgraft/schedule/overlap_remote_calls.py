"""The pass `overlap-remote-calls`: calls that wait become a start, as early as possible, and a wait, as late as possible.
Which calls those are is in `blocking.py`; the new order is made in `plan.py`; what became of it is told by `report.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchgraft.analysis.effects.findings import Effects
from torchgraft.ir.answers import ANSWER
from torchgraft.ir.copying import inherit_origin
from torchgraft.ir.node import Node
from torchgraft.ir.origin import at, source_of
from torchgraft.passes.definition import Pass
from torchgraft.passes.reorder_for_memory import put_in_order
from torchgraft.schedule.blocking import Blocking, find_blocking, half_calls
from torchgraft.schedule.plan import START, WAIT, Limits, Plan, Step
from torchgraft.schedule.report import OVERLAP
from torchgraft.schedule.work import work_of
from torchgraft.splitting.order import Order

if TYPE_CHECKING:
    from torchgraft.codegen.graph_module import GraphModule


@dataclass(frozen=True)
class OverlapRemoteCalls(Pass):
    """Start remote calls and collectives as early as possible, wait for them as late as possible, and compute in between.

    What a call needs, writes, reads or must not pass (guards, effects, regions) stays where it was relative to it, and
    collectives are started in their order: results are the same, bit for bit, and so is the order of collectives everywhere.
    At most `max_in_flight` calls are under way at once, whose results take at most `max_bytes`, as far as their shapes are known.
    Where calls have to wait for one another, other work is shared out among the waits: by its FLOPs on `inputs` (example
    inputs, which `Pipeline` gives), else by the number of calls. What became of each is said by `torchgraft.schedule.overlaps`.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: x + 1)
    >>> OverlapRemoteCalls()(program).changes
    0
    """

    max_in_flight: int = 64
    max_bytes: int | None = None
    inputs: Any = ""

    def __post_init__(self) -> None:
        check_limit(self)

    def with_example(self, args: tuple[Any, ...]) -> Pass:
        """The same with these inputs to estimate work by, unless it has its own."""
        return self if self.inputs != "" else dataclasses.replace(self, inputs=args)

    def run(self, module: GraphModule) -> int:
        """Take the calls apart and put the program in its new order; return how many calls there were."""
        calls = {node: found for node in module.graph.nodes if (found := find_blocking(node)[0]) is not None}
        take_apart(module, calls, Limits(self.max_in_flight, self.max_bytes), self.inputs)
        return len(calls)

    def notes(self, module: GraphModule) -> list[str]:
        """The calls that wait and could not be taken apart, and why."""
        found = [(node, reason) for node in module.graph.nodes if (reason := find_blocking(node)[1])]
        return [f"{node.name} stays as it is{at(source_of(node))}: {reason}" for node, reason in found]


def check_limit(step: Any) -> None:
    """Refuse limits under which nothing could be started."""
    if step.max_in_flight < 1:
        raise ValueError(f"{step.name}: expected max_in_flight of at least 1, got {step.max_in_flight}")
    if step.max_bytes is not None and step.max_bytes < 0:
        raise ValueError(f"{step.name}: expected max_bytes of at least 0, got {step.max_bytes}")


def take_apart(module: GraphModule, calls: Mapping[Node, Blocking], limits: Limits, inputs: Any = "") -> None:
    """Put a start and a wait in the place of each call, and the program in an order in which other work is in between."""
    if not calls:
        return
    halves = half_calls(module.graph)
    known = {node: Effects(shares=frozenset(node.all_input_nodes)) for node in halves}
    known.update({node: found.effects(node) for node, found in calls.items()})
    order = Order(module.graph, open_regions=False, known=known)
    # What a pass took apart before keeps its order, because of the limits of then.
    done = [node for node in module.graph.nodes if OVERLAP in node.meta and node not in calls]
    late = {*done, *[node for node, is_wait in halves.items() if is_wait]}
    ordered = {*done, *[node.args[0] for node in done if node.args and isinstance(node.args[0], Node)]}
    plan = Plan(order, calls, limits, late, ordered, lambda: _estimate(module, inputs))
    put_in_order(module, _all_nodes(module, order.outer_guards, _in_two_parts(module, calls, plan)))


def _estimate(module: GraphModule, inputs: Any) -> Callable[[Node], float]:
    if inputs != "":
        try:
            return work_of(module, "flops", inputs, None)
        except Exception:  # whatever a program can raise without data; only how evenly work is shared out depends on it
            pass
    return lambda node: 1.0


def _in_two_parts(module: GraphModule, calls: Mapping[Node, Blocking], plan: Plan) -> list[Node]:
    """Put the two calls in the place of each, and return the calls of the program in the new order."""
    nodes = {step: step[1] for step in plan.steps}
    graph = module.graph
    became = {node: (plan.distances(node), plan.start_after(node), plan.wait_before(node)) for node in calls}
    for node, found in calls.items():
        with graph.inserting_before(node):
            start = graph.create_node("call_function", found.start, node.args, {**node.kwargs, **dict(found.options)})
            wait = graph.create_node("call_function", found.wait, (start,))
        inherit_origin(start, node)
        inherit_origin(wait, node)
        wait.meta.update(node.meta)
        if ANSWER in node.meta or not found.returns_result:
            start.meta[ANSWER] = None  # without data there is nobody to ask, and nothing to wait for
        nodes[START, node], nodes[WAIT, node] = start, wait
        node.replace_all_uses_with(wait)
        graph.erase_node(node)

    def text(stop: tuple[Step | Node | None, str]) -> str:
        other, reason = stop
        if other is None:
            return reason
        return f"{(nodes.get(other, other[1]) if isinstance(other, tuple) else other).name}, {reason}"

    for node, (distances, after, before) in became.items():
        nodes[WAIT, node].meta[OVERLAP] = (*distances, text(after), text(before))
    return [nodes[step] for step in plan.steps]


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
