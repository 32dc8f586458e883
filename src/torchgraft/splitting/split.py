"""`split`: choose the parts of a program, cut it, and say why each node fell where it did.
The ways to choose are in `strategies.py`; parts named by the caller are `split_module.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraphError
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_of
from torchgraft.results.shown import Shown
from torchgraft.results.tables import count
from torchgraft.splitting.assembly import Style, assemble, cut
from torchgraft.splitting.order import Order
from torchgraft.splitting.split_module import new_names
from torchgraft.splitting.strategies import Size, Stages, Supported

Strategy = Supported | Size | Stages


@dataclass(frozen=True)
class Part:
    """One part of a split program. `nodes`, `inputs` and `outputs` are names of nodes in the program that was split."""

    name: str
    module: GraphModule
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    supported: bool | None = None
    cost: float | None = None


@dataclass(frozen=True, repr=False)
class Split(Shown):
    """A program in parts: `module` runs it, `parts` are its pieces in order, `reasons` says for every node why it is there.

    `names` leads from the name of each module and tensor that moved into a part to its name in the program. Printing it
    gives the report.

    >>> import torch, torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: x.relu().tanh())
    >>> result = split(program, torchgraft.Size(nodes=1))
    >>> [name for name, _ in result.module.named_children()]
    ['submod_0', 'submod_1']
    >>> torch.equal(result.module(torch.ones(2)), program(torch.ones(2)))
    True
    """

    module: GraphModule
    parts: tuple[Part, ...]
    reasons: dict[str, str]
    names: dict[str, str]
    _lines: dict[str, str]

    def part_of(self, node: str) -> Part:
        """The part that a node, by its name in the program, fell into."""
        for part in self.parts:
            if node in part.nodes:
                return part
        reason = self.reasons.get(node, "inputs, outputs and fetched attributes are in the outer program")
        raise GraphError(f"no part has a node '{node}': {reason}")

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each part."""
        names = [field.name for field in fields(Part) if field.name != "module"]
        return [{name: getattr(part, name) for name in names} for part in self.parts]

    def text(self, color: bool = False) -> str:
        """The parts, and for every node why it is there."""
        nodes = sum(len(part.nodes) for part in self.parts)
        lines = [f"{count(len(self.parts), 'part')}, {count(nodes, 'node')}"]
        for part in self.parts:
            kind = {None: "", True: ", supported", False: ", not supported"}[part.supported]
            cost = "" if part.cost is None else f", cost {part.cost:g}"
            lines.append(f"{part.name}: {count(len(part.nodes), 'node')}{kind}{cost}")
            lines.append(f"  takes {', '.join(part.inputs) or 'nothing'}; gives {', '.join(part.outputs) or 'nothing'}")
            lines += [f"  {node}: {self.reasons[node]}{self._lines.get(node, '')}" for node in part.nodes]
        lines += [f"weights of '{path}' are shared by {' and '.join(names)}" for path, names in self.shared().items()]
        return "\n".join(lines)

    def shared(self) -> dict[str, list[str]]:
        """The modules that more than one part calls, by their path in the program, and those parts."""
        users: dict[str, list[str]] = {}
        for new, old in self.names.items():
            users.setdefault(old, []).append(new.partition(".")[0])
        return {old: parts for old, parts in users.items() if len(parts) > 1}


def split(program: GraphModule, by: Strategy | Callable[[Node], bool | str], *, min_size: int = 1) -> Split:
    """Cut a program into parts that run one after the other and together compute what it computes.

    `by` is a function that says for a call whether a backend supports it (True, False, or a text that says why not), with
    `min_size` the least number of nodes that are worth a part; or `Supported(...)`, which is the same, `Size(nodes)` or
    `Stages(count, cost)`. The parts can never wait for each other. The program itself is not changed; modules and tensors are
    shared with it.

    >>> import torch, torchgraft
    >>> module = torchgraft.symbolic_trace(lambda x: torch.cos(torch.relu(torch.sin(x))))
    >>> found = split(module, by=lambda node: node.name != "relu" or "no kernel for relu")
    >>> print(found.module.code.strip())
    def forward(self, x):
        submod_0 = self.submod_0(x);  x = None
        submod_1 = self.submod_1(submod_0);  submod_0 = None
        submod_2 = self.submod_2(submod_1);  submod_1 = None
        return submod_2
    >>> found.reasons["relu"], found.part_of("relu").supported
    ("not supported: no kernel for relu; needs the value of 'sin' of the part before", False)
    """
    if not isinstance(program, GraphModule):
        raise GraphError(
            f"cannot split a {type(program).__name__}: give a GraphModule; capture the model first, for example with "
            "symbolic_trace()"
        )
    strategy = by
    if not isinstance(strategy, Supported | Size | Stages):
        if not callable(strategy):
            raise GraphError(
                f"cannot split by {by!r}: give a function from a node to True or False, or one of Supported, Size and Stages"
            )
        strategy = Supported(strategy, min_size)
    order = Order(program.graph, guards_in_parts=isinstance(strategy, Stages))
    plan = strategy.plan(order)
    label_of = {node: number for number, part in enumerate(plan.parts) for node in part}
    pieces = cut(order, label_of, {number: f"submod_{number}" for number in range(len(plan.parts))})
    ordered = [pieces[number] for number in range(len(plan.parts))]
    module = assemble(program, order, ordered, Style(inner_tensors=True, named_after_program=True))
    parts = []
    for number, piece in enumerate(ordered):
        supported = plan.supported[number] if plan.supported else None
        cost = plan.costs[number] if plan.costs else None
        nodes, inputs, outputs = map(_names, (piece.nodes, piece.inputs, piece.outputs))
        parts.append(Part(piece.name, piece.module, nodes, inputs, outputs, supported, cost))
    reasons = {node.name: plan.reasons[node] for node in order.calls}
    reasons |= {node.name: "checks inputs or the model's mode: in the outer program" for node in order.outer_guards}
    for opening, closing in order.exits.items():
        reasons[opening.name] = reasons[closing.name] = "the edge of a region: each part opens it around its own nodes"
    lines = {node.name: text for node in order.calls if (text := _where(node))}
    return Split(module, tuple(parts), reasons, new_names(ordered), lines)


def _names(nodes: Any) -> tuple[str, ...]:
    return tuple([node.name for node in nodes])


def _where(node: Node) -> str:
    """The user's line that a node comes from, as the end of a line of the report."""
    line = source_of(node)
    return "" if line is None else f"  ({line.place})"
