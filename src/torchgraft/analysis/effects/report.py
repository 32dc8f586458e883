"""`effects`: for every node of a program what it may read, write, share memory with and draw, and what is unknown.
One node is answered by `nodes.py`; here the answers are put together, and followed through views of views.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from torchgraft.analysis.effects.calls import submodule
from torchgraft.analysis.effects.findings import OUTSIDE, Effects
from torchgraft.analysis.effects.nodes import effects_of
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node
from torchgraft.ir.printing import target_text
from torchgraft.results.shown import Tabular, entry_of
from torchgraft.results.tables import Table, count, listed


@dataclass(frozen=True)
class NodeEffects:
    """What one node may do, by names: of other nodes, of module state (`self.bn.running_mean`), or `<outside>`.

    `aliases` is what the result may share memory with, `memory` the same followed to where that memory came from: inputs,
    module state, and the nodes that made it. An unknown node may do anything; `reasons` says why.
    """

    name: str
    op: str
    target: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    aliases: tuple[str, ...]
    memory: tuple[str, ...]
    random: bool
    unknown: bool
    reasons: tuple[str, ...]

    @property
    def is_pure(self) -> bool:
        """Whether it does nothing but return a value."""
        return not (self.writes or self.random or self.unknown)


@dataclass(frozen=True, repr=False)
class ProgramEffects(Tabular):
    """The effects of every node of a program, in order.

    >>> import torch, torchgraft
    >>> effects = torchgraft.effects(torchgraft.symbolic_trace(lambda x: torch.rand_like(x).add_(1)))
    >>> effects.random, effects.writes
    (['rand_like'], {'add_': ('rand_like',)})
    """

    nodes: tuple[NodeEffects, ...]

    def __getitem__(self, node: Any) -> NodeEffects:
        """The effects of a node, given itself or by its name."""
        return entry_of(self.nodes, node, "this program")

    @property
    def writes(self) -> dict[str, tuple[str, ...]]:
        """The nodes that write, and what."""
        return {entry.name: entry.writes for entry in self.nodes if entry.writes}

    @property
    def random(self) -> list[str]:
        """The nodes that draw random numbers."""
        return [entry.name for entry in self.nodes if entry.random]

    @property
    def unknown(self) -> dict[str, tuple[str, ...]]:
        """The nodes that may do anything, and why that is not known better."""
        return {entry.name: entry.reasons for entry in self.nodes if entry.unknown}

    def may_alias(self, first: Any, second: Any) -> bool:
        """Whether the values of two nodes may share memory."""
        one, other = self[first], self[second]
        outside = OUTSIDE in one.memory or OUTSIDE in other.memory
        return one.name == other.name or outside or not set(one.memory).isdisjoint(other.memory)

    def headline(self) -> str:
        counts = f"{len(self.writes)} write, {len(self.random)} draw random numbers, {len(self.unknown)} unknown"
        return f"{count(len(self.nodes), 'node')}, {counts}"

    def rows(self) -> list[dict[str, Any]]:
        """A row of plain values for each node."""
        return [asdict(entry) for entry in self.nodes]

    def _table(self) -> Table:
        rows: list[tuple[str, ...]] = []
        for entry in self.nodes:
            marks = [mark for mark, holds in (("random", entry.random), ("UNKNOWN", entry.unknown)) if holds]
            lists = (entry.reads, entry.writes, entry.aliases)
            rows.append((entry.name, *[listed(names, 2) or "-" for names in lists], " ".join(marks)))
        unknown = [f"{name} is unknown: {'; '.join(reasons)}" for name, reasons in self.unknown.items()]
        return Table("", ("node", "reads", "writes", "aliases", ""), rows, footer="\n".join(unknown))


# A value that may share memory with more places than these may share it with anything; keeps long chains of "perhaps" linear.
_TOLD_APART = 64


def effects(program: Any) -> ProgramEffects:
    """What every node of a program or graph may do beyond returning a value; nothing is run.

    >>> import torchgraft
    >>> print(effects(torchgraft.symbolic_trace(lambda x: torch.rand_like(x.t().mul_(2)))))
    node       reads  writes  aliases
    x          -      -       -
    t          x      -       x
    mul_       t      t       t
    rand_like  mul_   -       -        random
    output     rand_like  -  rand_like
    """
    graph: Graph = program if isinstance(program, Graph) else program.graph
    roots: dict[Node, frozenset[str]] = {}
    entries = []
    for node in graph.nodes:
        found = _of(node)
        origins = _origins(node, found, roots)
        roots[node] = origins
        entries.append(
            NodeEffects(
                node.name,
                node.op,
                target_text(node.target),
                _names(_reads(node)),
                _names(found.writes),
                _names(found.shares),
                tuple(sorted(origins)),
                found.random,
                found.unknown,
                found.reasons,
            )
        )
    return ProgramEffects(tuple(entries))


def _of(node: Node) -> Effects:
    if node._op == "placeholder":
        return Effects()
    if node._op == "output":
        return Effects(shares=frozenset(node._inputs))
    return effects_of(node)


def _reads(node: Node) -> list[Any]:
    """The values that a node takes, and the state of the module that it calls."""
    state: list[Any] = []
    if node._op == "call_module":
        module = submodule(node.graph.owning_module, node._target)
        if module is None:
            return [*node._inputs, OUTSIDE]
        tensors: list[tuple[str, torch.Tensor]] = [*module.named_parameters(), *module.named_buffers()]
        state = [f"{node._target}.{name}" for name, _ in tensors]
    return [*node._inputs, *state]


def _origins(node: Node, found: Effects, roots: dict[Node, frozenset[str]]) -> frozenset[str]:
    """Where the memory of a value came from; itself, where it may be new."""
    if node._op == "get_attr":
        return frozenset((_name(node._target),))
    shared: set[str] = {node.name} if node._op != "output" else set()
    places = {*found.shares, *(node._inputs if found.unknown else ())}
    for place in places:
        shared |= roots[place] if isinstance(place, Node) else {_name(place)}
    if found.unknown:
        shared.add(OUTSIDE)
    return frozenset(shared) if len(shared) <= _TOLD_APART else frozenset((OUTSIDE,))


def _names(places: Any) -> tuple[str, ...]:
    ordered = list(dict.fromkeys(map(_name, places)))
    return tuple(sorted(ordered)) if isinstance(places, frozenset) else tuple(ordered)


def _name(place: Any) -> str:
    if isinstance(place, Node):
        return place.name
    return place if place == OUTSIDE else f"self.{place}"
