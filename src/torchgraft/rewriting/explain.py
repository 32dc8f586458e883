"""`explain`: why a pattern was not found, as the nearest miss and what differed there.
Nothing is changed; the search is that of `rewrite`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.modules import has_hooks
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_of
from torchgraft.results.tables import count
from torchgraft.rewriting.found import Found
from torchgraft.rewriting.matching import InternalMatch
from torchgraft.rewriting.meaning_matching import MeaningMatcher, MeaningPattern
from torchgraft.rewriting.pattern import Program, ProgramLike
from torchgraft.rewriting.placement import Placement
from torchgraft.rewriting.rewrite import Where, as_conditions


@dataclass(frozen=True)
class Explanation:
    """How often a pattern occurs, and the nearest miss: the node where it would end, how many of its calls are there (`agreed`
    of `calls`), and what differs."""

    matches: int
    node: str | None
    agreed: int
    calls: int
    reason: str
    where: str

    def __str__(self) -> str:
        times = "once" if self.matches == 1 else f"{self.matches} times" if self.matches else "nowhere"
        text = f"the pattern occurs {times}"
        if not self.reason:
            return text
        if self.node is None:
            return f"{text}: {self.reason}"
        there = f"{self.agreed} of {count(self.calls, 'call')} are there"
        return f"{text}; the nearest miss is at node '{self.node}'{self.where}: {there}, but {self.reason}"


def explain(pattern: ProgramLike, program: GraphModule, *, where: Where | None = None) -> Explanation:
    """Say how often a pattern occurs in a program and what comes nearest to it without being it.

    >>> import torch, torchgraft
    >>> module = torchgraft.symbolic_trace(lambda x: torch.relu(torch.softmax(x, 2)))
    >>> explain(lambda x: torch.relu(x.softmax(1)), module).reason
    "argument 'dim' of 'softmax' is 2, the pattern has 1"
    >>> print(explain(lambda x: torch.cos(x), module))
    the pattern occurs nowhere: nothing in the program calls cos; it calls relu (1), softmax (1)
    """
    subject = Program(program.graph, program)
    compiled = MeaningPattern(Program.of(pattern, "pattern"))
    matcher = MeaningMatcher(compiled, subject)
    matcher.explaining = True
    conditions = as_conditions(where, compiled)
    placement = Placement(program.graph, compiled)
    calls = len(matcher._operation_indices)
    refused: list[tuple[Node, str]] = []

    def counts(match: InternalMatch, region: list[Node]) -> bool:
        before = placement.find(match, region)
        if before is None:
            refused.append((region[-1], _in_the_way(region)))
        elif not all(condition(Found(subject, match)) for condition in conditions):
            refused.append((region[-1], "`where` says no"))
        else:
            placement.accept(region, before)
            return True
        return False

    matches = len(matcher.match(counts))
    if refused:
        node, reason = refused[0]
        return Explanation(matches, node.name, calls, calls, reason, _line(node))
    if matcher.nearest is not None:
        agreed, node, complaint = matcher.nearest
        return Explanation(matches, node.name, agreed, calls, complaint(), _line(node))
    reason = "" if matches else _not_called(matcher, program)
    return Explanation(matches, None, 0, calls, reason, "")


def _in_the_way(region: list[Node]) -> str:
    """Why one place for all of a match cannot be found."""
    first, last = min(region), max(region)
    node = first
    while node is not last:
        node = node.next
        if node.target in (enter_context, exit_context):
            return "a `with` region begins or ends between its nodes"
    inside = set(region)
    if any(user < last for member in region for user in member._users if user not in inside):
        return "one of its results is used before the last of them can be computed, or memory that it touches is written between"
    return "something between its nodes writes memory that they read or write"


def _not_called(matcher: MeaningMatcher, program: GraphModule) -> str:
    sinks = [matcher.calls_of(sink) for sink in matcher.pattern.sinks]
    names = Counter(_call_name(node) for node in program.graph.nodes if node.op.startswith("call_"))
    listed = ", ".join(
        f"{name} ({count})" for name, count in sorted(names.items(), key=lambda item: (-item[1], item[0]))[:8]
    )
    return f"nothing in the program calls {' and '.join(dict.fromkeys(sinks))}; it calls {listed or 'nothing'}"


def _call_name(node: Node) -> str:
    if node.op == "call_module":
        owner = node.graph.owning_module
        if owner is None:
            return str(node.target)
        module = owner.get_submodule(node.target)
        return (
            f"{type(module).__name__} with hooks, which matches nothing" if has_hooks(module) else type(module).__name__
        )
    return str(getattr(node.target, "__name__", node.target))


def _line(node: Node) -> str:
    line = source_of(node)
    return "" if line is None or not line.text else f" ({line.place})"
