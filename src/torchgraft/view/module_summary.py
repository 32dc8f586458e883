"""`summary`: a model as a tree of its modules, with what each puts out, how many parameters it has and what it costs.
What is measured is in `module_facts.py`; here it is chosen, ordered and shown.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from torchgraft.codegen.calling import example_inputs
from torchgraft.errors import GraftError
from torchgraft.results.shown import Shown
from torchgraft.results.tables import aligned, amount, count, painted, shortened
from torchgraft.view.module_facts import ModelFacts, ModuleFacts, model_facts
from torchgraft.view.node_facts import facts_text

_UNKNOWN = "-"
_WIDEST = 60


def _share(part: int | None, whole: int | None) -> str:
    return _UNKNOWN if part is None or not whole else f"{part / whole:.1%}"


# What each column shows of a module; `whole` is the row of the model itself.
_COLUMNS: dict[str, tuple[str, Callable[[ModuleFacts, ModuleFacts], str]]] = {
    "input": ("input", lambda row, whole: facts_text(row.input) or _UNKNOWN),
    "output": ("output", lambda row, whole: facts_text(row.output) or _UNKNOWN),
    "parameters": ("parameters", lambda row, whole: f"{row.parameters:,}"),
    "trainable": ("trainable", lambda row, whole: f"{row.trainable:,}"),
    "share": ("share", lambda row, whole: _share(row.parameters, whole.parameters)),
    "bytes": ("bytes", lambda row, whole: amount(row.bytes)),
    "flops": ("FLOPs", lambda row, whole: amount(row.flops)),
    "flops_share": ("of FLOPs", lambda row, whole: _share(row.flops, whole.flops)),
    "calls": ("calls", lambda row, whole: _UNKNOWN if row.calls is None else str(row.calls)),
}
COLUMNS = tuple(_COLUMNS)
_TEXTS = ("input", "output")


class ModelSummary(Shown):
    """A model as a tree of modules; `modules` holds the facts about each, the model itself (path "") first.

    >>> import torch, torchgraft
    >>> summary = torchgraft.summary(torch.nn.Sequential(torch.nn.Linear(2, 3)), torch.ones(1, 2))
    >>> [(module.path, module.parameters) for module in summary.modules]
    [('', 9), ('0', 9)]
    """

    def __init__(self, facts: ModelFacts, depth: int | None, columns: tuple[str, ...], fold: bool = True) -> None:
        self.facts = facts
        self.depth = depth
        self.columns = columns
        self.fold = fold

    @property
    def modules(self) -> list[ModuleFacts]:
        """Every module down to the chosen depth."""
        return [row for row in self.facts.modules if self.depth is None or row.depth <= self.depth]

    def __getitem__(self, path: str) -> ModuleFacts:
        """The facts about the module at a path."""
        for row in self.facts.modules:
            if row.path == path:
                return row
        raise KeyError(f"{self.facts.modules[0].type} has no module '{path}'")

    def headline(self) -> str:
        whole = self.facts.modules[0]
        flops = "" if whole.flops is None else f", {amount(whole.flops, 'FLOPs')} forward"
        return (
            f"{whole.type}, {count(len(self.facts.modules), 'module')}, {count(whole.parameters, 'parameter')}{flops}"
        )

    def text(self, color: bool = False) -> str:
        """The tree as a table."""
        shown = self._shown()
        rows = [row for row, _ in shown]
        heads = ["module", *[_COLUMNS[name][0] for name in self.columns]]
        cells = [
            [self._label(index, rows, equal), *[shortened(cell, _WIDEST) for cell in self._cells(row)]]
            for index, (row, equal) in enumerate(shown)
        ]
        numbers = [place for place, name in enumerate(self.columns, 1) if name not in _TEXTS]
        lines = aligned([heads, *cells], numbers)
        rule = "-" * max(map(len, lines))
        return "\n".join([painted(lines[0], "bold", color), rule, *lines[1:], rule, *self.facts.notes()])

    def _cells(self, row: ModuleFacts) -> list[str]:
        return [_COLUMNS[name][1](row, self.facts.modules[0]) for name in self.columns]

    def _shown(self) -> list[tuple[ModuleFacts, int]]:
        """The rows to show, each with the number of equal modules that it stands for."""
        return folded(self.modules) if self.fold else [(row, 1) for row in self.modules]

    def _label(self, index: int, rows: list[ModuleFacts], equal: int) -> str:
        row = rows[index]
        if not row.depth:
            return row.type
        branches = ["├─ " if _has_sibling(index, row.depth, rows) else "└─ "]
        branches += ["│  " if _has_sibling(index, depth, rows) else "   " for depth in range(row.depth - 1, 0, -1)]
        return f"{''.join(reversed(branches))}{_name(row, equal)}"

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each module, with all columns."""
        whole = self.facts.modules[0]
        result = []
        for row in self.modules:
            values = asdict(row)
            values["input"], values["output"] = facts_text(row.input) or None, facts_text(row.output) or None
            values["share"] = row.parameters / whole.parameters if whole.parameters else None
            values["flops_share"] = row.flops / whole.flops if row.flops is not None and whole.flops else None
            result.append(values)
        return result

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.facts.modules[0].type, "notes": self.facts.notes(), "modules": self.rows()}

    def _repr_html_(self) -> str:
        head = "".join([f"<th>{html.escape(_COLUMNS[name][0])}</th>" for name in self.columns])
        body = []
        for row, equal in self._shown():
            name = html.escape(_name(row, equal) if row.depth else row.type)
            first = f'<td style="text-align: left; padding-left: {1.2 * row.depth:.1f}em">{name}</td>'
            cells = [f"<td>{html.escape(cell)}</td>" for cell in self._cells(row)]
            body.append(f'<tr title="{html.escape(row.path)}">{first}{"".join(cells)}</tr>')
        notes = "".join([f"<p>{html.escape(note)}</p>" for note in self.facts.notes()])
        return f"<table><thead><tr><th>module</th>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>{notes}"


def _name(row: ModuleFacts, equal: int) -> str:
    if equal > 1:
        return f"{row.name} to {int(row.name) + equal - 1}: {equal} × {row.type}, each"
    return f"{row.name}: {row.type}{' (shared)' if row.shared else ''}"


def folded(rows: list[ModuleFacts]) -> list[tuple[ModuleFacts, int]]:
    """Rows without the numbered modules that are, inside and out, as the one before; each with how many it stands for."""
    result: list[tuple[ModuleFacts, int]] = []
    index = 0
    while index < len(rows):
        first, form, equal = rows[index], _form(rows, index), 1
        while first.name.isdecimal() and _is_one_more(rows, index + equal * len(form), int(first.name) + equal, form):
            equal += 1
        result += [(first, equal), *folded(rows[index + 1 : index + len(form)])]
        index += equal * len(form)
    return result


def _is_one_more(rows: list[ModuleFacts], index: int, number: int, form: list[ModuleFacts]) -> bool:
    return index < len(rows) and rows[index].name == str(number) and _form(rows, index) == form


def _form(rows: list[ModuleFacts], index: int) -> list[ModuleFacts]:
    """What is known of a module and of everything inside it, without where it is."""
    ends = (i for i in range(index + 1, len(rows)) if rows[i].depth <= rows[index].depth)
    inside = rows[index + 1 : next(ends, len(rows))]
    return [replace(rows[index], path="", name=""), *[replace(row, path="") for row in inside]]


def _has_sibling(index: int, depth: int, rows: list[ModuleFacts]) -> bool:
    """Whether the branch at `depth` goes on below row `index`."""
    for row in rows[index + 1 :]:
        if row.depth <= depth:
            return row.depth == depth
    return False


def summary(
    model: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    depth: int | None = None,
    columns: Iterable[str] = ("output", "parameters", "share", "flops"),
    fold: bool = True,
) -> ModelSummary:
    """A tree of the modules of a model or program: outputs, parameters, their share of all, FLOPs.

    `args` are example inputs (a tuple, or one tensor); without them there are no outputs and FLOPs. `depth` is how far down to
    go: 0 shows the model alone. `columns` are some of "input", "output", "parameters", "trainable", "share", "bytes", "flops",
    "flops_share" and "calls". Numbered layers that are equal in all of this are shown once, unless `fold` is False. Nothing is
    computed where tensors without data will do; the model stays as it is.

    >>> import torch
    >>> print(summary(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()), torch.ones(2, 4)))
    module        output     parameters   share  FLOPs
    --------------------------------------------------
    Sequential    f32[2, 8]          40  100.0%    144
    ├─ 0: Linear  f32[2, 8]          40  100.0%    128
    └─ 1: ReLU    f32[2, 8]           0    0.0%     16
    --------------------------------------------------
    40 parameters (40 trainable, 0 not), 160 bytes; 144 FLOPs forward for f32[2, 4] (a multiply-add is two)
    """
    if isinstance(columns, str):
        columns = columns.split(",")
    chosen = tuple(name.strip() for name in columns)
    unknown = [name for name in chosen if name not in _COLUMNS]
    if unknown:
        raise GraftError(f"summary has no column {unknown[0]!r}\nchoose some of {', '.join(COLUMNS)}")
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
        raise GraftError(f"depth must be a whole number from 0 on, or None for everything, not {depth!r}")
    values, keywords = example_inputs(args, kwargs)
    wants_flops = any(name.startswith("flops") for name in chosen)
    return ModelSummary(model_facts(model, values, keywords, wants_flops), depth, chosen, fold)
