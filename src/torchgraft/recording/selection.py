"""Which nodes were asked for: by name, by pattern, by a predicate or as nodes; unknown names get an error with the near ones.
And what else has to run for them; the run itself is in `record.py`.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable
from typing import Any

from torchgraft.analysis.effects import Effects, effects_of
from torchgraft.analysis.effects.findings import OUTSIDE
from torchgraft.analysis.interference import ANYTHING, Interference
from torchgraft.errors import UnknownNodeError
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node
from torchgraft.results.tables import listed

Choice = str | Node | Callable[[Node], bool] | Iterable[str | Node] | None

_PATTERN = frozenset("*?[")


def chosen_nodes(graph: Graph, choice: Choice) -> list[Node]:
    """The nodes that a choice means, in the order of the program; None means all.

    >>> from torchgraft import symbolic_trace
    >>> import torch
    >>> graph = symbolic_trace(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())).graph
    >>> chosen_nodes(graph, ["_[01]", "output"])
    [_0, _1, output]
    """
    nodes = list(graph.nodes)
    if choice is None:
        return nodes
    if not isinstance(choice, (str, Node)) and callable(choice):
        return [node for node in nodes if choice(node)]
    items = [choice] if isinstance(choice, (str, Node)) else list(choice)
    names = {node.name: node for node in nodes}
    chosen: set[Node] = set()
    for item in items:
        chosen.update(_chosen(item, names))
    return [node for node in nodes if node in chosen]


def _chosen(item: Any, names: dict[str, Node]) -> list[Node]:
    if isinstance(item, Node):
        if names.get(item.name) is not item:
            raise UnknownNodeError(
                f"node '{item.name}' belongs to another program\ngive the name of a node of this one, or its own node"
            )
        return [item]
    if not isinstance(item, str):
        raise TypeError(
            f"nodes takes names, patterns, nodes or one predicate, not {type(item).__name__} among them\n"
            "for several predicates write one that combines them"
        )
    if item in names:
        return [names[item]]
    matching = [node for name, node in names.items() if fnmatch.fnmatchcase(name, item)] if _PATTERN & {*item} else []
    if not matching:
        raise unknown_node(item, list(names))
    return matching


def unknown_node(name: str, names: Iterable[str], known: str = "the program has") -> UnknownNodeError:
    """The error about a name or pattern that means nothing, with the near names."""
    names = list(names)
    near = difflib.get_close_matches(name, names, 3, 0.5) or [item for item in names if name and name in item][:3]
    what = f"no node matches '{name}'" if _PATTERN & {*name} else f"there is no node '{name}'"
    hint = (
        f"did you mean {', '.join(map(repr, near))}?"
        if near
        else f"{known} {listed(list(map(repr, names)), 8) or 'none'}"
    )
    return UnknownNodeError(f"{what}; {hint}")


# ---- what has to run for them ----


def required_nodes(nodes: list[Node], wanted: list[Node]) -> list[Node]:
    """The nodes of a program to run for the wanted ones, in order; nothing after the last wanted one is among them.

    A value needs its inputs and what writes into memory that it reads. A random number needs the draws before it. Calls whose
    effects reach outside of the program (checks, regions, what cannot be known) always run.

    >>> import torch
    >>> from torchgraft import symbolic_trace
    >>> def f(x):
    ...     y = torch.exp(x)
    ...     z = torch.tanh(y)
    ...     y.neg_()
    ...     return torch.relu(z), torch.abs(y)
    >>> nodes = list(symbolic_trace(f).graph.nodes)
    >>> required_nodes(nodes, [nodes[4]]), required_nodes(nodes, [nodes[5]])
    ([x, exp, tanh, relu], [x, exp, neg_, abs_1])
    """
    if not wanted:
        return []
    asked = set(wanted)
    last = max(position for position, node in enumerate(nodes) if node in asked)
    if nodes[last].op == "output":
        return nodes[: last + 1]  # the result is what everything is there for
    memory = Interference(nodes[0].graph)
    needed: set[Node] = set(asked)
    touched: set[Any] = set()
    draws = False
    for node in reversed(nodes[: last + 1]):
        if node.op in ("placeholder", "get_attr"):
            if node in needed:
                touched |= memory.touched([node])
            continue
        effects = effects_of(node)
        if node not in needed and not _is_noticed(node, effects, memory, touched, draws):
            continue
        needed.add(node)
        needed.update(node.all_input_nodes)
        touched |= memory.touched([node])
        draws = draws or effects.random
    return [node for node in nodes[: last + 1] if node in needed]


def _is_noticed(node: Node, effects: Effects, memory: Interference, touched: set[Any], draws: bool) -> bool:
    """Whether something that runs later would be different without the node."""
    if effects.unknown or OUTSIDE in effects.writes or (effects.random and draws):
        return True
    if not effects.writes or not touched:
        return False
    written = memory.written([node])
    return ANYTHING in written or ANYTHING in touched or not touched.isdisjoint(written)
