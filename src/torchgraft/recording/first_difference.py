"""Which node of a wrong program is the first to differ from the model. The model is captured once more, in the situation in
which the program was wrong, and the two programs are compared node by node as `compare` does; whether the program is wrong at
all is decided in `verify.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchgraft.analysis.comparison import Tolerance
from torchgraft.capturing.program import capture
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import one_line
from torchgraft.ir.guards import is_guard
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_of
from torchgraft.recording.program_comparison import ProgramComparison, Run, compared, run_both
from torchgraft.recording.situations import Situation


@dataclass(frozen=True)
class FirstDifference:
    """Where a program leaves the model: the node (None if the program lacks a call), what is different, and the user's line."""

    node: str | None
    text: str
    line: str

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        return f"node '{self.node}'{where}: {self.text}" if self.node else f"no node differs, but {self.text}{where}"


def first_difference(
    model: Callable[..., Any],
    program: GraphModule,
    situation: Situation,
    seed: int,
    tolerance: Tolerance,
    returns_others: bool,
) -> FirstDifference | None:
    """Find it by capturing the model and running both programs; `returns_others` says that the results are among what differs.

    None where the model cannot be captured, or where a capture of it is as wrong as the program.
    """
    level = "module" if any(node.op == "call_module" for node in program.graph.nodes) else "function"
    try:
        reference = capture(model, *situation.copied(), level=level)
    except Exception:  # a model may raise anything, and what is wrong has been said already
        return None
    first, second = run_both([reference, program], situation, seed)
    if second.error is not None:
        return _raised(second, program)
    comparison = compared(first.recording, second.recording, tolerance)
    output = program.graph.output_node()
    found = _different_value(comparison, reference, program) or _added_input(comparison, output)
    return found or (_at_node(output, _ANOTHER_RESULT) if returns_others else _missing_call(comparison, reference))


_ANOTHER_RESULT = "every value is the model's, but the program returns others"


def _missing_call(comparison: ProgramComparison, reference: GraphModule) -> FirstDifference | None:
    """A call of the model that the program does not make, which left a trace outside of the values."""
    for node in reference.graph.nodes:
        is_missing = node.name in comparison.only_first and node.op.startswith("call_")
        if is_missing and node.is_impure() and not is_guard(node.target):
            return FirstDifference(None, f"the program lacks the call '{node.name}' ({_called(node)})", _line(node))
    return None


def _raised(run: Run, program: GraphModule) -> FirstDifference | None:
    error = run.error.__cause__ if run.error is not None else None
    node = next((node for node in program.graph.nodes if node.name not in run.recording.entries), None)
    if node is None or error is None:
        return None
    return _at_node(node, f"raises {one_line(error)}")


def _different_value(
    comparison: ProgramComparison, reference: GraphModule, program: GraphModule
) -> FirstDifference | None:
    """The first pair with different values, or what leads there: a node that only the program has, or one that writes."""
    pair = comparison.first_difference
    if pair is None:
        return None
    node, theirs = _named(program, pair.second), _named(reference, pair.first)
    added = _added_input(comparison, node)
    if added is not None:
        return added
    if node.op == "output":
        return _at_node(node, _ANOTHER_RESULT)
    writer = node.prev
    while writer.op not in ("placeholder", "root"):
        if not writer._users and writer.is_impure() and set(writer.all_input_nodes) & {*node.all_input_nodes}:
            return _at_node(writer, f"leaves other values than in the model, which '{node.name}' reads")
        writer = writer.prev
    apart = "" if pair.measures is None else f", max abs {pair.measures.max_abs:.4g}"
    instead = "" if _called(theirs) == _called(node) else f"; the model makes the call {_called(theirs)} there"
    return _at_node(node, f"has other values than in the model{apart}{f', {pair.note}' if pair.note else ''}{instead}")


def _added_input(comparison: ProgramComparison, node: Node) -> FirstDifference | None:
    """An input of a node that only the program has."""
    added = [source for source in node.all_input_nodes if source.name in comparison.only_second]
    calls = [source for source in added if source.op.startswith("call_")]
    text = "is not in the model, and its value is used instead of one of the model's"
    return _at_node(calls[0], text) if calls else None


def _named(program: GraphModule, name: str) -> Node:
    return next(node for node in program.graph.nodes if node.name == name)


def _at_node(node: Node, text: str) -> FirstDifference:
    return FirstDifference(node.name, f"{_called(node)} {text}", _line(node))


def _called(node: Node) -> str:
    return f"{node.op} {node._pretty_print_target(node.target)}"


def _line(node: Node) -> str:
    return str(source_of(node) or "")
