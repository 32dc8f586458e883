"""torch.fx's CapabilityBasedPartitioner: the largest groups of supported nodes, proposed and then made submodules.
The search is that of `split`, in `strategies.py`; making the submodules is in `fusing.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torchgraft.analysis.effects.state import Places
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.node import Node
from torchgraft.ir.printing import qualified_name
from torchgraft.splitting.fusing import fuse_by_partitions
from torchgraft.splitting.operator_support import OperatorSupportBase
from torchgraft.splitting.order import Order, is_guard, is_mark
from torchgraft.splitting.strategies import regions_from_the_end

_NO_COMPUTATION = frozenset({"torch.ops.aten.view", "_operator.getitem"})


class Partition:
    """A group of nodes, in the order of the program."""

    def __init__(
        self, id: int | None = None, nodes: Iterable[Node] | None = None, node_orders: Iterable[int] | None = None
    ) -> None:
        self.id = id
        nodes = list(nodes or ())
        orders: list[Any] = [None] * len(nodes) if node_orders is None else list(node_orders)
        self.nodes: dict[Node, int | None] = dict(zip(nodes, orders, strict=True))

    def add_node(self, node: Node, node_order: int | None = None) -> None:
        """Take one more node in."""
        self.nodes[node] = node_order

    def remove_node(self, node: Node) -> None:
        """Leave a node out."""
        del self.nodes[node]

    def size(self) -> int:
        """How many nodes there are."""
        return len(self.nodes)

    def __repr__(self) -> str:
        return str(self.nodes)


class CapabilityBasedPartitioner:
    """Groups the nodes that a backend supports, with torch.fx's interface.

    Unlike torch.fx: effects and random draws keep their order, a group never reaches over the edge of a `with` region, inputs
    and outputs of the program are in no group, and module and method calls count as computation. It is linear in the program.

    >>> import torch, torchgraft
    >>> from torchgraft.splitting.operator_support import OperatorSupport
    >>> module = torchgraft.symbolic_trace(lambda x: torch.relu(torch.cos(torch.sin(x))))
    >>> partitioner = CapabilityBasedPartitioner(module, OperatorSupport({"torch.sin": None, "torch.cos": None}))
    >>> partitioner.propose_partitions()
    [{sin: 3, cos: 2}]
    """

    def __init__(
        self,
        graph_module: GraphModule,
        operator_support: OperatorSupportBase,
        allows_single_node_partition: bool = False,
        non_compute_ops: Sequence[str] | None = None,
        allowed_single_node_partition_ops: Sequence[str] | None = None,
        skip_horizontal_fusion: bool = False,
    ) -> None:
        self.graph_module = graph_module
        self.operator_support = operator_support
        self.allows_single_node_partition = allows_single_node_partition
        self.non_compute_ops = list(non_compute_ops or ())
        self.allowed_single_node_partition_ops = list(allowed_single_node_partition_ops or ())
        self.skip_horizontal_fusion = skip_horizontal_fusion

    def propose_partitions(self) -> list[Partition]:
        """The groups, the last of the program first, as torch.fx has them."""
        order = Order(self.graph_module.graph, open_regions=False)
        modules = dict(self.graph_module.named_modules())
        kinds = [
            not is_guard(unit[0]) and not is_mark(unit[0]) and self._supports(modules, unit[0]) for unit in order.units
        ]
        # torch.fx numbers nodes from the end of the program.
        number = {node: len(order.nodes) - 1 - place for node, place in order.position.items()}
        result: list[Partition] = []
        for kind, units in reversed(regions_from_the_end(order, kinds)):
            if not kind:
                continue
            nodes = [node for unit in units for node in order.units[unit]]
            for group in _connected(nodes, order) if self.skip_horizontal_fusion else [nodes]:
                group = self._with_attributes(modules, group)
                if self.allows_single_node_partition or self._computes_enough(group):
                    group.sort(key=order.position.__getitem__)
                    result.append(Partition(len(result), group, [number[node] for node in group]))
        return result

    def fuse_partitions(self, partitions: list[Partition], prefix: str = "fused_") -> GraphModule:
        """Make every group a submodule, in place."""
        return fuse_by_partitions(self.graph_module, [partition.nodes for partition in partitions], prefix)

    def partition_and_fuse(self, prefix: str = "fused_") -> GraphModule:
        """Propose groups and make them submodules."""
        return self.fuse_partitions(self.propose_partitions(), prefix)

    def remove_bookend_non_compute_ops(self, partitions: list[Partition]) -> None:
        """Leave out of every group the nodes at its borders that compute nothing."""
        for partition in partitions:
            for from_start in (True, False):
                for node in sorted(partition.nodes, reverse=not from_start):
                    neighbours = node.all_input_nodes if from_start else node._users
                    if self._is_no_computation(node) and not any(other in partition.nodes for other in neighbours):
                        partition.remove_node(node)

    def _supports(self, modules: Any, node: Node) -> bool:
        return bool(self.operator_support.is_node_supported(modules, node))

    def _is_no_computation(self, node: Node) -> bool:
        return node.op == "call_function" and qualified_name(node.target) in self.non_compute_ops

    def _computes_enough(self, nodes: list[Node]) -> bool:
        count = 0
        for node in nodes:
            name = qualified_name(node.target) if node.op == "call_function" else ""
            count += node.op != "get_attr" and name not in _NO_COMPUTATION and name not in self.non_compute_ops
            count += bool(name) and name in self.allowed_single_node_partition_ops
        return count > 1

    def _with_attributes(self, modules: Any, nodes: list[Node]) -> list[Node]:
        """The nodes, and what they fetch and nobody else does, where the backend supports fetching."""
        inside = set(nodes)
        fetched = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source.op == "get_attr")
        own = [node for node in fetched if inside.issuperset(node._users) and self._supports(modules, node)]
        return [*own, *nodes]


def _connected(nodes: list[Node], order: Order) -> list[list[Node]]:
    """The nodes of a region in groups that do not wait for one another, because of values or of effects.

    They can run in any order, since nothing outside of the region stands between them.
    """
    places, inside = Places(None), set(nodes)
    for node in nodes:
        for source in order.before(node):
            if source in inside:
                places.join(source, node)
    groups: dict[Node, list[Node]] = {}
    for node in nodes:
        groups.setdefault(places.find(node), []).append(node)
    return list(groups.values())
