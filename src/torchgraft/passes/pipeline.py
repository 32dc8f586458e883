"""Running several passes over one program, with a report of each step, observers, a history and, if wanted, a check.
How two runs are compared is in `checking.py`, the text form of a pipeline in `pipeline_text.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torchgraft.errors import PassError
from torchgraft.passes.checking import Checker
from torchgraft.passes.definition import Pass, PassReport
from torchgraft.passes.pipeline_text import parse_passes
from torchgraft.results.shown import Shown
from torchgraft.results.tables import aligned

if TYPE_CHECKING:
    from torchgraft.codegen.graph_module import GraphModule


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
        """How much was changed."""
        return f"{len(self.passes)} passes, {self.changes} changes"

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
    from torchgraft.codegen.graph_module import GraphModule

    return GraphModule(program, copy.deepcopy(program.graph), type(program).__name__)
