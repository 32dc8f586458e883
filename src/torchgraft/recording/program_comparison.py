"""`compare`: runs two programs on the same inputs and names the first node that differs, with error measures for every pair.
Which nodes belong together is found in `alignment.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torchgraft.analysis.comparison import Tolerance, comparable, compare_tensors, has_values
from torchgraft.analysis.surroundings import Surroundings
from torchgraft.codegen.calling import example_inputs
from torchgraft.errors import RunError
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_of
from torchgraft.quantize.plan import KEY
from torchgraft.recording.alignment import Pair, line_up
from torchgraft.recording.record import as_program, recording_of
from torchgraft.recording.recorded import Entry, Recording
from torchgraft.recording.situations import Situation
from torchgraft.results.progress import stage
from torchgraft.results.shown import Tabular
from torchgraft.results.tables import Table, count, number_text

EQUAL, CLOSE, DIFFERENT, NOT_COMPARED = "equal", "close", "DIFFERENT", "-"


class NodePair(NamedTuple):
    """Two nodes that correspond: how they were matched, whether their values agree, the largest error, and what is to be said."""

    first: str
    second: str
    matched_by: str
    verdict: str
    measures: ErrorMeasures | None
    note: str
    line: str

    def __str__(self) -> str:
        name = f"'{self.second}'" if self.first == self.second else f"'{self.first}' / '{self.second}'"
        where = f" at {self.line}" if self.line else ""
        errors = ""
        if self.measures is not None:
            errors = f", max abs {self.measures.max_abs:.4g}, SQNR {self.measures.sqnr:.1f} dB"
        return f"node {name}{where}: {self.verdict}{errors}" + (f", {self.note}" if self.note else "")


class ProgramComparison(Tabular):
    """What `compare` found: the pairs in the order of the second program, and the nodes that have no partner."""

    def __init__(self, pairs: list[NodePair], only_first: list[str], only_second: list[str]) -> None:
        self.pairs = pairs
        self.only_first = only_first
        self.only_second = only_second

    @property
    def first_difference(self) -> NodePair | None:
        """The first pair whose values are further apart than the tolerance."""
        return next((pair for pair in self.pairs if pair.verdict == DIFFERENT), None)

    @property
    def ok(self) -> bool:
        """Whether no pair differs."""
        return self.first_difference is None

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each pair."""
        nothing = dict.fromkeys(ErrorMeasures._fields)
        rows = []
        for pair in self.pairs:
            measures = nothing if pair.measures is None else pair.measures._asdict()
            rows.append({**pair._asdict(), **measures})
            del rows[-1]["measures"]
        return rows

    def to_dict(self) -> dict[str, Any]:
        first = self.first_difference
        return {
            "ok": self.ok,
            "first_difference": None if first is None else first.second,
            "pairs": self.rows(),
            "only_first": self.only_first,
            "only_second": self.only_second,
        }

    def _table(self) -> Table:
        cells = []
        for pair in self.pairs:
            measures = [None] * 4 if pair.measures is None else pair.measures[:4]
            cells.append(
                (pair.first, pair.second, pair.matched_by, pair.verdict, *map(number_text, measures), pair.note)
            )
        marked = frozenset([place for place, pair in enumerate(self.pairs) if pair.verdict == DIFFERENT])
        columns = ("first", "second", "matched by", "verdict", "max abs", "max rel", "SQNR dB", "cosine", "note")
        return Table(self.headline(), columns, cells, frozenset(columns[4:8]), marked, self._footer())

    def headline(self) -> str:
        different = self.first_difference
        if different is None:
            return f"no difference in {count(len(self.pairs), 'pair')} of nodes"
        return f"first difference: {different}"

    def _footer(self) -> str:
        sides = (("first", self.only_first), ("second", self.only_second))
        return "\n".join([f"only in the {side}: {', '.join(names)}" for side, names in sides if names])


def compare(
    program_a: Any,
    program_b: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    level: str = "module",
    seed: int = 0,
) -> ProgramComparison:
    """Run two programs on copies of the same inputs, from the same state and seed, and line up their nodes.

    Programs are GraphModules, or models that are captured first at `level`. Nodes are matched by name, by what they call, by
    value and by place, so programs of different levels can be compared. A pair differs if its values are further apart than a
    small part of the largest element (1e-5 for float32; of two dtypes the shorter counts), or than `rtol` and `atol` allow.
    Everything that the runs change is restored. The values of both are held in memory.

    If a program raises, RunError is raised, with the comparison until then as `partial`.

    >>> from torchgraft import symbolic_trace
    >>> one = symbolic_trace(lambda x: torch.relu(x + 1) * 2)
    >>> two = symbolic_trace(lambda x: torch.relu(x + 1) * 3)
    >>> compare(one, one, (torch.ones(2, 3),)).ok, compare(one, two, (torch.ones(2, 3),)).first_difference.second
    (True, 'mul')
    """
    situation = Situation("example", *example_inputs(args, kwargs))
    programs = [as_program(model, situation.args, situation.kwargs, level) for model in (program_a, program_b)]
    runs = run_both(programs, situation, seed)
    with stage("lining up and comparing values"):
        is_quantized = any(KEY in getattr(program, "meta", {}) for program in programs)
        comparison = compared(runs[0].recording, runs[1].recording, Tolerance(rtol, atol), is_quantized)
    for side, (_, error) in zip(("first", "second"), runs, strict=True):
        if error is not None:
            seen = comparison.headline()
            raise RunError(f"in the {side} program, {error}; until then: {seen}", comparison) from error.__cause__
    return comparison


class Run(NamedTuple):
    """What was recorded of one program, and the error that ended it."""

    recording: Recording
    error: RunError | None


def run_both(programs: list[Any], situation: Situation, seed: int) -> list[Run]:
    """Record programs on copies of the same inputs, each from the same state and seed; everything is restored."""
    surroundings = Surroundings(*programs)
    runs = []
    for number, program in enumerate(programs, 1):
        args, kwargs = situation.copied()
        with surroundings.restored(seed), stage("running", number, len(programs)):
            try:
                runs.append(Run(recording_of(program, args, kwargs), None))
            except RunError as error:
                assert isinstance(error.partial, Recording)
                runs.append(Run(error.partial, error))
    return runs


def compared(
    first: Recording, second: Recording, tolerance: Tolerance, is_quantized: bool = False
) -> ProgramComparison:
    """The nodes of two runs lined up, and their values compared; with `is_quantized`, bytes of one are steps of some scale, which
    say nothing beside the numbers of the other."""
    values = [{side.node(name): side[name] for name in side} for side in (first, second)]
    pairs = line_up(*values)
    compared = [
        _pair(pair, first.entries[pair.first.name], second.entries[pair.second.name], tolerance, is_quantized)
        for pair in pairs
    ]
    matched = {node for pair in pairs for node in pair[:2]}
    _explain_first(pairs, compared, matched)
    alone = [[node.name for node in side if node not in matched and node.op != "output"] for side in values]
    return ProgramComparison(compared, *alone)


def _explain_first(pairs: list[Pair], compared: list[NodePair], matched: set[Node]) -> None:
    """Say of the first difference which of its inputs the other program does not have at all."""
    for place, pair in enumerate(compared):
        if pair.verdict == DIFFERENT:
            if pair.matched_by not in ("name", "structure"):
                return
            sides = zip(("first", "second"), pairs[place][:2], strict=True)
            notes = [
                f"its input '{node.name}' is only in the {side}"
                for side, owner in sides
                for node in owner.all_input_nodes
                if node not in matched
            ]
            compared[place] = pair._replace(note=", ".join(filter(None, [pair.note, *notes])))
            return


def _pair(pair: Pair, first: Entry, second: Entry, tolerance: Tolerance, is_quantized: bool) -> NodePair:
    if is_quantized and pair.first.op != "output" and _has_steps(first) != _has_steps(second):
        verdict, measures, note = NOT_COMPARED, None, "numbers and steps of a scale"
    else:
        verdict, measures, note = verdict_of(first, second, tolerance)
    return NodePair(
        pair.first.name, pair.second.name, pair.how, verdict, measures, note, str(source_of(pair.second) or "")
    )


def _has_steps(entry: Entry) -> bool:
    return any(brief.dtype in (torch.uint8, torch.int8) for brief in entry.briefs)


def verdict_of(first: Entry, second: Entry, tolerance: Tolerance) -> tuple[str, ErrorMeasures | None, str]:
    """Whether two recorded values agree, how far apart they are, and what is to be said."""
    sizes = len(first.parts), len(second.parts)
    if sizes[0] != sizes[1] and min(sizes) == 1:
        # A norm is one tensor; the operator below it gives that first, and statistics for the backward.
        verdict, measures, note = _tensor_verdict(first.parts[0].tensor, second.parts[0].tensor, tolerance)
        return verdict, measures, ", ".join(filter(None, [note, f"the first of {max(sizes)} tensors"]))
    if sizes[0] != sizes[1]:
        return DIFFERENT, None, f"{count(sizes[0], 'tensor')} and {count(sizes[1], 'tensor')}"
    if not first.parts:
        return _plain_verdict(first.template, second.template)
    found: list[tuple[str, ErrorMeasures | None, str]] = []
    for key, one, other in zip(second.keys, first.parts, second.parts, strict=True):
        verdict, measures, note = _tensor_verdict(one.tensor, other.tensor, tolerance)
        found.append((verdict, measures, f"{key}: {note}" if note and len(first.parts) > 1 else note))
    # The worst of several tensors is that of the node.
    return max(found, key=lambda item: (_RANKS[item[0]], item[1].max_abs if item[1] else 0.0))


_RANKS = {NOT_COMPARED: 0, EQUAL: 1, CLOSE: 2, DIFFERENT: 3}
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.Size)


def _plain_verdict(first: Any, second: Any) -> tuple[str, None, str]:
    if isinstance(first, _PLAIN) and isinstance(second, _PLAIN):
        same = first == second or (first != first and second != second)
        return (EQUAL, None, "") if same else (DIFFERENT, None, f"{first!r} and {second!r}")
    return NOT_COMPARED, None, ""


def _tensor_verdict(
    first: torch.Tensor, second: torch.Tensor, tolerance: Tolerance
) -> tuple[str, ErrorMeasures | None, str]:
    if first.is_nested or second.is_nested or first.shape != second.shape:
        if not (first.is_nested and second.is_nested):
            return DIFFERENT, None, f"shapes {_shape(first)} and {_shape(second)}"
    if not has_values(first) or not has_values(second):
        return NOT_COMPARED, None, "no values"
    note = "" if first.dtype == second.dtype else f"{_dtype(first)} and {_dtype(second)}"
    measures = error_measures(first, second)
    if measures.unlike:
        note = ", ".join(filter(None, [note, f"{measures.unlike} NaN or infinite in one only"]))
    if measures.max_abs == 0 and not measures.unlike:
        return EQUAL, measures, note
    short = _shorter(first.dtype, second.dtype)
    text, _ = compare_tensors(_as(first, short), _as(second, short), tolerance)
    return DIFFERENT if text else CLOSE, measures, note


def _shorter(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """Of two dtypes the one that says less about a number, which both can be held to."""
    floating = [dtype for dtype in (first, second) if dtype.is_floating_point or dtype.is_complex]
    if first == second or not floating:
        return first
    return max(floating, key=lambda dtype: torch.finfo(dtype).eps)


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    plain = tensor.dequantize() if tensor.is_quantized else tensor
    return plain.to(dtype) if plain.dtype != dtype and not tensor.is_quantized else plain


def _shape(tensor: torch.Tensor) -> str:
    return "nested" if tensor.is_nested else str(tuple(tensor.shape))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# ---- how far apart two tensors are ----


class ErrorMeasures(NamedTuple):
    """The error of a second tensor against a first; positions where either is NaN or infinite are left out and counted.

    `sqnr` is the ratio of signal to error in decibels, infinite where there is no error. `unlike` counts positions where one is
    NaN or infinite and the other is not the same.
    """

    max_abs: float
    max_rel: float
    sqnr: float
    cosine: float
    unlike: int = 0


_EQUAL = ErrorMeasures(0.0, 0.0, math.inf, 1.0)


def error_measures(first: torch.Tensor, second: torch.Tensor) -> ErrorMeasures:
    """The measures of two tensors with the same number of elements.

    >>> error_measures(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    ErrorMeasures(max_abs=0.5, max_rel=0.125, sqnr=20.0, cosine=0.9984603532054123, unlike=0)
    """
    with torch.no_grad():
        expected, found = comparable(first).reshape(-1), comparable(second).reshape(-1).to(first.device)
        finite = torch.isfinite(expected) & torch.isfinite(found)
        same = finite | (expected == found) | (torch.isnan(expected) & torch.isnan(found))
        unlike = int((~same).sum())
        if not bool(finite.all()):
            expected, found = expected[finite], found[finite]
        distance = (expected - found).abs()
        if not len(distance) or not bool(distance.any()):
            return _EQUAL._replace(unlike=unlike)
        sizes = expected.abs()
        signal, noise = float(torch.linalg.vector_norm(expected)), float(torch.linalg.vector_norm(distance))
        other = float(torch.linalg.vector_norm(found))
        relative = torch.where(sizes > 0, distance / sizes, torch.where(distance > 0, math.inf, 0.0))
        return ErrorMeasures(
            float(distance.max()),
            float(relative.max()),
            20 * math.log10(signal / noise) if signal and noise else -math.inf,
            float(expected @ found) / (signal * other) if signal and other else 0.0,
            unlike,
        )
