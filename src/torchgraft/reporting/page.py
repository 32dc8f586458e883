"""The page of a report: one HTML file with its style and its script inside, which needs no server and no network.
The sections are made in `level_section.py` and `run_sections.py`; here they are put in order under a heading and a navigation.
"""

from __future__ import annotations

import platform
from importlib.resources import files

import torch

from torchgraft.reporting.facts import Fact
from torchgraft.reporting.files import Written
from torchgraft.reporting.level_section import file_table, level_section, side_by_side
from torchgraft.reporting.markup import code_block, element, escape
from torchgraft.reporting.run_sections import (
    calls_section,
    diagnosis_section,
    simulation_section,
    statistics_section,
    summary_section,
)
from torchgraft.reporting.seen import Failure, Seen
from torchgraft.results.tables import amount
from torchgraft.version import __version__
from torchgraft.view.drawing.theme import style_sheet

_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="torchgraft {version}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}
</style>
<script>
document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
</script>
</head>
<body>
<nav aria-label="sections">
<a class="brand" href="#top">torchgraft</a>
{navigation}
<button type="button" id="theme" aria-label="light or dark">Light or dark</button>
</nav>
<main id="top">
{body}
</main>
<script>
{script}
</script>
</body>
</html>
"""


def page(seen: Seen, written: Written, facts: list[Fact]) -> str:
    """The whole page as text."""
    sections = _sections(seen, written)
    entries = [
        element("a", escape(title), href=f"#{identity}", class_="inner" if depth else None)
        for identity, title, depth, _ in sections
    ]
    contents = [_section(identity, title, content) for identity, title, _, content in sections]
    return _TEMPLATE.format(
        version=__version__,
        title=f"{escape(seen.name)} · torchgraft",
        # One style sheet for all drawings of the page, which follows the page, not the system.
        style="\n".join(
            [_resource("page.css"), style_sheet("light", ".drawing"), style_sheet("dark", "[data-theme=dark] .drawing")]
        ),
        script=_resource("page.js"),
        navigation="\n".join(entries),
        body="\n".join([_heading(seen), _tiles(seen), _facts(facts), *contents]),
    )


def _resource(name: str) -> str:
    return files("torchgraft.reporting").joinpath(name).read_text(encoding="utf-8")


def _sections(seen: Seen, written: Written) -> list[tuple[str, str, int, str]]:
    """Identity, title, depth in the navigation, and content of every section; without a content it is only a title."""
    result = [("levels", "Side by side", 0, side_by_side(seen, written))]
    for level in seen.levels.values():
        result.append((f"level-{level.name}", level.title, 1, level_section(level, written)))
    if seen.script.text:
        text = code_block(seen.script.text, "code-jit", "programs/jit_trace.txt", False)
        result.append(("level-jit", "torch.jit.trace", 1, text))
    result += [
        ("summary", "Summary", 0, summary_section(seen)),
        ("calls", "Calls", 0, calls_section(seen)),
        ("statistics", "Statistics", 0, statistics_section(seen)),
        ("simulation", "On other machines", 0, simulation_section(seen)),
        ("specialised", "Specialised and checked", 0, diagnosis_section(seen)),
        ("failures", f"Unavailable ({len(seen.failures)})", 0, _failures(seen.failures)),
        ("files", "Files", 0, _all_files(written)),
    ]
    return result


def _section(identity: str, title: str, content: str) -> str:
    head = f"<summary><h2>{escape(title)}</h2></summary>"
    inner = element("details", head + content, open=None if identity == "level-jit" else True)
    return element("section", inner, id=identity)


# ---- the top ----


def _heading(seen: Seen) -> str:
    inputs = ", ".join([f"<code>{escape(name)}: {escape(text)}</code>" for name, text in seen.inputs]) or "no inputs"
    versions = f"torchgraft {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return (
        f'<header><p class="kind">{escape(seen.kind)}</p><h1>{escape(seen.name)}</h1>'
        f'<p>Run on {inputs}.</p><p class="note">{escape(versions)}</p></header>'
    )


def _tiles(seen: Seen) -> str:
    tiles = []
    if seen.summary is not None:
        whole = seen.summary.facts.modules[0]
        tiles += [
            ("parameters", amount(whole.parameters)),
            ("of weights", amount(whole.bytes, "B")),
            ("FLOPs a run", amount(whole.flops)),
        ]
    if seen.memory is not None:
        tiles.append(("peak memory", amount(seen.memory.peak, "B")))
    for level in seen.programs():
        if level.name in ("module", "aten", "joint") and level.counts is not None:
            tiles.append((f"nodes, {level.title}", f"{level.counts.nodes:,}"))
    cells = [f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>" for label, value in tiles]
    return element("div", "".join(cells), class_="tiles")


def _facts(facts: list[Fact]) -> str:
    items = [f"<li><b>{escape(fact.headline)}</b><span>{escape(fact.text)}</span></li>" for fact in facts]
    return element("ol", "".join(items), class_="facts") if items else ""


# ---- the end ----


def _failures(failures: list[Failure]) -> str:
    if not failures:
        return element("p", "Nothing: every level, log and drawing is here.", class_="note")
    items = [f"<li><b>{escape(failure.what)}</b><code>{escape(failure.reason)}</code></li>" for failure in failures]
    return element("ul", "".join(items), class_="findings failure")


def _all_files(written: Written) -> str:
    intro = (
        "Everything on this page as files. Graphs are read back with <code>torchgraft.load_graph</code>, the pickles also with "
        "<code>pickle.load</code> where there is no torch."
    )
    return element("p", intro) + file_table(written, list(written.descriptions))
