"""Turning groups of nodes into submodules of the program they stand in, in place: torch.fx's `fuse_by_partitions` and its parts.
Choosing the groups is `partitioner.py`; a program that is nothing but parts is made by `split.py`.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraphError
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node
from torchgraft.splitting.order import Order, is_call


def topo_sort(nodes: list[Node]) -> list[Node]:
    """The nodes in an order in which each comes after its inputs, otherwise as they were."""
    position = {node: number for number, node in enumerate(nodes)}
    before = {node: [source for source in node.all_input_nodes if source in position] for node in nodes}
    return sorted_stably(nodes, before)


def sorted_stably(items: Iterable[Any], before: Mapping[Any, Iterable[Any]]) -> list[Any]:
    """Items in an order that respects `before`; of those that could come next, the one that came first."""
    items = list(items)
    position = {item: number for number, item in enumerate(items)}
    waiting = {item: len(set(before[item])) for item in items}
    after: dict[Any, list[Any]] = {item: [] for item in items}
    for item in items:
        for earlier in set(before[item]):
            after[earlier].append(item)
    ready = [position[item] for item in items if not waiting[item]]
    heapq.heapify(ready)
    result = []
    while ready:
        item = items[heapq.heappop(ready)]
        result.append(item)
        for later in after[item]:
            waiting[later] -= 1
            if not waiting[later]:
                heapq.heappush(ready, position[later])
    if len(result) < len(items):
        left = [item for item in items if waiting[item]]
        raise GraphError(
            f"cannot sort {left}: each of them waits for another, so the graph has cycles; undo the edit that made it so"
        )
    return result


def validate_partition(partition: list[Node]) -> bool:
    """Whether the nodes can become one node: no way leads out of them and back in."""
    inside = set(partition)
    pending = [user for node in partition for user in node._users if user not in inside]
    seen: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in inside:
            return False
        if node not in seen:
            seen.add(node)
            pending.extend(node._users)
    return True


def fuse_as_graphmodule(
    gm: GraphModule,
    nodes: list[Node],
    module_name: str,
    partition_lookup_table: Mapping[Node, Any] | None = None,
    *,
    always_return_tuple: bool = False,
) -> tuple[GraphModule, tuple[Node, ...], tuple[Node, ...]]:
    """A module with copies of the nodes, the nodes outside that it takes values from, and the nodes whose values it gives."""
    for node in nodes:
        if node.graph is not gm.graph or node._erased:
            raise GraphError(
                f"cannot fuse node '{node.name}': it is not in the graph of this module; take nodes of gm.graph"
            )
    if not validate_partition(nodes):
        raise GraphError(
            f"cannot fuse {nodes}: Invalid partition, found dependency cycles (a value leaves these nodes and comes back); "
            "leave out the nodes after it, or add those in between"
        )
    graph = Graph()
    inside = set(nodes)
    inputs = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    values: dict[Node, Node] = {}
    for source in inputs:
        values[source] = graph.placeholder(source.name, type_expr=source.type)
        values[source].meta = dict(source.meta)
    for node in nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
    outputs = [node for node in nodes if any(user not in inside for user in node._users)]
    results = tuple([values[node] for node in outputs])
    graph.output(results[0] if len(results) == 1 and not always_return_tuple else results)
    return GraphModule(gm, graph, module_name), tuple(inputs), tuple(outputs)


def insert_subgm(
    gm: GraphModule,
    sub_gm: GraphModule,
    orig_inputs: tuple[Node, ...],
    orig_outputs: tuple[Node, ...],
    insertion_point: Node | None = None,
) -> GraphModule:
    """Call `sub_gm` after the insertion point (the last of the outputs unless told), and let everybody use its results."""
    name = type(sub_gm).__name__
    gm.add_submodule(name, sub_gm)
    if insertion_point is None and not orig_outputs:
        raise GraphError(
            "cannot say where to call a module without outputs: give insertion_point, the last node it replaces"
        )
    with gm.graph.inserting_after(insertion_point or max(orig_outputs)):
        call = gm.graph.call_module(name, orig_inputs)
    is_tuple = isinstance(sub_gm.graph.output_node().args[0], tuple)
    place = call
    for number, old in enumerate(orig_outputs):
        new = call
        if is_tuple:
            with gm.graph.inserting_after(place):
                new = place = gm.graph.call_function(operator.getitem, (call, number))
        old.replace_all_uses_with(new, delete_user_cb=lambda user, call=call: user is not call)  # type: ignore[misc]
        new.meta = dict(old.meta)
    if is_tuple and any("val" in old.meta for old in orig_outputs):
        call.meta["val"] = tuple([old.meta.get("val") for old in orig_outputs])
    return gm


def erase_nodes(gm: GraphModule, nodes: list[Node]) -> None:
    """Erase nodes that only each other use, given in the order of the program."""
    for node in reversed(nodes):
        gm.graph.erase_node(node)


def fuse_by_partitions(
    gm: GraphModule,
    partitions: list[Mapping[Node, Any]] | list[dict[Node, int | None]],
    prefix: str = "fused_",
    always_return_tuple: bool = False,
) -> GraphModule:
    """Make every group of nodes a submodule called `fused_0`, `fused_1` and so on, in place.

    A group whose nodes cannot run together, because of a value or of an effect in between, is refused before the first edit.

    >>> import torch, torchgraft
    >>> module = torchgraft.symbolic_trace(lambda x: torch.cos(torch.relu(torch.sin(x))))
    >>> relu, cos = list(module.graph.nodes)[2:4]
    >>> print(fuse_by_partitions(module, [{relu: None, cos: None}]).code.strip())
    def forward(self, x):
        sin = torch.sin(x);  x = None
        fused_0 = self.fused_0(sin);  sin = None
        return fused_0
    """
    _bring_together(gm.graph, [list(partition) for partition in partitions])
    for number, partition in enumerate(partitions):
        nodes = sorted(partition)
        module, inputs, outputs = fuse_as_graphmodule(
            gm, nodes, f"{prefix}{number}", dict(partition), always_return_tuple=always_return_tuple
        )
        insert_subgm(gm, module, inputs, outputs, nodes[-1])
        erase_nodes(gm, nodes)
    gm.graph.lint()
    return gm


def _bring_together(graph: Graph, partitions: list[list[Node]]) -> None:
    """Reorder the program so that the nodes of each group stand side by side, or raise where that is not possible."""
    order = Order(graph, open_regions=False)
    group_of: dict[Node, Any] = {}
    for number, partition in enumerate(partitions):
        for node in partition:
            if node in group_of:
                raise GraphError(
                    f"cannot fuse node '{node.name}' twice: it is in two of the groups; leave it out of one"
                )
            group_of[node] = number
    before: dict[Any, set[Any]] = {}
    members: dict[Any, list[Node]] = {}
    for node in order.nodes:
        group = group_of.get(node, node)
        members.setdefault(group, []).append(node)
        sources = [*node.all_input_nodes, *(order.before(node) if is_call(node) else ())]
        waits = before.setdefault(group, set())
        waits.update(group_of.get(source, source) for source in sources)
        waits.discard(group)
    try:
        groups = sorted_stably(members, before)
    except GraphError as error:
        raise GraphError(
            f"cannot fuse these groups of nodes: Invalid partition, found dependency cycles ({error}); "
            "leave out one of these nodes, or let CapabilityBasedPartitioner propose the groups"
        ) from error
    nodes = [node for group in groups for node in members[group]]
    if nodes == order.nodes:
        return
    for node in sorted(nodes, key=lambda node: (node.op == "output", node.op != "placeholder")):
        graph._move(node, graph._root)
