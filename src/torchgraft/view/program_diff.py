"""`diff`: what changed between two programs, node by node, as text, HTML, JSON and rows.
Which nodes belong together is decided in `alignment.py`.
"""

from __future__ import annotations

import html
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchgraft.codegen.calling import example_inputs
from torchgraft.ir.node import Node, map_arg
from torchgraft.ir.printing import target_text
from torchgraft.ir.verify import find_attribute
from torchgraft.results.shown import Shown
from torchgraft.results.tables import painted
from torchgraft.view.alignment import align
from torchgraft.view.call_info import node_call_info
from torchgraft.view.node_facts import Facts, facts_text, graph_of, known_facts
from torchgraft.view.plain import argument_text, short_text

_ABSENT = "(none)"
_HTML_COLOURS = {"removed": "#fdd8d8", "added": "#d5f2d9", "changed": "#fdf3cd"}


@dataclass(frozen=True)
class NodeChange:
    """Two nodes that belong together, or one without a counterpart; each is given by its name and its line of text.

    `status` is "same", "renamed" (only the name differs), "changed", "removed" or "added".

    >>> import torchgraft
    >>> before, after = (torchgraft.symbolic_trace(f) for f in (lambda x: x.relu(), lambda x: x.tanh()))
    >>> [(change.status, change.before, change.after) for change in torchgraft.diff(before, after)]
    [('same', 'x', 'x'), ('changed', 'relu', 'tanh'), ('same', 'output', 'output')]
    """

    status: str
    before: str | None
    after: str | None
    before_line: str
    after_line: str
    details: tuple[str, ...] = ()


class ProgramDiff(Shown):
    """What changed between two programs. True where anything but names did; iterating gives every `NodeChange`, in order.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: x.relu())
    >>> bool(torchgraft.diff(program, program)), torchgraft.diff(program, program).counts["same"]
    (False, 3)
    """

    def __init__(self, before: str, after: str, changes: list[NodeChange]) -> None:
        self.before = before
        self.after = after
        self.changes = changes

    def __iter__(self) -> Any:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def __bool__(self) -> bool:
        return any(change.status not in ("same", "renamed") for change in self.changes)

    @property
    def counts(self) -> dict[str, int]:
        """How many nodes are the same, renamed, changed, removed and added."""
        found = Counter(change.status for change in self.changes)
        return {status: found[status] for status in ("same", "renamed", "changed", "removed", "added")}

    def text(self, color: bool = False, context: int | None = 3) -> str:
        """The changes with so many unchanged nodes around each (None: all of them)."""
        lines = [painted(self._title(), "bold", color)]
        for item in self._shown(context):
            is_hidden = isinstance(item, int)
            lines += [painted(_hidden_text(item), "dim", color)] if is_hidden else _change_lines(item, color)
        return "\n".join(lines)

    def _shown(self, context: int | None) -> Iterator[Any]:
        """The changes to show, and in the place of others how many they are."""
        for is_near, group in itertools.groupby(
            zip(self._near(context), self.changes, strict=True), lambda item: item[0]
        ):
            changes = [change for _, change in group]
            yield from changes if is_near else [len(changes)]

    def _title(self) -> str:
        parts = [f"{count} {status}" for status, count in self.counts.items() if count]
        return f"{self.before} -> {self.after}: {', '.join(parts) or 'no nodes'}"

    def _near(self, context: int | None) -> list[bool]:
        if context is None:
            return [True] * len(self.changes)
        near = [False] * len(self.changes)
        for index, change in enumerate(self.changes):
            if change.status not in ("same", "renamed"):
                low, high = max(index - context, 0), min(index + context + 1, len(near))
                near[low:high] = [True] * (high - low)
        return near

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each pair of nodes."""
        return [{**vars(change), "details": list(change.details)} for change in self.changes]

    def to_dict(self) -> dict[str, Any]:
        return {"before": self.before, "after": self.after, "counts": self.counts, "changes": self.rows()}

    def _repr_html_(self) -> str:
        rows = [_html_hidden(item) if isinstance(item, int) else _html_row(item) for item in self._shown(3)]
        style = "border-collapse: collapse; font-family: monospace; text-align: left"
        head = f"<tr><th>{html.escape(self.before)}</th><th>{html.escape(self.after)}</th><th></th></tr>"
        return f'<p>{html.escape(self._title())}</p><table style="{style}">{head}{"".join(rows)}</table>'


def diff(before: Any, after: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> ProgramDiff:
    """What changed from one program to another: nodes added, removed, and changed in target, arguments, settings or shape.

    Nodes are lined up by what they do, so one more `relu` at the front does not make everything after it differ. Example inputs
    let shapes be compared as well; without them they are where metadata has them. Values of parameters are not compared
    (`torchgraft.compare` runs both programs).

    >>> import torchgraft
    >>> before = torchgraft.symbolic_trace(lambda x: torch.relu(x) + 1)
    >>> after = torchgraft.symbolic_trace(lambda x: torch.nn.functional.gelu(x) + 1)
    >>> print(diff(before, after))
    <lambda> -> <lambda>: 3 same, 1 changed
      x = input('x')
    - relu = torch.relu(x)
    + gelu = torch._C._nn.gelu(x)
        target: torch.relu -> torch._C._nn.gelu
      add = operator.add(gelu, 1)
      return add
    """
    args, kwargs = example_inputs(args, kwargs)
    old_graph, old_owner = graph_of(before, args, kwargs)
    new_graph, new_owner = graph_of(after, args, kwargs)
    old_facts, new_facts = known_facts(old_graph, args, kwargs), known_facts(new_graph, args, kwargs)
    pairs = align(old_graph, new_graph)
    counterpart = {old: new for old, new in pairs if old is not None and new is not None}
    changes = []
    for old, new in pairs:
        if old is None or new is None:
            node: Any = new if old is None else old
            line = node_line(node, (new_facts if old is None else old_facts)[node])
            status = "added" if old is None else "removed"
            sides = (None, node.name, "", line) if old is None else (node.name, None, line, "")
            changes.append(NodeChange(status, *sides))
            continue
        details = _details(old, new, counterpart, old_facts[old], new_facts[new])
        status = "changed" if details else "same" if old.name == new.name else "renamed"
        lines = node_line(old, old_facts[old]), node_line(new, new_facts[new])
        changes.append(NodeChange(status, old.name, new.name, *lines, tuple(details)))
    names = [type(old_owner).__name__, type(new_owner).__name__]
    modes = [getattr(owner, "training", False) for owner in (old_owner, new_owner)]
    if modes[0] != modes[1]:
        names = [
            f"{name} in {'training' if mode else 'evaluation'} mode" for name, mode in zip(names, modes, strict=True)
        ]
    return ProgramDiff(names[0], names[1], changes)


# ---- one pair ----


def _details(old: Node, new: Node, counterpart: dict[Node, Node], old_facts: Facts, new_facts: Facts) -> list[str]:
    """What differs between two nodes that belong together, one text for each thing."""
    result = []
    for word, left, right in (("opcode", old.op, new.op), ("target", target_text(old.target), target_text(new.target))):
        if left != right:
            result.append(f"{word}: {left} -> {right}")
    old_info, new_info = node_call_info(old), node_call_info(new)
    mapped = {
        name: map_arg(value, lambda node: counterpart.get(node, node)) for name, value in old_info.arguments.items()
    }
    # Another function has other defaults; that it is another says it all.
    names = [name for name in mapped if name in new_info.arguments] if result else [*mapped, *new_info.arguments]
    for name in dict.fromkeys(names):
        left = _argument(mapped, name)
        right = _argument(new_info.arguments, name)
        if left != right:
            result.append(f"{name}: {_argument(old_info.arguments, name)} -> {right}")
    if old.op == new.op:
        left, right = _setting(old), _setting(new)
        if left != right:
            result.append(f"{'module' if old.op == 'call_module' else 'value'}: {left} -> {right}")
    if old_facts != new_facts and old_facts is not None and new_facts is not None:
        left, right = facts_text(old_facts), facts_text(new_facts)
        if left != right and old.op != "get_attr":
            result.append(f"result: {left} -> {right}")
    if old.type != new.type:
        result.append(f"type: {old.type} -> {new.type}")
    return result


def _argument(arguments: dict[str, Any], name: str) -> str:
    return argument_text(arguments[name]) if name in arguments else _ABSENT


def _setting(node: Node) -> str:
    """What a node refers to in its module: the settings of a submodule, shape and dtype of a tensor."""
    owner = node.graph.owning_module
    if node.op not in ("call_module", "get_attr") or owner is None:
        return ""
    value, problem = find_attribute(owner, node.target)
    if problem is not None:
        return "(missing)"
    if isinstance(value, torch.nn.Module):
        return " ".join(str(value).split())
    if isinstance(value, torch.Tensor):
        kind = "parameter " if isinstance(value, torch.nn.Parameter) else ""
        return f"{kind}{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return short_text(value)


def node_line(node: Node, facts: Facts = None) -> str:
    """A node as a line of Python, with the shape of its result behind it where that is known.

    >>> from torchgraft import Graph
    >>> graph = Graph()
    >>> node_line(graph.call_method("view", (graph.placeholder("x"), 2, -1)))
    'view = x.view(2, -1)'
    """
    args = [argument_text(item, mark="") for item in node.args]
    args += [f"{key}={argument_text(value, mark='')}" for key, value in node.kwargs.items()]
    target = target_text(node.target)
    if node.op == "placeholder":
        line = f"{node.name} = input({', '.join([repr(target), *args])})"
    elif node.op == "output":
        line = f"return {', '.join(args)}"
    elif node.op == "get_attr":
        line = f"{node.name} = self.{target}"
    elif node.op == "call_module":
        line = f"{node.name} = self.{target}({', '.join(args)})"
    elif node.op == "call_method" and args:
        line = f"{node.name} = {args[0]}.{target}({', '.join(args[1:])})"
    else:
        line = f"{node.name} = {target}({', '.join(args)})"
    known = facts_text(facts) if node.op not in ("output",) else ""
    return f"{line}  # {known}" if known else line


# ---- texts ----


def _change_lines(change: NodeChange, color: bool) -> list[str]:
    if change.status == "same":
        return [painted(f"  {change.after_line}", "dim", color)]
    if change.status == "renamed":
        return [painted(f"  {change.after_line}    (was {change.before})", "dim", color)]
    lines = []
    if change.before is not None:
        lines.append(painted(f"- {change.before_line}", "red", color))
    if change.after is not None:
        lines.append(painted(f"+ {change.after_line}", "green", color))
    return lines + [painted(f"    {detail}", "yellow", color) for detail in change.details]


def _hidden_text(count: int) -> str:
    return f"  ... {count} {'node' if count == 1 else 'nodes'} the same"


def _html_row(change: NodeChange) -> str:
    colour = _HTML_COLOURS.get(change.status)
    style = f' style="background: {colour}; color: #222"' if colour else ""
    cells = [change.before_line, change.after_line, "; ".join(change.details)]
    return f"<tr{style}>{''.join([f'<td>{html.escape(cell)}</td>' for cell in cells])}</tr>"


def _html_hidden(count: int) -> str:
    return f'<tr><td colspan="3" style="opacity: 0.6">{html.escape(_hidden_text(count).strip())}</td></tr>'
