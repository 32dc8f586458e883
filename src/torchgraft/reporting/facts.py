"""The most interesting facts about a model, as sentences: each kind of fact is one function that may find nothing.
Facts are ranked by how much they should worry or surprise a reader.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from torchgraft.reporting.seen import Seen
from torchgraft.results.tables import amount, count, seconds_text, shortened
from torchgraft.view.module_facts import ModuleFacts

SHOWN = 5
_LONGEST = 160


class Fact(NamedTuple):
    """A short headline, the sentence, and its rank: the higher, the sooner it is said."""

    headline: str
    text: str
    rank: float


def short(reason: str) -> str:
    """The beginning of a reason; the page has all of it."""
    return shortened(reason, _LONGEST)


def interesting_facts(seen: Seen, most: int = SHOWN) -> list[Fact]:
    """At most so many facts, the most interesting first."""
    found = [fact for source in _SOURCES for fact in source(seen)]
    return sorted(found, key=lambda fact: -fact.rank)[:most]


def _problems(seen: Seen) -> Iterator[Fact]:
    rows = [] if seen.statistics is None else seen.statistics.rows()
    for name, word, rank in (("nan", "NaN", 100), ("inf", "infinities", 43)):  # a mask is full of infinities, and right
        bad = [row for row in rows if row.get(name)]
        if bad:
            text = f"{count(len(bad), 'value')} of the run with {word}; the first is '{bad[0]['key']}', with {bad[0][name]:,}."
            yield Fact("Not finite", text, rank)
    diagnosis = seen.diagnosis
    if diagnosis is not None and diagnosis.program is not None and not diagnosis.ok:
        text = "The captured program does not do what the model does; see the check against the model."
        yield Fact("Wrong", text, 99)
    missing = [level for level in seen.levels.values() if level.failure]
    if missing:
        names = " and ".join([level.name for level in missing])
        yield Fact("Missing", f"There is no program at level {names}: {short(missing[0].failure)}", 60)


def _verified(seen: Seen) -> Iterator[Fact]:
    diagnosis = seen.diagnosis
    if diagnosis is None or diagnosis.verification is None or not diagnosis.ok:
        return
    right = [check.situation for check in diagnosis.verification.checks if check.status == "right"]
    counted = count(len(right), "situation")
    fixed = sum(finding.count for finding in diagnosis.specialised)
    held = (
        "nothing was fixed to the example"
        if not fixed
        else "1 fact about the example is fixed, and checked on every run"
        if fixed == 1
        else f"{fixed} facts about the example are fixed, and checked on every run"
    )
    yield Fact(
        "Right" if not fixed else "Specialised",
        f"The captured program did what the model does in {counted} ({', '.join(right[-3:])}); {held}.",
        50 if not fixed else 55,
    )


def _beside_script(seen: Seen) -> Iterator[Fact]:
    module, script = seen.levels.get("module"), seen.script.counts
    if module is None or module.counts is None or script is None:
        return
    ours = module.counts.nodes
    others = [f"{level.counts.nodes:,} in {level.title}" for level in seen.levels.values()
              if level.counts is not None and level.name in ("function", "aten")]  # fmt: skip
    yield Fact(
        "Smaller",
        f"The program is {ours:,} nodes at module level ({', '.join(others)}); torch.jit.trace writes {script.nodes:,} "
        f"for the same model, {script.nodes / ours:.1f} times as many.",
        48,
    )


def _training(seen: Seen) -> Iterator[Fact]:
    joint, forward = seen.levels.get("joint"), seen.levels.get("core_aten")
    if joint is None or joint.counts is None or forward is None or forward.counts is None or not forward.counts.calls:
        return
    program = joint.program
    assert program is not None
    gradients = sum(entry.kind == "gradient" for entry in program.graph.output_node().meta.get("entries", ()))
    yield Fact(
        "Training",
        f"One training step is {joint.counts.calls:,} operator calls, {joint.counts.calls / forward.counts.calls:.1f} times the "
        f"{forward.counts.calls:,} of the forward alone, and ends in {gradients:,} gradients.",
        46,
    )


def _leaves(seen: Seen) -> list[ModuleFacts]:
    rows = [] if seen.summary is None else seen.summary.facts.modules
    return [
        row for row, after in zip(rows, [*rows[1:], None], strict=True) if after is None or after.depth <= row.depth
    ]


def _arithmetic(seen: Seen) -> Iterator[Fact]:
    leaves = _leaves(seen)
    whole = seen.summary.facts.modules[0] if seen.summary is not None else None
    if whole is None or not whole.flops or not whole.parameters:
        return
    work: Counter[str] = Counter()
    for row in leaves:
        work[row.type] += row.flops or 0
    kind, flops = work.most_common(1)[0]
    if not flops:  # only the whole is known: the model was kept as one call
        return
    count = sum(row.type == kind for row in leaves)
    yield Fact(
        "Arithmetic",
        f"{count} {kind} do {flops / whole.flops:.1%} of the {amount(whole.flops, 'FLOPs')} of one run; "
        f"it has {whole.parameters:,} parameters.",
        44,
    )
    if len(leaves) > 2:
        shares = [(row.parameters / whole.parameters, (row.flops or 0) / whole.flops, row) for row in leaves]
        parameters, arithmetic, row = max(shares, key=lambda entry: entry[0] - entry[1])
        if parameters - arithmetic > 0.02:
            yield Fact(
                "Heavy, but idle",
                f"'{row.path}' ({row.type}) holds {parameters:.1%} of the parameters and does {arithmetic:.2%} of the "
                "arithmetic.",
                42,
            )


def _values(seen: Seen) -> Iterator[Fact]:
    rows = (
        []
        if seen.statistics is None
        else [row for row in seen.statistics.rows() if row["op"] not in ("placeholder", "output")]
    )
    sized = [
        (row["zeros"] / size, row) for row in rows if row.get("zeros") and (size := math.prod(row["shape"] or ())) > 1
    ]
    if sized:
        share, row = max(sized, key=lambda entry: entry[0])
        if share > 0.2:
            text = f"'{row['key']}' is {share:.0%} zeros in this run, more than any other of {len(rows):,} values."
            yield Fact("Emptiest", text, 40)
    ranged = [(max(abs(row["min"]), abs(row["max"])), row) for row in rows if row.get("max") is not None]
    if ranged:
        largest, row = max(ranged, key=lambda entry: entry[0])
        yield Fact("Largest", f"The largest magnitude of the run is {largest:.4g}, in '{row['key']}'.", 30)


def _slowest(seen: Seen) -> Iterator[Fact]:
    log = seen.calls.get("dispatch")
    total = 0.0 if log is None else sum(call.seconds for call in log)
    if log is None or not total:
        return
    slow = max(log, key=lambda call: call.seconds)
    where = f" in '{slow.module}'" if slow.module else ""
    yield Fact(
        "Slowest",
        f"The slowest of {len(log):,} operator calls is {slow.name}{where}: {seconds_text(slow.seconds)}, "
        f"{slow.seconds / total:.0%} of the run.",
        34,
    )


_SOURCES = (_problems, _verified, _beside_script, _training, _arithmetic, _values, _slowest)
