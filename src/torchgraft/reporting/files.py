"""The files of a report besides its page: programs as text, drawings, graphs, logs and tables.
The page, which links to all of them, is made in `page.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import one_line
from torchgraft.reporting.levels import Level, node_rows
from torchgraft.reporting.seen import Failure, Seen
from torchgraft.results.progress import stage
from torchgraft.results.shown import plain
from torchgraft.results.tables import Table
from torchgraft.view.drawing import draw
from torchgraft.view.graph_files import save_graph
from torchgraft.view.networkx_graph import to_networkx

GRAPH_FORMATS = ("pickle", "graphml", "json")
MOST_DRAWN = 8000  # nodes; a larger program is drawn folded only, because nobody could look at more


@dataclass
class LevelTexts:
    """What the page shows of one level: the program as text, and the drawings by name of file."""

    readable: str = ""
    drawings: dict[str, str] = field(default_factory=dict)


@dataclass
class Written:
    """The files of a folder, each with what it is, and what the page shows of them."""

    folder: Path
    descriptions: dict[str, str] = field(default_factory=dict)
    texts: dict[str, LevelTexts] = field(default_factory=dict)

    def text(self, name: str, content: str, description: str) -> None:
        """Write a text file."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
        self.descriptions[name] = description

    def table(self, name: str, content: Any, description: str) -> None:
        """Write plain values as JSON."""
        self.text(name, json.dumps(plain(content), indent=1) + "\n", description)


def write_files(seen: Seen, folder: Path) -> Written:
    """Write everything but the page. What cannot be made is noted in `seen.failures`; a full disk is raised."""
    written = Written(folder)
    levels = list(seen.programs())
    for number, level in enumerate(levels, 1):
        with stage(f"level {level.name}", number, len(levels)):
            _write_level(seen, written, level)
    if seen.script.text:
        written.text("programs/jit_trace.txt", seen.script.text, "the same model as torch.jit.trace writes it")
    if seen.summary is not None:
        written.table("summary.json", seen.summary.to_dict(), "the tree of modules: outputs, parameters, FLOPs")
    for name, log in seen.calls.items():
        written.table(f"calls/{name}.json", log.to_dict(), f"the log of calls at level {name}")
        trace = f"calls/{name}-trace.json"
        written.text(
            trace, log.to_chrome_trace() + "\n", f"the same log for chrome://tracing and Perfetto (level {name})"
        )
    if seen.statistics is not None:
        written.table("statistics.json", seen.statistics.to_dict(), "statistics of every value of one run")
    if seen.simulation is not None:
        content = {**seen.simulation.to_dict(), "machines": None if seen.machines is None else seen.machines.rows()}
        written.table("simulation.json", content, "a run on machines that are not here: the time of every node")
        trace = seen.simulation.to_chrome_trace() + "\n"
        written.text("simulation-trace.json", trace, "the timeline of that run for chrome://tracing and Perfetto")
    if seen.diagnosis is not None:
        written.table(
            "diagnosis.json", seen.diagnosis.to_dict(), "the check against the model and what was specialised"
        )
    return written


def _write_level(seen: Seen, written: Written, level: Level) -> None:
    program = level.program
    assert program is not None
    texts = written.texts[level.name] = LevelTexts()

    def write_texts() -> None:
        texts.readable = program.print_readable(print_output=False)
        written.text(
            f"programs/{level.name}.py",
            texts.readable + "\n",
            f"the program at level {level.name}, with shapes and lines",
        )
        written.text(
            f"programs/{level.name}-table.txt", _table_text(level) + "\n", f"one row a node at level {level.name}"
        )

    def write_graphs() -> None:
        graph = to_networkx(program)
        (written.folder / "graphs").mkdir(exist_ok=True)
        for suffix in GRAPH_FORMATS:
            name = f"graphs/{level.name}.{suffix}"
            save_graph(graph, written.folder / name)
            written.descriptions[name] = f"the graph at level {level.name} for NetworkX, as {_FORMAT_NAMES[suffix]}"

    _part(seen, f"the text of level {level.name}", write_texts)
    for folded in (False, True):
        _part(seen, f"the drawing of level {level.name}", partial(_draw, written, level, program, folded))
    _part(seen, f"the graph of level {level.name}", write_graphs)


def _table_text(level: Level) -> str:
    columns = ("name", "opcode", "target", "arguments", "value", "module", "line")
    return Table("", columns, [tuple(row)[: len(columns)] for row in node_rows(level)]).text()


_FORMAT_NAMES = {"pickle": "a pickle that needs no torch to be read", "graphml": "GraphML", "json": "node-link JSON"}


def _draw(written: Written, level: Level, program: GraphModule, folded: bool) -> None:
    if not folded and len(program.graph.nodes) > MOST_DRAWN:
        return
    drawing = draw(program, fold=folded, title=f"{type(program).__name__}: {level.title}")
    texts = written.texts[level.name]
    if folded and drawing.svg in texts.drawings.values():
        return  # nothing repeats, so both are the same
    name = f"drawings/{level.name}{'-folded' if folded else ''}.svg"
    what = "with repeated blocks drawn once" if folded else "every node"
    written.text(name, drawing.svg, f"a drawing of level {level.name}, {what}")
    texts.drawings[name] = drawing.svg


def _part(seen: Seen, what: str, step: Callable[[], None]) -> None:
    try:
        step()
    except Exception as error:
        if isinstance(error, OSError) or isinstance(error.__cause__, OSError):
            raise  # no room, or no permission: that is the end of the whole report
        seen.failures.append(Failure(what, one_line(error)))
