"""torch.fx's GraphTransformObserver: which nodes a pass made and erased, and drawings before and after."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.fx_passes.drawer import FxGraphDrawer
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node
from torchgraft.traceback import NodeSource, NodeSourceAction

T = TypeVar("T")


class GraphTransformObserver:
    """Watches a module while a pass runs: `created_nodes` and `erased_nodes` are names.

    New nodes get `meta["from_node"]`. With `log_url`, a folder, the program before and after is written there where it changed.

    >>> import torch, torchgraft
    >>> module = torchgraft.symbolic_trace(lambda x: torch.relu(x))
    >>> with GraphTransformObserver(module, "use sigmoid") as observer:
    ...     found = torchgraft.replace_pattern(module, lambda a: torch.relu(a), lambda a: torch.sigmoid(a))
    >>> observer.created_nodes, observer.erased_nodes
    ({'sigmoid'}, {'relu'})
    """

    _pass_count = 0

    def __init__(
        self, gm: GraphModule, passname: str, subsystem: str | None = None, log_url: str | None = None
    ) -> None:
        self.gm = gm
        self.passname = passname
        self.subsystem = subsystem
        self.log_url = log_url
        self.active = True
        self.erased_nodes: set[str] = set()
        self.created_nodes: set[str] = set()
        self.name_to_node: dict[str, Node] = {}
        self._copies: list[GraphModule] = []
        self._before = ""

    @classmethod
    def get_current_pass_count(cls) -> int:
        """How many passes were logged."""
        return cls._pass_count

    def apply_gm_pass(self, pass_fn: Callable[[GraphModule], T]) -> T | None:
        """Run a pass over the module, watched."""
        with self:
            return pass_fn(self.gm)

    def apply_graph_pass(self, pass_fn: Callable[[Graph], T]) -> T | None:
        """Run a pass over the graph, watched."""
        with self:
            return pass_fn(self.gm.graph)

    def get_node_creation_hook(self) -> Callable[[Node], None]:
        """What is called for every node that is made."""
        return self._created

    def get_node_erase_hook(self) -> Callable[[Node], None]:
        """What is called for every node that is erased."""
        return self._erased

    def get_node_replace_hook(self) -> Callable[[Node, str, Node], None]:
        """What is called for every user that gets another input."""
        return self._replaced

    def get_deepcopy_hook(self) -> Callable[[GraphModule], None]:
        """What is called for every copy of the module."""
        return self._copied

    def __enter__(self) -> GraphTransformObserver:
        self.erased_nodes.clear()
        self.created_nodes.clear()
        self._copies.clear()
        self.name_to_node = {node.name: node for node in self.gm.graph.nodes}
        if self.log_url is not None:
            GraphTransformObserver._pass_count += 1
            self._before = self._dot()
        self.gm._register_create_node_hook(self._created)
        self.gm._register_erase_node_hook(self._erased)
        self.gm._register_replace_node_hook(self._replaced)
        self.gm._register_deepcopy_hook(self._copied)
        return self

    def __exit__(self, *error: object) -> None:
        for module in (*self._copies, self.gm):
            module._unregister_create_node_hook(self._created)
            module._unregister_erase_node_hook(self._erased)
            module._unregister_replace_node_hook(self._replaced)
            module._unregister_deepcopy_hook(self._copied)
        if self.log_url is not None and (self.created_nodes or self.erased_nodes):
            for when, text in (("input", self._before), ("output", self._dot())):
                name = f"pass_{self._pass_count}_{self.passname}_{when}_graph.dot"
                with open(os.path.join(self.log_url, name), "w") as file:
                    file.write(text)

    def _dot(self) -> str:
        return FxGraphDrawer(self.gm, self.passname).get_dot_graph().to_string()

    def _created(self, node: Node) -> None:
        self.created_nodes.add(node.name)
        self.name_to_node[node.name] = node
        node.meta.setdefault("from_node", []).append(NodeSource(None, self.passname, NodeSourceAction.CREATE))

    def _erased(self, node: Node) -> None:
        self.erased_nodes.add(node.name)
        self.name_to_node.pop(node.name, None)

    def _replaced(self, old: Node, new: Any, user: Node) -> None:
        node = self.name_to_node.get(new) if isinstance(new, str) else None
        if node is None or any(source.name == old.name for source in node.meta.get("from_node", ())):
            return
        action = [NodeSourceAction.REPLACE]
        if node.name in self.created_nodes:
            action.append(NodeSourceAction.CREATE)
        others = [source for source in node.meta.get("from_node", ()) if not self._made_here(source)]
        node.meta["from_node"] = [*others, NodeSource(old, self.passname, action)]

    def _made_here(self, source: NodeSource) -> bool:
        return source.pass_name == self.passname and source.action == [NodeSourceAction.CREATE]

    def _copied(self, module: GraphModule) -> None:
        self._copies.append(module)
