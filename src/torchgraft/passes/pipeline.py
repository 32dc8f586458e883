"""Running several passes over one program, with a report of each step, observers, a history and, if wanted, a check.
The text form of a pipeline is in `registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torchgraft.analysis.comparison import Tolerance, compare, frozen_leaves
from torchgraft.analysis.surroundings import Surroundings
from torchgraft.codegen.calling import copied_inputs
from torchgraft.codegen.graph_module import GraphModule, with_own_graph
from torchgraft.errors import PassError
from torchgraft.interpreter import Interpreter
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_of
from torchgraft.passes.definition import Pass, PassReport
from torchgraft.passes.registry import parse_passes
from torchgraft.results.progress import stage
from torchgraft.results.shown import Shown
from torchgraft.results.tables import aligned, count


@dataclass(frozen=True)
class Step:
    """What an observer is told after each pass: its number from 1, the pass, its report, and the program as it is now.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: x.relu() + x.relu())
    >>> seen = []
    >>> _ = torchgraft.passes.Pipeline("merge-common", observers=[seen.append])(program)
    >>> seen[0].number, seen[0].report.changes
    (1, 1)
    """

    number: int
    edit: Pass
    report: PassReport
    program: GraphModule


Observer = Callable[[Step], Any]


@dataclass(frozen=True, repr=False)
class PipelineReport(Shown):
    """What a pipeline did: one report for each pass and, if asked for, the programs before, between and after them.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: x.relu() + x.relu())
    >>> report = torchgraft.passes.Pipeline("merge-common, remove-dead-code")(program)
    >>> [(part.name, part.changes) for part in report.passes]
    [('merge-common', 1), ('remove-dead-code', 0)]
    """

    passes: tuple[PassReport, ...]
    history: tuple[tuple[str, GraphModule], ...] = ()

    @property
    def changes(self) -> int:
        """All changes together."""
        return sum(report.changes for report in self.passes)

    @property
    def seconds(self) -> float:
        """The time of all passes, without verifying and checking."""
        return sum(report.seconds for report in self.passes)

    def headline(self) -> str:
        return f"{count(len(self.passes), 'pass', 'passes')}, {count(self.changes, 'change')}"

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each pass."""
        return [asdict(report) for report in self.passes]

    def text(self, color: bool = False) -> str:
        """A line for each pass, and what it left alone."""
        rows = [("pass", "changes", "ms", "nodes")]
        for report in self.passes:
            nodes = f"{report.nodes_before} -> {report.nodes_after}"
            rows.append((report.name, str(report.changes), f"{report.seconds * 1e3:.2f}", nodes))
        head, *lines_of_passes = aligned(rows, range(1, 4))
        lines = [head]
        for report, line in zip(self.passes, lines_of_passes, strict=True):
            lines += [line, *[f"    {note}" for note in report.notes]]
        return "\n".join(lines)


class Pipeline:
    """Passes in a row, given as text or as objects. Calling it edits a program in place and returns a report.

    Every pass is verified. With `check=args` the program also runs on these inputs before and after each pass, and the
    pipeline stops at the pass that changed the result. `observers` are called after each pass with a `Step`; with
    `history` the report keeps the programs.

    >>> import torch, torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: torch.relu(x) + torch.relu(x))
    >>> pipeline = Pipeline("merge-common, remove-dead-code")
    >>> report = pipeline(program, check=(torch.ones(2),))
    >>> [(step.name, step.changes) for step in report.passes], str(pipeline)
    ([('merge-common', 1), ('remove-dead-code', 0)], 'merge-common, remove-dead-code')
    """

    def __init__(
        self, passes: str | Pass | Iterable[Pass | str], *, observers: Iterable[Observer] = (), history: bool = False
    ) -> None:
        self.passes = _passes(passes)
        self.observers = tuple(observers)
        self.history = history

    def __call__(self, program: GraphModule, *, check: Any = None) -> PipelineReport:
        """Run every pass on `program`, in place; `check` are example inputs, one value or a tuple."""
        args = None if check is None else tuple(check) if isinstance(check, (tuple, list)) else (check,)
        checker = None if args is None else Checker(program, args)
        history = [("", _kept(program))] if self.history else []
        reports = []
        for number, edit in enumerate(self.passes, 1):
            chosen = edit if args is None else edit.with_example(args)
            with stage(f"running {edit.name}", number, len(self.passes)):
                report = chosen(program)
                if checker is not None:
                    checker.after(edit.name)
            reports.append(report)
            if self.history:
                history.append((edit.name, _kept(program)))
            for observer in self.observers:
                observer(Step(number, edit, report, program))
        return PipelineReport(tuple(reports), tuple(history))

    def __str__(self) -> str:
        return ", ".join(map(str, self.passes))

    def __repr__(self) -> str:
        return f"Pipeline({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pipeline) and self.passes == other.passes

    def __hash__(self) -> int:
        return hash(self.passes)


def _passes(given: Any) -> tuple[Pass, ...]:
    if isinstance(given, str):
        return parse_passes(given)
    if isinstance(given, Pass):
        return (given,)
    result: list[Pass] = []
    for item in given:
        if isinstance(item, str):
            result += parse_passes(item)
        elif isinstance(item, Pass):
            result.append(item)
        else:
            hint = "; call the class to make one" if isinstance(item, type) else ""
            raise PassError(f"a pipeline is made of passes and their names, not of {item!r}{hint}")
    return tuple(result)


def _kept(program: GraphModule) -> GraphModule:
    """The program as it is now, over the same modules and tensors, which passes replace and never write."""
    return with_own_graph(program)


# ---- checking ----


# A pass may compute the same in another order: twice as far apart as two runs of the same operations, and some more.
_TOLERANCE = Tolerance(factor=4.0)
_SIDES = ("program before the pass", "program after it")


class Checker:
    """Compares a program with what it was before the last pass; the model's state is the same before every run."""

    def __init__(self, program: GraphModule, args: tuple[Any, ...]) -> None:
        self._program = program
        self._args = args
        self._before = _Observed(program, args)

    def after(self, name: str) -> None:
        """Raise PassError if the result is no longer what it was; what is right becomes what the next pass is held to."""
        try:
            found = _Observed(self._program, self._args)
        except Exception as error:  # whatever a program can raise
            raise PassError(
                f"the pass {name} broke the program: it ran before, and now it raises {type(error).__name__}: {error}"
            ) from error
        difference = _difference(self._before.seen, found.seen)
        if difference is not None:
            raise PassError(
                f"the pass {name} changed what the program computes\n{difference}\n"
                f"first node that differs: {self._first_difference(found)}\nleave the pass out, or fix it"
            )
        self._before = found

    def _first_difference(self, found: _Observed) -> str:
        """The first node, in the order of the program, whose value is no longer what the node of that name had."""
        for name, leaves in found.values.items():
            if name in self._before.values and _difference(self._before.values[name], leaves) is not None:
                return _described(found.graph, name)
        for name in found.values:
            if name not in self._before.values:
                return f"{_described(found.graph, name)}, which the pass made"
        return "the output itself"


class _Observed:
    """One run: what a caller can see of it (result, inputs and buffers as they are afterwards), and the value of every node."""

    def __init__(self, program: GraphModule, args: tuple[Any, ...]) -> None:
        self.graph = program.graph
        inputs, _ = copied_inputs(args, {})
        with Surroundings(program).restored():
            recorder = _Recorder(program)
            self.seen = frozen_leaves(recorder.run(*inputs), "result")
            for name, buffer in program.named_buffers():
                self.seen |= frozen_leaves(buffer, f"buffer '{name}'")
        self.seen |= frozen_leaves(inputs, "inputs")
        self.values = recorder.values


def _difference(expected: dict[str, Any], found: dict[str, Any]) -> str | None:
    """The first difference in words. A buffer may come and go: a pass may put a module beside one, or remove it."""
    shared = {path: leaf for path, leaf in expected.items() if path in found or not path.startswith("buffer ")}
    known = {path: leaf for path, leaf in found.items() if path in expected or not path.startswith("buffer ")}
    differences = compare(shared, known, _TOLERANCE, sides=_SIDES).differences
    return str(differences[0]) if differences else None


class _Recorder(Interpreter):
    """Keeps a copy of every value, because later nodes may write into it."""

    def __init__(self, program: GraphModule) -> None:
        super().__init__(program)
        self.values: dict[str, dict[str, Any]] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op not in ("placeholder", "output", "get_attr"):
            self.values[n.name] = frozen_leaves(value, n.name)
        return value


def _described(graph: Graph, name: str) -> str:
    node = next(node for node in graph.nodes if node.name == name)
    line = source_of(node)
    return f"'{name}'" + (f" ({line})" if line else "")
