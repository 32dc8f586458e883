"""How much work each call of a program is: counted, simulated, or measured here.
Who balances or overlaps by it is elsewhere; what operators cost is known to `analysis/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from torchgraft.analysis.cost import cost as cost_of
from torchgraft.analysis.dry_run import computing_if_needed
from torchgraft.analysis.simulate import simulate
from torchgraft.capturing.state.model_state import kept_state
from torchgraft.codegen.calling import copied_inputs, example_inputs, placeholder_values
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraphError
from torchgraft.interpreter import Interpreter
from torchgraft.ir.node import Node

Cost = str | Callable[[Node], float]


def work_of(program: GraphModule, cost: Cost, args: Any, kwargs: Mapping[str, Any] | None) -> Callable[[Node], float]:
    """The work of a node: "flops", "simulated" (seconds on an H200), "measured" (seconds here), or a function of a node.

    >>> import torch, torchgraft
    >>> program = torchgraft.capture(lambda x: x @ x, torch.ones(4, 4))
    >>> work_of(program, "flops", torch.ones(4, 4), None)(program.graph.output_node().args[0])
    129.0
    """
    if callable(cost):
        return cost
    values, keywords = example_inputs(args, kwargs)
    if cost == "flops":
        found = computing_if_needed(lambda compute: cost_of(program, values, keywords, backward=False, compute=compute))
        # One for the call itself, so that what has no arithmetic is not free.
        flops = {item.name: float(item.forward.flops) for item in found.nodes}
        return lambda node: 1.0 + flops.get(node.name, 0.0)
    if cost == "simulated":
        seconds = {item.name: item.seconds for item in simulate(program, values, keywords, mode="graph").nodes}
        return lambda node: seconds.get(node.name, 0.0)
    if cost == "measured":
        times = _node_times(program, values, keywords)
        return lambda node: times.get(node, 0.0)
    raise GraphError(f"no cost is called {cost!r}; use 'flops', 'simulated', 'measured' or a function of a node")


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


def _node_times(program: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Node, float]:
    """The time of every node, in seconds: the least of three runs, which leave everything as it was."""
    given = placeholder_values(program, args, kwargs)
    runs = []
    with kept_state(program):
        for _ in range(3):
            timed = _Timed(program)
            values, _ = copied_inputs(tuple(given.values()), {})
            timed.run(initial_env=dict(zip(given, values, strict=True)), enable_io_processing=False)
            runs.append(timed.times)
    return {node: min(times[node] for times in runs) for node in runs[0]}
