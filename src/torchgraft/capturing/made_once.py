"""Notes that a model makes once: an attribute without a value is given one in the first run, and stays as it is (which loss fits
the labels, say). The program leaves such a note out. Whether a change of a model is one is seen by running the model again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from torchgraft.capturing.model_state import ModelState
from torchgraft.capturing.surroundings import Surroundings
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.guards import is_guard

_NOT_LOOKED_INTO = (torch.Tensor, torch.nn.Module, type, ModuleType, FunctionType, MethodType)


def leaves_notes_only(
    modules: dict[torch.nn.Module, str], run: Callable[[], None], capture: Callable[[], GraphModule], first: GraphModule
) -> bool:
    """Whether a model that was run once changes nothing any more, and does what it did the first time.

    `run` runs it, `capture` captures it, `first` is the program of the first time; the model is left as it was.
    """
    state, surroundings = ModelState(modules), Surroundings(modules)
    for module in modules:
        state.watch(module)
    before = [(table, dict(table)) for table in _tables(modules)]
    try:
        run()
        notes = [(table, key, old.get(key)) for table, old in before for key in table if table[key] is not old.get(key)]
        if not notes or not all(_mark(table, key, value) for table, key, value in notes):
            return False
        marks = [table[key] for table, key, _ in notes]
        second = capture()
        is_kept = all(table.get(key) is mark for (table, key, _), mark in zip(notes, marks, strict=True))
        return is_kept and _calls(first) == _calls(second)
    finally:
        state.restore()
        surroundings.restore()


def _tables(modules: dict[torch.nn.Module, str]) -> Iterator[dict[str, Any]]:
    """The attributes of modules, and of the plain objects among them: configurations."""
    seen: set[int] = set()
    for module in modules:
        for value in (module, *vars(module).values()):
            table = getattr(value, "__dict__", None)
            is_looked_into = value is module or not isinstance(value, _NOT_LOOKED_INTO)
            if is_looked_into and type(table) is dict and id(table) not in seen:
                seen.add(id(table))
                yield table


def _mark(table: dict[str, Any], key: str, before: Any) -> bool:
    """Put an equal text in the place of one that was noted where nothing was, to see whether it is written again."""
    value = table[key]
    if before is not None or type(value) is not str or len(value) < 2:
        return False
    table[key] = "".join(list(value))
    return True


def _calls(program: GraphModule) -> list[tuple[str, Any]]:
    """What a program calls, without what is only checked."""
    nodes = [node for node in program.graph.nodes if node._op.startswith("call_") and not is_guard(node._target)]
    checks = {node for node in nodes if node.users and all(is_guard(user._target) for user in node.users)}
    return [(node._op, node._target) for node in nodes if node not in checks]
