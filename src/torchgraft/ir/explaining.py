"""What a program was captured for, in words: its guards, with those that are alike on one line.
Finding the guards of a graph is in `guards.py`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torchgraft.ir.guards import Guard, find_guards
from torchgraft.results.tables import listed

if TYPE_CHECKING:
    from torchgraft.ir.graph import Graph

_NAME = re.compile(r"[A-Za-z_]\w*")
# The name of a value in a condition; where the program was lowered, the node may have been taken apart since.
_VALUE = re.compile(r"(?<=of ')\w+(?='$)")
# The module whose tensors a condition is about.
_HOLDER = re.compile(r"(?<=the tensors of ').*(?='$)")
_MODE = re.compile(r".*\btraining")
_ARGUMENT = re.compile(r"the argument '(.+)'")
# How often one line names what it speaks of, before it says "and 3 more".
_NAMED = 8


def explanation(graph: Graph) -> str:
    """What was fixed when a program was captured, and why, in plain words."""
    groups = _grouped(graph)
    if not groups:
        return "The program has no guards: nothing was fixed when it was captured."
    what = "this" if len(groups) == 1 else f"these {len(groups)} conditions"
    lines = [f"The program was captured for {what}, and raises GuardError in any other case:"]
    for number, group in enumerate(groups, 1):
        lines += [f"  {number}. {_statement(group)}", f"     {_place(group)}"]
    return "\n".join(lines)


def _grouped(graph: Graph) -> list[list[Guard]]:
    """The guards that are alike but for the names of nodes: of the same line of the model, or of the same class of torch's."""
    inputs = {node._name for node in graph.nodes if node._op == "placeholder"}
    computed = {node._name for node in graph.nodes} - inputs
    groups: dict[Any, list[Guard]] = {}
    for guard in find_guards(graph):
        is_argument = _ARGUMENT.fullmatch(guard.condition) is not None
        kind = _torch_module(guard)
        pattern = _NAME.sub(lambda found: "_" if found[0] in computed else found[0], guard.condition)
        pattern = _VALUE.sub(lambda found: found[0] if found[0] in inputs else "_", pattern)
        pattern = "training" if _MODE.fullmatch(pattern) else pattern
        pattern, is_held = _HOLDER.subn("_", pattern)
        key = (is_argument or pattern, repr(guard.expected), kind or (not is_held and guard.where))
        groups.setdefault(key, []).append(guard)
    return list(groups.values())


def _torch_module(guard: Guard) -> str:
    """The class of torch's own module that asked, if it was one."""
    stack = guard.node.meta.get("nn_module_stack") or {}
    kind = [*stack.values()][-1][1] if stack else None
    if isinstance(kind, type):
        kind = f"{kind.__module__}.{kind.__qualname__}"
    return kind.rpartition(".")[2] if kind is not None and kind.startswith("torch.nn.") else ""


def _statement(group: list[Guard]) -> str:
    first, count, kind = group[0], len(group), _torch_module(group[0])
    if count == 1:
        return f"{first.condition} is {first.expected!r}"
    names = [found[1] for guard in group if (found := _ARGUMENT.fullmatch(guard.condition))]
    if names:
        return f"the arguments {listed([repr(name) for name in names], _NAMED)} are {first.expected!r}"
    if kind and first.condition.startswith("ndim of "):
        return f"{count} {kind} check that their input has {first.expected} dimensions"
    if kind and _MODE.fullmatch(first.condition):
        return f"{count} {kind} are in {'training' if first.expected else 'evaluation'} mode"
    if kind:
        return f"{count} {kind} check this, the first one that {first.condition} is {first.expected!r}"
    return f"{first.condition} is {first.expected!r}, and the same for {count - 1} more"


def _place(group: list[Guard]) -> str:
    where = group[0].where
    places = {guard.where for guard in group}
    return f"{'first ' if len(places) > 1 else ''}{'in' if where.startswith('the inputs of') else 'at'} {where}"
