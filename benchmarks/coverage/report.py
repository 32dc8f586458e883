"""How rows are shown: a line for a terminal, a summary of counts and medians, and the page docs/coverage.md.
What the words in them mean is in `rows`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence

from benchmarks.coverage.rows import (
    ATEN,
    CORE_ATEN,
    EQUAL,
    EXPORT,
    EXPORT_CORE,
    FAILS,
    FUNCTION,
    JOINT,
    LOWERINGS,
    MODULE,
    OWN,
    REFUSED,
    SITUATIONS,
    SYMBOLIC,
    UNDEFINED,
    WRONG,
    Attempt,
    Row,
)
from benchmarks.report import Environment

LARGE = "large"


def is_settled(row: Row) -> bool:
    """Whether there is nothing to look at: the model does not run in eager, or it is good at every level."""
    return bool(row.eager) or all(attempt.is_good for way, attempt in row.attempts.items() if way in OWN)


def line(row: Row) -> str:
    """One model in one line."""
    if row.eager:
        return f"-    {row.collection} {row.name}: does not run in eager: {_clean(row.eager)[:200]}"
    texts = [f"{way}: {_outcome(row, way)}" for way in row.attempts]
    notes = [row.note, f"{row.seconds:.1f} s"]
    return f"{'ok  ' if is_settled(row) else 'LOOK'} {row.collection} {row.name}: {'; '.join([*texts, *filter(None, notes)])}"


def _outcome(row: Row, way: str) -> str:
    attempt = row.attempt(way)
    if not attempt.captured:
        return "not captured"
    by_verdict: dict[str, list[str]] = {}
    for situation, verdict in attempt.verdicts.items():
        by_verdict.setdefault(verdict, []).append(situation)
    words = [f"{verdict} on {', '.join(situations)}" for verdict, situations in by_verdict.items()]
    ratio = row.ratio(way)
    words += [f"{ratio:.1f} eager runs"] if ratio else []
    words += [f"{len(attempt.kept)} kept whole"] if attempt.kept else []
    words += [f"TOUCHED {attempt.reasons['untouched']}"] if "untouched" in attempt.reasons else []
    return " and ".join(words)


# The summary


def summary(rows: Sequence[Row]) -> str:
    """The counts and medians as a table that reads well in a terminal and in Markdown."""
    groups = _by_collection(rows)
    if not groups:
        return "\n".join(_large_models(rows))
    lines = [_cells(["", *groups]), _cells(["---", *["---:"] * len(groups)])]
    for title, count in _MEASURES:
        lines.append(_cells([title, *[count(group) for group in groups.values()]]))
    return "\n".join(lines)


def _by_collection(rows: Iterable[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.collection != LARGE:
            groups.setdefault(row.collection, []).append(row)
    return groups


def _running(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if not row.eager]


def _captured(way: str) -> Callable[[Sequence[Row]], str]:
    def count(rows: Sequence[Row]) -> str:
        attempts = [row.attempt(way) for row in _running(rows) if way in row.attempts]
        if not attempts:
            return "not tried"
        captured = [attempt for attempt in attempts if attempt.captured]
        other = [attempt for attempt in captured if attempt.verdicts.get("example", EQUAL) != EQUAL]
        stopped = [attempt for attempt in captured if "example" not in attempt.verdicts]
        uncached = sum("cache" in attempt.reasons for attempt in captured)
        text = f"{len(captured)} of {len(attempts)}"
        text += f", {uncached} without their cache" if uncached else ""
        text += f", {len(stopped)} stopped before they were compared" if stopped else ""
        return text + (f", {len(other)} not equal on the example" if other else "")

    return count


def _verdicts(situation: str, way: str = MODULE) -> Callable[[Sequence[Row]], str]:
    def count(rows: Sequence[Row]) -> str:
        found = [row.attempt(way).verdicts.get(situation) for row in _running(rows)]
        texts = [
            f"{found.count(verdict)} {verdict}" for verdict in (EQUAL, REFUSED, FAILS, WRONG) if found.count(verdict)
        ]
        return ", ".join(texts)

    return count


def _kept(rows: Sequence[Row]) -> str:
    """How many programs have a module as one call, and how many are nothing but one call: captured in name only."""
    kept = [attempt.kept for row in _running(rows) if (attempt := row.attempt(MODULE)).captured]
    known = [paths for paths in kept if paths is not None]
    text = f"{sum(bool(paths) for paths in known)}, of which {sum('' in paths for paths in known)} are one call"
    return text + (f"; {len(kept) - len(known)} not recorded" if len(known) < len(kept) else "")


def _wrong(rows: Sequence[Row]) -> str:
    return str(sum(row.attempt(way).is_wrong for row in _running(rows) for way in OWN))


def _touched(rows: Sequence[Row]) -> str:
    return str(sum("untouched" in row.attempt(way).reasons for row in _running(rows) for way in OWN))


def _ratios(way: str, to: str = "eager") -> Callable[[Sequence[Row]], str]:
    return lambda rows: _spread([row.ratio(way, to) for row in _running(rows)])


def _lowering_ratios(way: str) -> Callable[[Sequence[Row]], str]:
    return lambda rows: _spread([row.lowering_ratio(way) for row in _running(rows)])


def _short_of_functions(way: str) -> Callable[[Sequence[Row]], str]:
    return lambda rows: str(sum(bool(row.shortfalls(way)) for row in _running(rows)))


def _first_ratios(rows: Sequence[Row]) -> str:
    return _spread([row.first_ratio(MODULE) for row in _running(rows)])


def _spread(found: Sequence[float | None]) -> str:
    ratios = [ratio for ratio in found if ratio is not None]
    return f"{statistics.median(ratios):.3g} ({min(ratios):.2g} to {max(ratios):.3g})" if ratios else ""


Measure = tuple[str, Callable[[Sequence[Row]], str]]
_TITLES = {
    "values": "same program, other values",
    "batch": "another batch size",
    "size": "another size of picture or text",
    "training": "switched to training, with gradients",
}


def _of_lowering(way: str) -> list[Measure]:
    """What is counted about a level below functions."""
    titles = {situation: title for situation, title in _TITLES.items() if way != JOINT or situation != "training"}
    found: list[Measure] = [(f"{way}: on the example", _captured(way))]
    found += [(f"{way}: {title}", _verdicts(situation, way)) for situation, title in titles.items()]
    found += [(f"{way}: **right as functions, and not here**", _short_of_functions(way))]
    return found


_MEASURES: list[Measure] = [
    ("models", lambda rows: str(len(rows))),
    ("run in eager", lambda rows: str(len(_running(rows)))),
    ("captured by torch.fx", _captured(SYMBOLIC)),
    ("captured by torch.export", _captured(EXPORT)),
    ("captured by torchgraft, modules", _captured(MODULE)),
    ("captured by torchgraft, functions", _captured(FUNCTION)),
    ("of these with modules kept whole", _kept),
    *[(title, _verdicts(situation)) for situation, title in _TITLES.items()],
    *[measure for way in LOWERINGS for measure in _of_lowering(way)],
    ("**programs that answered wrongly**", _wrong),
    ("captures that changed the model or the random state", _touched),
    ("capture in eager runs: median (least to most)", _ratios(MODULE)),
    ("capture of functions in eager runs", _ratios(FUNCTION)),
    ("the first capture in eager runs, with reading the model's code", _first_ratios),
    ("torch.export in eager runs", _ratios(EXPORT)),
    ("torch.export in captures", _ratios(EXPORT, MODULE)),
    *[(f"lowering to {way} in eager runs, without the capture", _lowering_ratios(way)) for way in LOWERINGS],
    ("torch.export in captures with lowering to aten", _ratios(EXPORT, ATEN)),
    ("torch.export with run_decompositions in captures with lowering to core_aten", _ratios(EXPORT_CORE, CORE_ATEN)),
]


# The page


NOTES = """\
Each model is built with random weights at a small size and captured once with `torchgraft.capture` at the level of
modules, and once at the level of functions, before it has ever run. The program of functions is then lowered to ATen
and core ATen operators (`torchgraft.lower`) and, where the model can be trained, to forward and backward as one
program (`torchgraft.capture_training`, level *joint*). Each program is compared with the model: on the inputs it was
captured with, on other values, at another batch size, at another size of picture or text, and switched to training
mode (results, gradients and buffers, with dropout drawing the same numbers); at level joint results and gradients are
those of evaluation mode. *Equal* means every part of the result: tensors (to 1e-4 of the largest value; mostly bit for
bit), caches, numbers, what was done to the inputs, and where the random numbers were left; gradients of a joint
program to 1e-4 of the largest value, or 1e-6 of the largest gradient of the model, or nearer than eager's to those of
double precision (of two values that are nearly the same, rounding decides which is the largest, and has the gradient).
*Refused* means a GuardError that names the line; *undefined* that the model itself does not take such inputs. A module
*kept whole* does something that cannot be written down as operations, such as counting its calls, and stays one call.
Times are of the process, with one torch thread; eager runs and captures are taken in turn, and a ratio is of their
medians; of lowerings and of torch.export the better of two counts. The first capture of a model reads the code of its
classes, too, which later ones remember. torch.fx may fix every argument that is not given; torch.export is asked for
the sizes of the example only, may leave out the cache that language models return, and calculates nothing, while a
capture is a run of the model, and a lowering is another."""


def markdown(rows: Sequence[Row], environment: Environment, command: str, remark: str = "") -> str:
    """The page docs/coverage.md; the remark says what else a reader should know about this sweep."""
    parts = ["# Which models are captured", "", f"Made by `{command}`. Do not edit by hand.", ""]
    parts += [
        f"Taken with {environment}.",
        "",
        NOTES,
        "",
        " ".join(filter(None, [_extent(rows), remark])),
        "",
        summary(rows),
        "",
    ]
    parts += _shortfalls(rows)
    parts += _large_models([row for row in rows if row.collection == LARGE])
    for collection, group in _by_collection(rows).items():
        parts += [f"## {collection}", "", *_table(_running(group)), ""]
        idle = [row for row in group if row.eager]
        if idle:
            parts += [f"{len(idle)} do not run in eager here, and are not counted:", ""]
            parts += [f"- {row.name}: {_as_text(_clean(row.eager)[:240])}" for row in idle] + [""]
    return "\n".join(parts)


def _extent(rows: Sequence[Row]) -> str:
    """How much was examined, in a sentence."""
    running = _running([row for group in _by_collection(rows).values() for row in group])
    exported = sum(EXPORT in row.attempts for row in running)
    lowered = sum(ATEN in row.attempts for row in running)
    trained = sum(JOINT in row.attempts for row in running)
    return (
        f"{len(running)} models that run in eager; {lowered} of them at levels aten and core_aten, {trained} at level joint, "
        f"{exported} beside torch.export."
    )


def _shortfalls(rows: Sequence[Row]) -> list[str]:
    """The models that are right at the level of functions and not at a lower one, with the reasons."""
    found = [
        f"- {row.collection} {row.name}, {way}, {situation}: {_as_text(_clean(reason).partition(' | model: ')[0][:240])}"
        for way in LOWERINGS
        for row in rows
        for situation, reason in row.shortfalls(way).items()
    ]
    return ["## Right as functions, and not lower down", "", *found, ""] if found else []


def _large_models(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    lines = ["## Without compute or memory", "", "Weights and inputs on the meta device, so nothing is calculated.", ""]
    lines += ["| model | parameters | seconds | memory | nodes | guards |", "|---|---:|---:|---:|---:|---:|"]
    for row in rows:
        attempt = row.attempt(MODULE)
        memory = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.0f} MiB"
        seconds = "" if attempt.seconds is None else f"{attempt.seconds:.2f}"
        lines.append(
            _cells([row.name, f"{row.parameters:,}", seconds, memory, str(attempt.nodes), str(attempt.guards)])
        )
    return [*lines, ""]


def _table(rows: Sequence[Row]) -> list[str]:
    situations = [name for name in SITUATIONS if any(name in row.attempt(MODULE).verdicts for row in rows)]
    head = ["model", "nodes", "guards", "kept whole", *situations, "functions", *LOWERINGS, "eager runs"]
    head += ["torch.fx", "torch.export", "export ÷ capture", "export ÷ capture and aten"]
    lines = [_cells(head), _cells(["---"] * len(head))]
    for row in rows:
        attempt = row.attempt(MODULE)
        verdicts = [attempt.verdicts.get(name, "") for name in situations]
        lines.append(
            _cells(
                [
                    row.name + (f" ({row.note})" if row.note else ""),
                    str(attempt.nodes) if attempt.captured else "not captured",
                    str(attempt.guards),
                    ", ".join(path or "all" for path in attempt.kept or ()),
                    *verdicts,
                    _in_short(row.attempt(FUNCTION), attempt),
                    *[_in_short(row.attempt(way), row.attempt(FUNCTION)) for way in LOWERINGS],
                    _number(row.ratio(MODULE)),
                    _in_short(row.attempt(SYMBOLIC)),
                    _in_short(row.attempt(EXPORT)),
                    _number(row.ratio(EXPORT, MODULE)),
                    _number(row.ratio(EXPORT, ATEN)),
                ]
            )
        )
    return lines


def _in_short(attempt: Attempt, other: Attempt | None = None) -> str:
    """A word about an attempt; "same" where it went as another did."""
    if not attempt.captured:
        return "no" if attempt.reasons else ""
    if other is not None and attempt.verdicts == other.verdicts:
        return "same"
    kinds = [verdict for verdict in (WRONG, FAILS, REFUSED, EQUAL, UNDEFINED) if verdict in attempt.verdicts.values()]
    return kinds[0] if kinds else "yes"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _cells(texts: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def _as_text(reason: str) -> str:
    """A reason on a page, where brackets would be links."""
    return reason.replace("[", "\\[")


def _clean(text: str) -> str:
    """A reason in one line, without the folders of this machine."""
    return re.sub(r"\S*site-packages/", "", " ".join(text.split()))
