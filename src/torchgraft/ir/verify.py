"""Checks that a program is well formed; every problem is reported, not only the first (rule 5 of the IR).
Whether a program computes the right thing is not asked here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchgraft.errors import GraphAttributeError, GraphError
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.node import OPCODES, Node

if TYPE_CHECKING:
    from torchgraft.ir.graph import Graph

_MISSING = object()


def find_attribute(module: torch.nn.Module, path: str) -> tuple[Any, str | None]:
    """The value at a dotted path and None, or None and the reason why there is none."""
    value: Any = module
    walked: list[str] = []
    for name in path.split("."):
        value = getattr(value, name, _MISSING)
        if value is _MISSING:
            where = f"'{'.'.join(walked)}'" if walked else type(module).__name__
            return None, f"{where} has no attribute '{name}'"
        walked.append(name)
    return value, None


def lint(graph: Graph) -> None:
    """Raise GraphError listing everything that is wrong with `graph`; return quietly if nothing is."""
    problems = find_problems(graph)
    if problems:
        kind = GraphAttributeError if all("has no attribute" in text for text in problems) else GraphError
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise kind(f"the graph is not well formed, {count}:\n" + "\n".join(f"  - {text}" for text in problems))


def find_problems(graph: Graph) -> list[str]:
    """Everything that is wrong with a graph, one line each."""
    if graph._order_is_stale:
        graph._renumber()
    problems: list[str] = []
    names: set[str] = set()
    count = 0
    last = None
    attributes = _Attributes(graph.owning_module)
    root = graph._root
    node = root._next
    order = -1
    has_regions = False
    outputs = 0
    inputs: list[Any] = []
    while node is not root:
        count += 1
        op = node._op
        names.add(node._name)
        if node._order <= order:
            problems.append(f"node '{node._name}' is out of step with the order of the graph; report this as a bug")
        order = node._order
        for source in node._inputs:
            if source._order >= order or source._erased or source.graph is not graph or node not in source._users:
                problems.append(_input_problem(graph, node, source))
        if op == "call_function":
            if not callable(node._target):
                problems.append(f"node '{node._name}' calls {node._target!r}, which is not callable; give a function")
            elif node._target is enter_context or node._target is exit_context:
                has_regions = True
        elif op == "call_method":
            if not isinstance(node._target, str) or not node._args:
                problems.append(
                    f"node '{node._name}' must name a method and have the object as its first argument; give it both"
                )
        else:
            if op == "placeholder":
                inputs.append(node._target)
            elif op == "output":
                outputs += 1
            problems.extend(_check_other(node, attributes, last))
        last = node
        node = node._next
    if len(names) != count:
        problems.extend(_duplicate_names(graph))
    if count != graph._length:
        problems.append(f"the graph counts {graph._length} nodes but has {count}; report this as a bug")
    if outputs > 1:
        problems.append(f"there are {outputs} outputs; a program returns once, so keep one of them")
    if len(set(inputs)) != len(inputs):
        problems += [
            f"there is more than one input '{name}'; give each a name of its own"
            for name in dict.fromkeys(inputs)
            if inputs.count(name) > 1
        ]
    if last is not None and last._op != "output" and outputs:
        problems.append(
            f"the output is not the last node: '{last._name}' comes after it; move it with output.prepend()"
        )
    if has_regions:
        problems.extend(_region_problems(graph))
    return problems


def _input_problem(graph: Graph, node: Node, source: Node) -> str:
    if source._erased:
        return f"node '{node._name}' uses '{source._name}', which was erased; give it another argument"
    if source.graph is not graph:
        return f"node '{node._name}' uses '{source._name}', which does not belong to this Graph; copy it with graph.node_copy()"
    if source is node:
        return f"node '{node._name}' uses itself; give it another argument"
    if source._order >= node._order:
        return (
            f"node '{node._name}' uses '{source._name}' before it has been defined! "
            f"Move one of them with node.prepend() or node.append()"
        )
    return f"node '{node._name}' uses '{source._name}' but is not among its users; report this as a bug"


class _Attributes:
    """Looks up the attributes that nodes refer to; the modules on the way are found once each."""

    def __init__(self, owner: torch.nn.Module | None) -> None:
        self.owner = owner
        self._modules: dict[str, Any] = {"": owner}

    def has_module(self, path: str) -> bool:
        """Whether there is surely a module at `path`, found without asking `getattr`."""
        prefix, _, name = path.rpartition(".")
        container = self._modules.get(prefix, _MISSING)
        if container is _MISSING:
            container = self._modules[prefix] = find_attribute(self.owner, prefix)[0]  # type: ignore[arg-type]
        return isinstance(container, torch.nn.Module) and container._modules.get(name) is not None


def _check_other(node: Node, attributes: _Attributes, last: Node | None) -> tuple[str, ...] | list[str]:
    op = node._op
    if op == "call_module" and isinstance(node._target, str) and attributes.has_module(node._target):
        return ()
    owner = attributes.owner
    if op not in OPCODES:
        return [f"node '{node._name}' has the unknown opcode {op!r}; use one of {', '.join(OPCODES)}"]
    if not isinstance(node._target, str):
        return [
            f"node '{node._name}' has opcode {op}, so its target must be a string, not {node._target!r}; give a name"
        ]
    problems = []
    if op == "placeholder":
        if len(node._args) > 1:
            problems.append(
                f"input '{node._name}' has {len(node._args)} arguments; only a default value is allowed, so remove the others"
            )
    elif op == "output":
        if node._users:
            users = ", ".join(user._name for user in node._users)
            problems.append(f"the output is used by {users}; give them the value that is returned")
        if len(node._args) != 1:
            problems.append(f"the output must have exactly one argument, not {len(node._args)}; make it a tuple")
    elif owner is not None:
        value, reason = find_attribute(owner, node._target)
        if reason is not None:
            problems.append(
                f"node '{node._name}' references nonexistent attribute '{node._target}': {reason}; add it to the module, or "
                "name another target"
            )
        elif op == "call_module" and not isinstance(value, torch.nn.Module):
            problems.append(
                f"node '{node._name}' calls '{node._target}', which does not reference an nn.Module: it is a "
                f"{type(value).__name__}; use get_attr"
            )
    return problems


def _duplicate_names(graph: Graph) -> list[str]:
    seen: set[str] = set()
    problems = []
    for node in graph.nodes:
        if node._name in seen:
            problems.append(f"the name '{node._name}' is used by more than one node; Node redefined name {node._name}!")
        seen.add(node._name)
    return problems


def _region_problems(graph: Graph) -> list[str]:
    problems = []
    opened: list[Node] = []
    for node in graph.nodes:
        if node._op != "call_function":
            continue
        if node._target is enter_context:
            opened.append(node)
        elif node._target is exit_context:
            if not opened or not node._args or opened[-1] is not node._args[0]:
                problems.append(f"node '{node._name}' does not close the innermost open context; move it")
            else:
                opened.pop()
    problems.extend(
        f"the context opened by '{node._name}' is never closed; close it with a call of exit_context" for node in opened
    )
    return problems
