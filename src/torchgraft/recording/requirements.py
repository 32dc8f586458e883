"""What must run so that some nodes have their right values: their inputs, and whatever earlier writes, draws or checks for those.
Which nodes are wanted is decided in `selection.py`; what a single node writes is known to `analysis/effects`.
"""

from __future__ import annotations

from typing import Any

from torchgraft.analysis.effects import Effects, effects_of
from torchgraft.analysis.effects.findings import OUTSIDE
from torchgraft.analysis.interference import ANYTHING, Interference
from torchgraft.ir.node import Node


def required_nodes(nodes: list[Node], wanted: list[Node]) -> list[Node]:
    """The nodes of a program to run for the wanted ones, in order; nothing after the last wanted one is among them.

    A value needs its inputs and what writes into memory that it reads. A random number needs the draws before it. Calls whose
    effects reach outside of the program (checks, regions, what cannot be known) always run.

    >>> import torch
    >>> from torchgraft import symbolic_trace
    >>> def f(x):
    ...     y = torch.exp(x)
    ...     z = torch.tanh(y)
    ...     y.neg_()
    ...     return torch.relu(z), torch.abs(y)
    >>> nodes = list(symbolic_trace(f).graph.nodes)
    >>> required_nodes(nodes, [nodes[4]]), required_nodes(nodes, [nodes[5]])
    ([x, exp, tanh, relu], [x, exp, neg_, abs_1])
    """
    if not wanted:
        return []
    asked = set(wanted)
    last = max(position for position, node in enumerate(nodes) if node in asked)
    if nodes[last].op == "output":
        return nodes[: last + 1]  # the result is what everything is there for
    memory = Interference(nodes[0].graph)
    needed: set[Node] = set(asked)
    touched: set[Any] = set()
    draws = False
    for node in reversed(nodes[: last + 1]):
        if node.op in ("placeholder", "get_attr"):
            if node in needed:
                touched |= memory.touched([node])
            continue
        effects = effects_of(node)
        if node not in needed and not _is_noticed(node, effects, memory, touched, draws):
            continue
        needed.add(node)
        needed.update(node.all_input_nodes)
        touched |= memory.touched([node])
        draws = draws or effects.random
    return [node for node in nodes[: last + 1] if node in needed]


def _is_noticed(node: Node, effects: Effects, memory: Interference, touched: set[Any], draws: bool) -> bool:
    """Whether something that runs later would be different without the node."""
    if effects.unknown or OUTSIDE in effects.writes or (effects.random and draws):
        return True
    if not effects.writes or not touched:
        return False
    written = memory.written([node])
    return ANYTHING in written or ANYTHING in touched or not touched.isdisjoint(written)


__all__ = ["required_nodes"]
