"""What must hold for every graph at every moment, checked with nothing but public properties; and a picture of a graph, to
show that a refused edit changed nothing. The edits themselves are drawn in `test_random_edits.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from torchgraft import Graph, GraphError, GraphModule, Node


def nodes_in(value: Any) -> list[Node]:
    """Every node in an argument tree, each once, in the order of first use."""
    found: dict[Node, None] = {}

    def walk(item: Any) -> None:
        if isinstance(item, Node):
            found[item] = None
        elif isinstance(item, (tuple, list)):
            for part in item:
                walk(part)
        elif isinstance(item, dict):
            for part in item.values():
                walk(part)
        elif isinstance(item, slice):
            walk((item.start, item.stop, item.step))

    walk(value)
    return list(found)


def check_consistent(graph: Graph) -> None:
    """The invariants of rules 1 to 3."""
    nodes = list(graph.nodes)
    assert nodes == list(reversed(list(reversed(graph.nodes)))), "the two directions disagree"
    assert len(graph.nodes) == len(nodes)
    names = [node.name for node in nodes]
    assert len(set(names)) == len(names), f"names are not unique: {names}"
    members = set(nodes)
    for node in nodes:
        inputs = nodes_in((node.args, node.kwargs))
        assert node.all_input_nodes == inputs, f"{node} does not know its inputs"
        for source in inputs:
            assert source in members, f"{node} uses {source}, which is not in the graph"
            assert node in source.users, f"{node} is not among the users of {source}"
        for user in node.users:
            assert user in members, f"{user}, a user of {node}, is not in the graph"
            assert node in user.all_input_nodes, f"{user} is listed as a user of {node}"
    for first, second in itertools.pairwise(nodes):
        assert first < second and second > first and first <= second and not second < first and not second <= first
        assert first.next is second and second.prev is first
    assert sorted(set(nodes)) == nodes


def is_well_formed(graph: Graph) -> bool:
    """Whether a graph could run, found out independently of `lint`."""
    seen: set[Node] = set()
    output_seen = False
    for node in graph.nodes:
        if output_seen or any(source not in seen for source in node.all_input_nodes):
            return False
        output_seen = node.op == "output"
        seen.add(node)
    return True


def check_lint(graph: Graph) -> bool:
    """`lint` agrees with the definition; say whether the graph is well formed."""
    expected = is_well_formed(graph)
    try:
        graph.lint()
    except GraphError as error:
        assert not expected, f"lint refuses a good graph: {error}"
        assert "  - " in str(error)
        return False
    assert expected, f"lint accepts a bad graph:\n{graph}"
    return True


def picture(graph: Graph) -> list[Any]:
    """Everything about a graph that a refused edit must leave alone."""
    return [
        (id(node), node.op, node.target, str(node.args), str(node.kwargs), node.name, list(node.users), str(node.meta))
        for node in graph.nodes
    ]


def refused_without_change(graph: Graph, edit: Callable[[], Any]) -> GraphError:
    """Run an edit that must raise, and check that it did nothing else."""
    before = picture(graph)
    try:
        edit()
    except GraphError as error:
        check_consistent(graph)
        assert picture(graph) == before, f"the refused edit changed the graph: {error}"
        return error
    raise AssertionError("the edit should have been refused")


def evaluate(module: GraphModule, inputs: list[torch.Tensor]) -> Any:
    """The value of a graph by the definition of the six opcodes, in the plainest way."""
    values: dict[Node, Any] = {}
    remaining = list(inputs)

    def look_up(item: Any) -> Any:
        if isinstance(item, Node):
            return values[item]
        if isinstance(item, (tuple, list)):
            return (
                type(item)(look_up(part) for part in item) if type(item) is tuple else [look_up(part) for part in item]
            )
        if isinstance(item, dict):
            return {key: look_up(part) for key, part in item.items()}
        return item

    for node in module.graph.nodes:
        args, kwargs = look_up(node.args), look_up(node.kwargs)
        if node.op == "placeholder":
            values[node] = remaining.pop(0)
        elif node.op == "get_attr":
            values[node] = getattr(module, node.target)
        elif node.op == "call_function":
            values[node] = node.target(*args, **kwargs)
        elif node.op == "call_method":
            values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
        elif node.op == "call_module":
            values[node] = getattr(module, node.target)(*args, **kwargs)
        else:
            return args[0]
    return None
