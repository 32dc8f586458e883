"""The section of the page about machines that are not here: how long a run would take on each, and what takes it on one of them.
The simulations are made in `seen.py`; what they hold is decided in `analysis/simulate/`.
"""

from __future__ import annotations

from torchgraft.analysis.simulate import Simulation, WhatIf
from torchgraft.reporting.markup import (
    Cell,
    bar,
    code_cell,
    element,
    escape,
    link,
    name_cell,
    number_cell,
    table,
    text_cell,
)
from torchgraft.reporting.run_sections import NOTHING
from torchgraft.reporting.seen import Seen
from torchgraft.results.tables import amount, seconds_text

MOST_NODES = 100


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
