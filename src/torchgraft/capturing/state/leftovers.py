"""What a watched run leaves in the attributes of a model: whether a program can leave it too, and how.
It can where the next run, which finds what the first has left, leaves all as it is and does the same: a flag, a setting that is
chosen once, hooks that are installed once. What was changed is found in `model_state.py`; `program.py` makes the two runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchgraft.capturing.watching.hooks import FORWARD_TABLES, OPTION_TABLES
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.leftovers import MISSING, Entry, Leftovers, is_plain, leave
from torchgraft.ir.modules import is_from_torch

_HOOKS = frozenset({*FORWARD_TABLES, *OPTION_TABLES})
_STATE = frozenset({"_parameters", "_buffers", "_modules"})
_STANDARD = frozenset(vars(torch.nn.Module()))
_BY_VALUE = (int, float, str, bool, bytes)


class Left(NamedTuple):
    """Something that a run left: in which attribute of which module, and the entry that says all of it, if there is one."""

    module: torch.nn.Module
    name: str
    entry: Entry | None = None

    @property
    def is_constant(self) -> bool:
        """Whether a program can leave it: nothing that a run computes."""
        if self.entry is None or self.entry.after is MISSING or self.name in _STATE:
            return False
        return self.name in _HOOKS or is_plain(self.entry.after)


def sees_only_itself(module: torch.nn.Module) -> bool:
    """Whether a module, which runs where nobody watches, has nothing by which it could read what others leave: numbers of its own
    and layers of torch's (a stochastic depth)."""
    for inner in module.modules():
        if not is_from_torch(inner):
            if not all(is_plain(value) for name, value in vars(inner).items() if name not in _STANDARD):
                return False
    return True


def is_equal(now: Any, before: Any) -> bool:
    """Whether two values are the same object; only plain values are compared by value."""
    return now is before or (type(now) is type(before) and isinstance(now, _BY_VALUE) and now == before)


def left_in(module: torch.nn.Module, name: str | None, table: Any, before: Any) -> list[Left]:
    """What was changed in a container since `before`, a copy of it; `name` is that of the attribute, or None where each entry
    is an attribute."""
    if not isinstance(table, dict):
        return [Left(module, name or "")]
    changed = [
        key
        for key in {**before, **table}
        if key not in table or key not in before or not is_equal(table[key], before[key])
    ]
    if not changed and name is not None:
        return [Left(module, name)]  # another order, say
    return [
        Left(module, name or key, Entry(table, key, before.get(key, MISSING), table.get(key, MISSING)))
        for key in changed
    ]


def have_program_leave(program: GraphModule, left: list[Left]) -> None:
    """Add to a program that it leaves what the run left."""
    graph = program.graph
    number = 0
    while hasattr(program, f"_leftovers{number}"):
        number += 1
    name = f"_leftovers{number}"
    graph._constants[name] = leftovers = Leftovers(_groups(left))
    setattr(program, name, leftovers)
    with graph.inserting_before(next(iter(graph.find_nodes(op="output")))):
        graph.call_function(leave, (graph.get_attr(name),))


def _groups(left: list[Left]) -> list[list[Entry]]:
    """Hooks and the attributes of modules are one group, because an attribute says that the hooks are there; without hooks, and
    for what is no attribute of a module, each entry is one."""
    has_hooks = any(item.name in _HOOKS for item in left)
    together: list[Entry] = []
    groups = [together]
    for module, name, entry in left:
        if entry is None:
            continue
        is_modules = name in _HOOKS or entry.table is module.__dict__
        if has_hooks and is_modules:
            together.append(entry)
        else:
            groups.append([entry])
    return [group for group in groups if group]
