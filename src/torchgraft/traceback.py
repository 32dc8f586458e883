"""The names of `torch.fx.traceback` that mean something here: the Python stack, and records of which node made which.
Metadata is handed on by `Transformer`, `node_copy` and `graph_copy` themselves, so there is no current metadata to preserve,
set or annotate; asking for those names says so.
"""

from __future__ import annotations

import enum
import traceback
from typing import Any

from torchgraft.fx_passes.semi_private import preserve_node_meta as preserve_node_meta
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node

__all__ = [
    "NodeSource",
    "NodeSourceAction",
    "format_stack",
    "get_current_meta",
    "get_graph_provenance_json",
    "has_preserved_node_meta",
]


class NodeSourceAction(enum.Enum):
    """What was done to make a node out of another."""

    CREATE = "create"
    REPLACE = "replace"


class NodeSource:
    """A record for `node.meta["from_node"]`: the node it was made from, by which pass, and where that one came from.

    It holds names, not nodes, so it outlives the graph it speaks of.

    >>> graph = Graph()
    >>> NodeSource(graph.placeholder("x"), "my_pass", NodeSourceAction.CREATE).to_dict()["action"]
    'create'
    """

    def __init__(
        self,
        node: Node | None,
        pass_name: str = "",
        action: NodeSourceAction | list[NodeSourceAction] | None = None,
    ) -> None:
        self.name = "" if node is None else node.name
        self.target = "" if node is None else str(node.target)
        self.graph_id = -1 if node is None else id(node.graph)
        self.pass_name = pass_name
        self.action = [action] if isinstance(action, NodeSourceAction) else list(action or ())
        self.from_node: list[NodeSource] = [] if node is None else list(node.meta.get("from_node", ()))

    def to_dict(self) -> dict[str, Any]:
        """The record and those before it as plain data."""
        return {
            "name": self.name,
            "target": self.target,
            "graph_id": self.graph_id,
            "pass_name": self.pass_name,
            "action": self._action_text(),
            "from_node": [source.to_dict() for source in self.from_node],
        }

    def print_readable(self, indent: int = 0) -> str:
        """The record and those before it as text, one line each, older ones further to the right."""
        line = (
            f"(name={self.name}, pass_name={self.pass_name}, action={self._action_text()}, graph_id={self.graph_id})\n"
        )
        return " " * indent * 4 + line + "".join([source.print_readable(indent + 1) for source in self.from_node])

    def _action_text(self) -> str:
        return "+".join([action.value for action in self.action])

    def __repr__(self) -> str:
        return self.print_readable()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NodeSource) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.name, self.target, self.graph_id, self.pass_name, self._action_text()))


def get_graph_provenance_json(graph: Graph) -> dict[str, Any]:
    """For each function call of a graph the records in its `meta["from_node"]`, as plain data."""
    return {
        node.name: [source.to_dict() for source in node.meta.get("from_node", ())]
        for node in graph.nodes
        if node.op == "call_function"
    }


def format_stack() -> list[str]:
    """The Python stack of the caller, as the standard library formats it."""
    return traceback.format_list(traceback.extract_stack()[:-1])


def has_preserved_node_meta() -> bool:
    """Whether new nodes take their metadata from a current one; they never do here."""
    return False


def get_current_meta() -> dict[str, Any]:
    """The metadata that new nodes take: none."""
    return {}


def __getattr__(name: str) -> Any:
    if name in ("set_current_meta", "set_stack_trace", "annotate", "annotate_fn"):
        raise AttributeError(
            f"torchgraft.traceback has no '{name}': new nodes take no metadata from the surroundings; Transformer, node_copy "
            "and graph_copy hand metadata on by themselves, and node.meta can be written where a node is made"
        )
    raise AttributeError(f"module 'torchgraft.traceback' has no attribute '{name}'")
