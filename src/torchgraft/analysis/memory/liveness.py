"""Liveness: where each value of a program is used last, and until when its memory is needed.
Read off the graph and its aliases alone; how many bytes that are is found by `peak.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchgraft.analysis.effects import effects_of
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node
from torchgraft.results.shown import NamedTexts


@dataclass(frozen=True)
class Lifetime:
    """A value from its making to its end. `last_use` is the node that uses it last (itself where none does);
    `memory_until` is the last one that uses anything that may share its memory.

    >>> import torch, torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: torch.relu(x).t() + 1)
    >>> [_, relu, *_] = liveness(program).values()
    >>> relu.node, relu.last_use, relu.memory_until
    (relu, t, output)
    """

    node: Node
    last_use: Node
    memory_until: Node


class Lifetimes(NamedTexts):
    """The lifetime of every value of a program, by its node."""

    def _text_of(self, value: Lifetime) -> str:
        return f"last used by {value.last_use}, its memory by {value.memory_until}"


def liveness(program: Any) -> Lifetimes:
    """The lifetime of every value of a program or graph, in order.

    >>> import torch, torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: x.t().exp().sqrt())
    >>> [(life.node.name, life.last_use.name, life.memory_until.name) for life in liveness(program).values()][:3]
    [('x', 't', 'exp'), ('t', 'exp', 'exp'), ('exp', 'sqrt', 'sqrt')]
    """
    graph: Graph = program if isinstance(program, Graph) else program.graph
    last: dict[Node, Node] = {}
    for node in graph.nodes:
        last[node] = node
        for source in node._inputs:
            last[source] = node
    until = dict(last)
    # Backwards, so that what a view of a view is used for reaches the memory that both look at.
    for node in reversed(graph.nodes):
        if node._op in ("placeholder", "get_attr", "output"):
            continue
        effects = effects_of(node)
        shared = (
            set(node._inputs) if effects.unknown else {place for place in effects.shares if isinstance(place, Node)}
        )
        for source in shared:
            if until[source] < until[node]:
                until[source] = until[node]
    return Lifetimes({node: Lifetime(node, last[node], until[node]) for node in graph.nodes})
