"""The sections of the page about programs: the levels side by side, and each level with its drawing, text, calls and files.
The rest of the page is in `page.py` and `run_sections.py`.
"""

from __future__ import annotations

import re

from torchgraft.reporting.files import LevelTexts, Written
from torchgraft.reporting.levels import Counts, Level, node_rows
from torchgraft.reporting.markup import (
    Cell,
    bar,
    code_block,
    code_cell,
    element,
    escape,
    line_cell,
    link,
    name_cell,
    number_cell,
    table,
    text_cell,
)
from torchgraft.reporting.seen import Seen
from torchgraft.results.tables import amount, seconds_text

MOST_CALLS = 12
JIT = "torch.jit.trace"


# ---- side by side ----


def side_by_side(seen: Seen, written: Written) -> str:
    """The counts of every level and of torch.jit.trace in one table, what is called most, and two texts next to each other."""
    counted = [(level.title, level.name, level.counts, level.seconds) for level in seen.levels.values()]
    counted.append((JIT, "jit", seen.script.counts, 0.0))
    most = max([counts.nodes for _, _, counts, _ in counted if counts is not None], default=1)
    rows = [_count_row(title, name, counts, seconds, most) for title, name, counts, seconds in counted]
    columns = ("program", "nodes", "", "calls", "different", "inputs", "state fetched", "guards", "capture")
    intro = (
        "The same model, captured in every way, beside what <code>torch.jit.trace</code> writes for it with everything inlined, "
        "the comparison of section 6.1 of the paper on torch.fx. Nodes are all rows of a program; calls are those that compute; "
        "what <code>torch.jit.trace</code> has besides are constants, lists and reads of attributes, each a node of its own."
    )
    cards = [_most_called(title, counts) for title, _, counts, _ in counted if counts is not None]
    return "".join(
        [
            element("p", intro),
            table(columns, rows),
            element("h3", "What is called most"),
            element("div", "".join(cards), class_="cards calls"),
            element("h3", "Two texts next to each other"),
            _two_texts(seen, written),
        ]
    )


def _count_row(title: str, name: str, counts: Counts | None, seconds: float, most: int) -> list[Cell]:
    label = escape(title) if name == "jit" else element("a", escape(title), href=f"#level-{name}")
    if counts is None:
        nothing = number_cell(None, "")
        return [Cell(label), nothing, Cell('<a href="#failures">unavailable</a>', None, "wide"), *[nothing] * 6]
    return [
        Cell(label),
        number_cell(counts.nodes),
        Cell(bar(counts.nodes / most, "other" if name == "jit" else ""), None, "wide"),
        *map(number_cell, (counts.calls, counts.different_calls, counts.inputs, counts.state)),
        number_cell(counts.guards, f"{counts.guards:,}" if name != "jit" else "none"),
        number_cell(seconds, seconds_text(seconds) if seconds else ""),
    ]


def _most_called(title: str, counts: Counts) -> str:
    shown = list(counts.by_call.items())[:MOST_CALLS]
    most = shown[0][1] if shown else 1
    lines = [
        f'<li><code title="{escape(name)}">{escape(_short(name))}</code>{bar(count / most)}<b>{count:,}</b></li>'
        for name, count in shown
    ]
    left = len(counts.by_call) - len(shown)
    note = element("p", f"and {left} more", class_="note") if left > 0 else ""
    return element("div", f"<h4>{escape(title)}</h4><ol>{''.join(lines)}</ol>{note}", class_="card")


def _short(name: str) -> str:
    """An operator without its namespace and its usual overload, as there is little room."""
    for prefix in ("aten.", "aten::", "torch._C._nn.", "torch."):
        name = name.removeprefix(prefix)
    return name.removesuffix(".default")


def _two_texts(seen: Seen, written: Written) -> str:
    choices = [(f"code-{level.name}", level.title) for level in seen.programs() if written.texts[level.name].readable]
    if seen.script.text:
        choices.append(("code-jit", JIT))
    if len(choices) < 2:
        return element("p", "There are no two texts to compare.", class_="note")
    panes = [_pane(choices, chosen) for chosen in (choices[0][0], choices[-1][0])]
    return element("div", "".join(panes), class_="panes")


def _pane(choices: list[tuple[str, str]], chosen: str) -> str:
    options = [
        element("option", escape(title), value=identity, selected=True if identity == chosen else None)
        for identity, title in choices
    ]
    select = element("select", "".join(options), aria_label="program to show")
    return element("div", f'{select}<pre tabindex="0"><code></code></pre>', class_="pane")


# ---- one level ----


def level_section(level: Level, written: Written) -> str:
    """Everything about one level, in tabs."""
    intro = element("p", escape(level.explanation))
    if level.failure:
        return intro + element("p", f"<b>Unavailable:</b> {escape(level.failure)}", class_="failure")
    texts, counts = written.texts[level.name], level.counts
    assert counts is not None
    facts = (
        f"<b>{counts.nodes:,}</b> nodes, <b>{counts.calls:,}</b> calls of <b>{counts.different_calls:,}</b> kinds, "
        f"<b>{counts.guards:,}</b> guard{'' if counts.guards == 1 else 's'}, captured in <b>{seconds_text(level.seconds)}</b>"
    )
    notes = "".join([element("p", escape(note), class_="note") for note in level.notes])
    tabs = [
        ("Drawing", _viewer(level.name, texts)),
        (
            "Code",
            code_block(texts.readable, f"code-{level.name}", f"programs/{level.name}.py") if texts.readable else "",
        ),
        ("Nodes", _nodes(level)),
        ("Calls", _all_calls(counts)),
        ("Files", _files_of(level.name, written)),
    ]
    return intro + element("p", facts, class_="note") + notes + tab_group(level.name, tabs)


def tab_group(name: str, tabs: list[tuple[str, str]]) -> str:
    """Panels of which one is shown; without scripts all are."""
    buttons, panels = [], []
    for place, (title, content) in enumerate([tab for tab in tabs if tab[1]]):
        tab, panel, is_first = f"tab-{name}-{place}", f"panel-{name}-{place}", place == 0
        attributes = {"type": "button", "role": "tab", "id": tab, "aria_controls": panel}
        selected = "true" if is_first else "false"
        buttons.append(element("button", escape(title), **attributes, aria_selected=selected))
        look = "panel" if is_first else "panel away"
        panels.append(element("div", content, role="tabpanel", id=panel, aria_labelledby=tab, class_=look))
    row = element("div", "".join(buttons), role="tablist", class_="tabs")
    return element("div", row + "".join(panels), class_="tab-group")


_STYLE = re.compile(r"<style>.*?</style>\n?", re.DOTALL)
_CLASS = re.compile(r'class="graft-\w+"')


def inline_svg(svg: str) -> str:
    """A drawing without its own style sheet: the page has one for all, which follows the page's light or dark."""
    return _CLASS.sub('class="drawing"', _STYLE.sub("", svg, count=1), count=1)


def _viewer(name: str, texts: LevelTexts) -> str:
    if not texts.drawings:
        return element("p", "There is no drawing of this level.", class_="failure")
    templates, options = [], []
    # The folded one comes first: it is the one to begin with where there are two.
    drawings = sorted(texts.drawings.items(), key=lambda entry: not entry[0].endswith("-folded.svg"))
    for place, (path, svg) in enumerate(drawings):
        identity = f"drawing-{name}-{place}"
        templates.append(f'<template id="{identity}">{inline_svg(svg)}</template>')
        title = "repeated blocks once" if path.endswith("-folded.svg") else "every node"
        options.append(element("option", title, value=identity, data_file=path))
    choice = element("select", "".join(options), aria_label="which drawing") if len(options) > 1 else ""
    first = drawings[0][0]
    buttons = "".join(
        [
            element("button", sign, type="button", data_do=action, title=title, aria_label=title)
            for action, sign, title in _BUTTONS
        ]
    )
    find = '<label class="find">Find <input type="search" placeholder="name or shape"><output></output></label>'
    file = link(first, "SVG file")
    bar_ = element("div", f"{choice}{buttons}{find}{file}", class_="bar")
    stage = '<div class="stage" tabindex="0" role="application" aria-label="drawing: drag to move, plus and minus to zoom"></div>'
    hint = element(
        "p", "Drag to move, Ctrl and wheel or double click to zoom, hover to see arguments and lines.", class_="note"
    )
    without = element("noscript", element("p", f"Drawings: {', '.join([link(path) for path in texts.drawings])}"))
    return element(
        "div", bar_ + stage + hint + without + "".join(templates), class_="viewer", data_drawing=f"drawing-{name}-0"
    )


_BUTTONS = (
    ("in", "+", "zoom in"),
    ("out", "\N{MINUS SIGN}", "zoom out"),
    ("fit", "Fit", "show the whole drawing"),
    ("one", "1:1", "real size, from the top"),
    ("full", "Full screen", "full screen"),
)


def _nodes(level: Level) -> str:
    rows = [
        [
            number_cell(place),
            name_cell(row.name),
            text_cell(row.op, "keep"),
            code_cell(row.target, "keep"),
            code_cell(row.value, "keep"),
            code_cell(row.module, "keep"),
            line_cell(row.place, row.line),
            code_cell(row.arguments, "long"),
        ]
        for place, row in enumerate(node_rows(level))
    ]
    columns = ("#", "name", "opcode", "target", "value", "module", "line", "arguments")
    return table(columns, rows, find="name, target, shape, module", more=link(f"programs/{level.name}-table.txt"))


def _all_calls(counts: Counts) -> str:
    rows = [
        [code_cell(name), number_cell(count), Cell(bar(count / (counts.calls or 1)), None, "wide")]
        for name, count in counts.by_call.items()
    ]
    return table(("call", "times", "share of all calls"), rows)


def _files_of(name: str, written: Written) -> str:
    own = [
        path for path in written.descriptions if re.match(rf"\w+/{name}[-.]", path) and not path.startswith("calls/")
    ]
    return file_table(written, own)


def file_table(written: Written, paths: list[str]) -> str:
    """Files with what they are and how large."""
    rows = []
    for path in paths:
        size = (written.folder / path).stat().st_size
        rows.append([Cell(link(path)), text_cell(written.descriptions[path]), number_cell(size, amount(size, "B"))])
    return table(("file", "what it is", "size"), rows)
