"""Which values the forward keeps for the backward where memory is short, and what the backward computes again instead.
An edit of joint programs: copies of forward nodes among those of the gradients. The two are cut apart in `partition.py`.

What is cheapest is a cut through the values between the inputs and the gradients: a value on the way is kept, which takes its
bytes, or computed again, which takes its work, from values for which the same holds. For a price of a byte the best choice is a
minimum cut; the price is looked for at which the budget is kept, and what is left of the budget is filled up from the end of
the forward, where the backward begins.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from torchgraft.analysis.aliases import Aliases
from torchgraft.analysis.cost.count import traffic
from torchgraft.analysis.cost.elementwise import work_of
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraphError
from torchgraft.ir.arguments import tensors_of
from torchgraft.ir.node import Node, map_arg
from torchgraft.lowering.minimum_cut import Network
from torchgraft.lowering.partition import nodes_of_gradients
from torchgraft.results.tables import amount

_aten = torch.ops.aten
# Operators that write running statistics, and compute the same without them: (..., running_mean, running_var, training, ...).
_NORMS = (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default)
# Operators that share memory though their schemas do not say so.
_SILENT_VIEWS = (_aten._unsafe_view.default, _aten._reshape_alias.default)
# Values that are as cheap to save as they are worth: the finest price of a byte against a unit of work, and the coarsest.
_PRICES = (-24, 40)


def recompute_within(joint: GraphModule, budget: int) -> int:
    """Have a joint program keep at most `budget` bytes for its backward; how many nodes are computed again.

    Inputs of the program are not counted: they are there anyway. See the pass `recompute`.
    """
    values = _Values(joint)
    return 0 if values.direct.bytes <= budget else _edit(values, _chosen(values, budget).again)


def saved_bytes(joint: GraphModule) -> int:
    """What a joint program, as it is, keeps for its backward besides its inputs, in bytes on the example inputs."""
    return _Values(joint).direct.bytes


@dataclass(frozen=True)
class _Choice:
    """What is kept, what is computed again, and what that takes."""

    kept: frozenset[Node]
    again: frozenset[Node]
    bytes: int
    work: int


class _Values:
    """The values of a joint program that its backward may need: what keeping each takes, and computing it again."""

    def __init__(self, joint: GraphModule) -> None:
        self.graph = joint.graph
        self._memory = Aliases(joint.graph)
        self.late = nodes_of_gradients(joint.graph) - {joint.graph.output_node()}
        self._last_write, self._last_unknown = self._writes()
        self.views: set[Node] = set()
        self.sources: dict[Node, list[Node]] = {}
        self.bytes: dict[Node, int] = {}
        for node in joint.graph.nodes:
            if node not in self.late and node.op != "output":
                self._note(node)
        output = joint.graph.output_node()
        entries = zip(output.meta["entries"], output.args[0], strict=True)
        # Gradients that need no tangent are kept as they are.
        self._fixed = {node for entry, node in entries if entry.kind == "gradient" and isinstance(node, Node)}
        read = {source for node in self.late for source in node._inputs} | (self._fixed - self.late)
        self.needed = [node for node in self.bytes if node in read]
        reached = self._reached(self.can_be_repeated)
        self.work = {node: _work(node) for node in self.bytes if node in reached}
        # Nothing but views is computed again.
        self.direct = self.choice(self._reached(lambda node: not self.can_be_kept(node)))

    def _writes(self) -> tuple[dict[Any, int], int]:
        last: dict[Any, int] = {}
        unknown = -1
        for node in self._memory.effects:
            places = self._memory.places_written(node)
            if places is None:
                unknown = self._memory.position[node]
            for place in places or ():
                last[place] = self._memory.position[node]
        return last, unknown

    def _note(self, node: Node) -> None:
        """Remember a value that has tensors, unless it is there anyway: an input, or a view of one."""
        value = node.meta.get("val")
        if node.op in ("placeholder", "get_attr") or not tensors_of(value):
            return
        sources = _sources(node)
        shared = [source for source in sources if source in self._shares(node)]
        if shared or (node.target in _SILENT_VIEWS):
            self.views.add(node)
        self.sources[node] = [source for source in sources if source in self.bytes]
        if node in self.views:
            bases = [source for source in shared or sources if source in self.bytes]
            self.bytes[node] = max([self.bytes[base] for base in bases], default=0)
        else:
            self.bytes[node] = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(value))

    def _shares(self, node: Node) -> set[Any]:
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            return {node.args[0]} if node.args[0] in self.views else set()
        return set(self._memory.shares(node))

    def can_be_kept(self, node: Node) -> bool:
        """Whether a value is one tensor of its own; views are taken again of what they are views of."""
        if not self.can_be_repeated(node):
            return True
        return node not in self.views and isinstance(node.meta.get("val"), torch.Tensor)

    def can_be_repeated(self, node: Node) -> bool:
        """Whether computing a value again, when the backward runs, gives the same: nothing random, no effects, nothing that is
        written in the meantime."""
        if node in self._fixed or self._memory.region[node] is not None:
            return False
        is_operator = isinstance(node.target, torch._ops.OpOverload)
        if not is_operator and not (node.target is operator.getitem and node.op == "call_function"):
            return False
        if is_operator and not (self._memory.is_pure(node) or _is_training_norm(node)):
            return False
        position = self._memory.position[node]
        if self._last_unknown > position:
            return False
        read = [node] if not _is_training_norm(node) else []
        return all(self._last_write.get(self._memory.class_of(item), -1) <= position for item in read + _sources(node))

    def _reached(self, is_computed_again: Callable[[Node], bool]) -> set[Node]:
        """What the backward needs, and what that is computed of where it is computed again."""
        found: set[Node] = set()
        pending = list(self.needed)
        while pending:
            node = pending.pop()
            if node not in found:
                found.add(node)
                pending += self.sources[node] if is_computed_again(node) else []
        return found

    def choice(self, kept: Iterable[Node]) -> _Choice:
        """What follows from keeping these: the rest that is needed is computed again, or kept where it cannot be."""
        wanted = set(kept)
        saved: set[Node] = set()
        again: set[Node] = set()
        pending = list(self.needed)
        while pending:
            node = pending.pop()
            if node in saved or node in again:
                continue
            if self.can_be_kept(node) and (node in wanted or not self.can_be_repeated(node)):
                saved.add(node)
            else:
                again.add(node)
                pending += self.sources[node]
        size = sum(self.bytes[node] for node in saved)
        return _Choice(frozenset(saved), frozenset(again), size, sum(self.work[node] for node in again))

    def cut(self, price: int) -> _Choice:
        """The best choice where a byte is worth two to the power of `price` units of work."""
        by_work, by_bytes = (1, 1 << price) if price >= 0 else (1 << -price, 1)
        nodes = list(self.work)
        ends = {node: (2 + 2 * index, 3 + 2 * index) for index, node in enumerate(nodes)}
        never = 1 + sum(self.bytes[node] * by_bytes + self.work[node] * by_work for node in nodes)
        network = Network(2 + 2 * len(nodes))
        for node in nodes:
            begin, end = ends[node]
            network.join(0, begin, self.work[node] * by_work if self.can_be_repeated(node) else never)
            network.join(begin, end, self.bytes[node] * by_bytes if self.can_be_kept(node) else never)
            if not self.can_be_kept(node):
                network.join(end, begin, never)
            for source in self.sources[node] if self.can_be_repeated(node) else ():
                network.join(ends[source][1], begin, never)
        for node in self.needed:
            network.join(ends[node][1], 1, never)
        here = network.side_of(0, 1)
        return self.choice(node for node in nodes if ends[node][0] in here and ends[node][1] not in here)


def _chosen(values: _Values, budget: int) -> _Choice:
    """The least work within the budget."""
    low, high = _PRICES
    within = values.cut(high)
    if within.bytes > budget:
        raise GraphError(
            f"a budget of {amount(budget, 'B')} is too small for what the backward needs: at least "
            f"{amount(within.bytes, 'B')} ({within.bytes} bytes) must be kept\n"
            "  the rest is computed again; random draws, and what is written or has effects, cannot be"
        )
    beyond = values.cut(low)
    if beyond.bytes <= budget:
        return beyond
    while high - low > 1:
        middle = (low + high) // 2
        found = values.cut(middle)
        if found.bytes <= budget:
            high, within = middle, found
        else:
            low, beyond = middle, found
    return _filled(values, within, beyond, budget)


def _filled(values: _Values, within: _Choice, beyond: _Choice, budget: int) -> _Choice:
    """Between a choice that fits and the next better one that does not: the later part of the program from that one.

    In layers that are alike all change sides at the same price.
    """
    order = list(values.work)
    low, high = 0, len(order)
    while high - low > 1:
        middle = (low + high) // 2
        early, late = frozenset(order[:middle]), frozenset(order[middle:])
        found = values.choice((within.kept & early) | (beyond.kept & late))
        if found.bytes <= budget:
            high = middle
            within = min(within, found, key=lambda choice: choice.work)
        else:
            low = middle
    # What still fits, one by one.
    for node in sorted(within.again, key=lambda node: (-values.work[node] / (values.bytes[node] + 1), node.name)):
        if values.can_be_kept(node) and within.bytes + values.bytes[node] <= budget:
            found = values.choice(within.kept | {node})
            if found.bytes <= budget and found.work < within.work:
                within = found
    return within


def _edit(values: _Values, again: frozenset[Node]) -> int:
    """Copy the nodes that are computed again to where the backward first needs them."""
    graph = values.graph
    copies: dict[Node, Node] = {}
    for user in [node for node in graph.nodes if node in values.late]:
        with graph.inserting_before(user):
            for node in _in_order(again.intersection(user._inputs).difference(copies), again, copies, values):
                copies[node] = _copied(graph, node, copies)
        if not copies.keys().isdisjoint(user._inputs):
            user.args = map_arg(user.args, lambda source: copies.get(source, source))
            user.kwargs = map_arg(user.kwargs, lambda source: copies.get(source, source))
    for node in sorted(again, reverse=True):
        if not node._users and not node.is_impure():
            graph.erase_node(node)
    return len(copies)


def _in_order(wanted: Iterable[Node], again: frozenset[Node], copies: dict[Node, Node], values: _Values) -> list[Node]:
    found: set[Node] = set()
    pending = list(wanted)
    while pending:
        node = pending.pop()
        if node in again and node not in copies and node not in found:
            found.add(node)
            pending += values.sources[node]
    return sorted(found)


def _copied(graph: Any, node: Node, copies: dict[Node, Node]) -> Node:
    copy = graph.node_copy(node, lambda source: copies.get(source, source))
    if _is_training_norm(node):
        copy.args = (*copy.args[:3], None, None, *copy.args[5:])
    copy.meta["partitioner_tag"] = "is_backward"
    copy.meta["recomputes"] = node.name
    return copy


def _is_training_norm(node: Node) -> bool:
    return node.op == "call_function" and node.target in _NORMS and len(node.args) > 5 and node.args[5] is True


def _sources(node: Node) -> list[Node]:
    """The inputs of a node when it is computed again."""
    if _is_training_norm(node):
        return [item for place, item in enumerate(node.args) if isinstance(item, Node) and place not in (3, 4)]
    return list(node._inputs)


def _work(node: Node) -> int:
    """Arithmetic, and bytes that are moved: what has no arithmetic takes time, too."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    known = lambda source: source.meta.get("val")  # noqa: E731
    args, kwargs, result = map_arg(node.args, known), map_arg(node.kwargs, known), node.meta["val"]
    found = work_of(node.target, args, kwargs, result)
    return (found[0] if found else 0) + sum(traffic(node.target, args, kwargs, result))
