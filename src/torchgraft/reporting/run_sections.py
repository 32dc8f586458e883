"""The sections of the page about runs of the model: the summary, the calls, the statistics, the check against the model, and how
long a run would take on machines that are not here. The sections about programs are in `level_section.py`.
"""

from __future__ import annotations

import math
from typing import Any

from torchgraft.analysis.simulate import Simulation, WhatIf
from torchgraft.recording.doctor import Finding
from torchgraft.reporting.level_section import tab_group
from torchgraft.reporting.levels import place_of
from torchgraft.reporting.markup import (
    Cell,
    bar,
    code_cell,
    element,
    escape,
    histogram,
    line_cell,
    link,
    name_cell,
    number_cell,
    table,
    text_cell,
)
from torchgraft.reporting.seen import CALL_LEVELS, Seen
from torchgraft.results.tables import amount, count, number_text, seconds_text

MOST_NODES = 100  # of a simulation
NOTHING = '<p class="note">Unavailable: the reason is at the end of the page.</p>'


def summary_section(seen: Seen) -> str:
    """The tree of modules; a module that has modules inside can be closed."""
    if seen.summary is None:
        return NOTHING
    rows = seen.summary.rows()
    deeper = [after["depth"] > row["depth"] for row, after in zip(rows, [*rows[1:], {"depth": 0}], strict=True)]
    body = [_summary_row(row, has_children) for row, has_children in zip(rows, deeper, strict=True)]
    heads = ("module", "output", "parameters", "share", "", "FLOPs", "share", "", "calls")
    classes = ("", "", "n", "n", "", "n", "n", "", "n")
    head = "".join(
        [element("th", name, scope="col", class_=kind or None) for name, kind in zip(heads, classes, strict=True)]
    )
    tree = f'<table class="tree"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    notes = "".join([element("p", escape(note), class_="note") for note in seen.summary.facts.notes()])
    buttons = '<button type="button" data-tree="open">Open all</button><button type="button" data-tree="close">Close all</button>'
    bar_ = element("div", f"{buttons}{link('summary.json')}", class_="bar")
    return f'{notes}{bar_}<div class="scroll" tabindex="0">{tree}</div>'


def _summary_row(row: dict[str, Any], has_children: bool) -> str:
    name = f"<b>{escape(row['name'])}</b> {escape(row['type'])}" if row["depth"] else f"<b>{escape(row['type'])}</b>"
    shared = ' <span class="chip">shared</span>' if row["shared"] else ""
    toggle = (
        '<button type="button" class="twist" aria-expanded="true" aria-label="open or close"></button>'
        if has_children
        else ""
    )
    first = (
        f'<td style="--depth:{row["depth"]}" class="name">{toggle or "<span class=twist></span>"}{name}{shared}</td>'
    )
    share, flops_share = row["share"] or 0.0, row["flops_share"] or 0.0
    cells = [
        element("code", escape(row["output"] or "")),
        f"{row['parameters']:,}",
        f"{share:.1%}",
        bar(share),
        amount(row["flops"]),
        f"{flops_share:.1%}" if row["flops_share"] is not None else "",
        bar(flops_share),
        "" if row["calls"] is None else str(row["calls"]),
    ]
    kinds = ("", "n", "n", "", "n", "n", "", "n")
    rest = "".join([element("td", cell, class_=kind or None) for cell, kind in zip(cells, kinds, strict=True)])
    return f'<tr data-depth="{row["depth"]}" title="{escape(row["path"])}">{first}{rest}</tr>'


def calls_section(seen: Seen) -> str:
    """The logs of calls, one tab for each level."""
    tabs = []
    for level, log in seen.calls.items():
        total = sum(call.seconds for call in log)
        slowest = max([call.seconds for call in log], default=0.0) or 1.0
        rows = [
            [
                number_cell(call.number),
                name_cell(call.name),
                text_cell(f"raised {call.error}", "bad") if call.error else code_cell(call.result, "keep"),
                code_cell(call.module, "keep"),
                number_cell(call.seconds, seconds_text(call.seconds)),
                Cell(bar(call.seconds / slowest)),
                line_cell(place_of(call.line), call.line),
                code_cell(call.arguments, "long"),
            ]
            for call in log
        ]
        file, trace = f"calls/{level}.json", f"calls/{level}-trace.json"
        intro = element(
            "p",
            f"{count(len(log), 'call')} of {count(len(log.counts), 'function')}, {seconds_text(total)} in all: "
            f"{CALL_LEVELS[level]}. "
            f"Also as {link(file)} and, for chrome://tracing and Perfetto, as {link(trace)}.",
            class_="note",
        )
        columns = ("#", "call", "result", "module", "time", "", "line", "arguments")
        tabs.append((level.capitalize(), intro + table(columns, rows, find="name, module, shape", more=link(file))))
    return tab_group("call-logs", tabs) if tabs else NOTHING


_MEASURES = ("min", "max", "mean", "std", "norm")


def statistics_section(seen: Seen) -> str:
    """What the values of one run were like."""
    recording = seen.statistics
    if recording is None:
        return NOTHING
    rows = []
    for row in recording.rows():
        if row["dtype"] is None:  # a guard, or a number: there is nothing to measure
            continue
        size = math.prod(row["shape"]) if row["shape"] is not None else 0
        zeros = row.get("zeros")
        share = zeros / size if zeros is not None and size else None
        bad = (row.get("nan") or 0) + (row.get("inf") or 0)
        rows.append(
            [
                name_cell(row["key"]),
                code_cell(f"{row['dtype']}{row['shape']}", "keep"),
                Cell(histogram(row.get("histogram"))),
                *[number_cell(row.get(name), number_text(row.get(name))) for name in _MEASURES],
                number_cell(share, "" if share is None else f"{share:.1%}"),
                Cell(f"{bad:,}" if bad else "0", bad, "n bad" if bad else "n"),
                code_cell(row["target"], "keep"),
            ]
        )
    columns = ("node", "value", "histogram", *_MEASURES, "zeros", "NaN, Inf", "target")
    text = f"Every value of one run of the program at level {seen.statistics_level}, on the example inputs. Also in "
    intro = element("p", f"{escape(text)}{link('statistics.json')}.", class_="note")
    return intro + table(columns, rows, find="node, target, shape", more=link("statistics.json"))


# ---- what capture specialised ----


def diagnosis_section(seen: Seen) -> str:
    """Whether the program is right, what holds only for the example, and what was kept whole."""
    diagnosis = seen.diagnosis
    if diagnosis is None:
        return NOTHING
    parts = [
        element("h3", "What capture specialised"),
        _findings(diagnosis.specialised, "Nothing: the program holds for every input of its kind."),
        element("h3", "What was kept whole"),
        _findings(diagnosis.leaves, "Nothing."),
    ]
    if diagnosis.verification is not None:
        verdict = "does what the model does" if diagnosis.ok else "does NOT do what the model does"
        parts.append(element("h3", "Checked against the model"))
        parts.append(element("p", f"The program at level module {verdict}, run beside it in these situations:"))
        columns = ("situation", "verdict", "reason")
        rows = [
            [
                text_cell(check.situation),
                Cell(element("span", escape(check.status), class_=f"chip {escape(check.status)}")),
                text_cell(check.reason),
            ]
            for check in diagnosis.verification.checks
        ]
        parts.append(table(columns, rows))
    return "".join(parts)


def _findings(findings: tuple[Finding, ...], nothing: str) -> str:
    if not findings:
        return element("p", escape(nothing), class_="note")
    items = []
    for finding in findings:
        times = f' <span class="chip">{finding.count} in all</span>' if finding.count > 1 else ""
        where = element("code", escape(finding.where)) if finding.where else ""
        items.append(f"<li>{escape(finding.what)}{times}{where}<span class=note>{escape(finding.remedy)}</span></li>")
    return element("ul", "".join(items), class_="findings")


# ---- machines that are not here ----


def simulation_section(seen: Seen) -> str:
    """All machines, and the nodes of the program on the first."""
    if seen.simulation is None:
        return NOTHING
    files = f"Also in {link('simulation.json')} and, as a timeline for Perfetto, in {link('simulation-trace.json')}."
    intro = element("p", f"Nothing was measured: these are simulations of the run above. {files}", class_="note")
    parts = [intro]
    if seen.machines is not None:
        parts.append(_machines(seen.machines))
    parts += [element("h3", escape(f"On {seen.simulation.machine.name}")), _nodes(seen.simulation)]
    return "".join(parts)


def _machines(found: WhatIf) -> str:
    columns = ("machine", "mode", "precision", "a run", "examples a second", "memory", "bound by", "note")
    rows = [
        [
            text_cell(row.machine),
            text_cell(row.mode),
            text_cell(row.precision),
            number_cell(row.seconds, "-" if row.seconds is None else seconds_text(row.seconds)),
            number_cell(row.throughput, amount(row.throughput)),
            number_cell(row.peak_bytes, amount(row.peak_bytes, "B")),
            text_cell(row.bound),
            text_cell(row.note),
        ]
        for row in found.results
    ]
    return table(columns, rows)


def _nodes(simulation: Simulation) -> str:
    whole = simulation.seconds or 1.0
    longest = sorted(simulation.nodes, key=lambda node: -node.seconds)[:MOST_NODES]
    rows = [
        [
            name_cell(node.name),
            number_cell(node.seconds, seconds_text(node.seconds)),
            number_cell(node.seconds / whole, f"{node.seconds / whole:.1%}"),
            Cell(bar(node.seconds / whole)),
            text_cell(node.bound),
            number_cell(node.kernels),
            number_cell(node.flops, amount(node.flops)),
            number_cell(node.bytes, amount(node.bytes, "B")),
            code_cell(node.target, "keep"),
        ]
        for node in longest
    ]
    columns = ("node", "time", "share", "", "bound by", "kernels", "FLOPs", "bytes", "target")
    note = element("p", escape(simulation.headline()), class_="note")
    return note + table(columns, rows, find="node, target", more=link("simulation.json"))
