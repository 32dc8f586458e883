"""The names of `torch.fx.traceback`: current metadata that new nodes take, and records of which node made which.
`Transformer`, `node_copy` and `graph_copy` hand metadata on by themselves; current metadata is for those who trace or interpret
with proxies. What serves torch.compile alone (replayed views, numbers of backward nodes) is not here.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from torchgraft.capturing.patching.active import Patch, acquire_all, release_all
from torchgraft.capturing.tracer_base import TracerBase
from torchgraft.interpreter import Interpreter
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node

__all__ = [
    *("NodeSource", "NodeSourceAction", "annotate", "annotate_fn", "format_stack", "get_current_meta"),
    *(
        "get_graph_provenance_json",
        "has_preserved_node_meta",
        "preserve_node_meta",
        "set_current_meta",
        "set_stack_trace",
    ),
]

Annotated = TypeVar("Annotated", bound=Callable[..., Any])

current_meta: dict[str, Any] = {}
should_preserve_node_meta = False

# What new nodes take from it, besides the stack trace; the names are torch.fx's.
_TAKEN = (
    *("nn_module_stack", "torch_fn", "source_fn_stack", "original_aten", "recompute", "ac_graph_id"),
    *("has_backward_hook", "from_node", "quantization_tag", "_numeric_debug_handle", "custom", "partitioner_tag"),
)


# ---- current metadata ----


def _take_current_meta(node: Node) -> None:
    if not should_preserve_node_meta:
        return
    if current_meta.get("stack_trace"):
        node.stack_trace = current_meta["stack_trace"]
    for name in _TAKEN:
        if name in current_meta:
            node.meta[name] = copy.copy(current_meta[name])


_record, _create_node, _run_node = TracerBase._record, TracerBase.create_node, Interpreter.run_node


def _record_with_meta(self: TracerBase, *args: Any, **kwargs: Any) -> Any:
    proxy = _record(self, *args, **kwargs)
    _take_current_meta(proxy.node)
    return proxy


def _create_node_with_meta(self: TracerBase, *args: Any, **kwargs: Any) -> Node:
    node = _create_node(self, *args, **kwargs)
    _take_current_meta(node)
    return node


def _run_node_with_meta(self: Interpreter, n: Node) -> Any:
    with set_current_meta(n, f"Interpreter_{type(self).__name__}"):
        return _run_node(self, n)


# Tracing and interpreting ask nobody for current metadata as long as nobody keeps any.
_PATCHES = [
    Patch(TracerBase, "_record", _record_with_meta),
    Patch(TracerBase, "create_node", _create_node_with_meta),
    Patch(Interpreter, "run_node", _run_node_with_meta),
]


@contextlib.contextmanager
def preserve_node_meta(enable: bool = True) -> Iterator[None]:
    """While the block lasts, new nodes take the current metadata, which is that of the node that is being interpreted.

    >>> import torchgraft
    >>> with preserve_node_meta(), annotate({"stage": 1}):
    ...     program = torchgraft.symbolic_trace(lambda x: x + 1)
    >>> [node.meta.get("custom") for node in program.graph.nodes]
    [{'stage': 1}, {'stage': 1}, {'stage': 1}]
    """
    global should_preserve_node_meta, current_meta
    saved = should_preserve_node_meta, dict(current_meta)
    acquire_all(_PATCHES)
    try:
        should_preserve_node_meta = enable
        yield
    finally:
        should_preserve_node_meta, current_meta = saved
        release_all(_PATCHES)


def has_preserved_node_meta() -> bool:
    """Whether new nodes take the current metadata."""
    return should_preserve_node_meta


def get_current_meta() -> dict[str, Any]:
    """The metadata that new nodes take."""
    return current_meta


@contextlib.contextmanager
def set_current_meta(node: Node, pass_name: str = "") -> Iterator[None]:
    """Let the metadata of a node be the current one, with a record that new nodes are made from it."""
    global current_meta
    saved = current_meta
    try:
        if should_preserve_node_meta and node.meta:
            current_meta = {**node.meta, "from_node": [NodeSource(node, pass_name, NodeSourceAction.CREATE)]}
        yield
    finally:
        current_meta = saved


def set_stack_trace(stack: list[str]) -> None:
    """Let the lines be the stack trace of new nodes; no lines, and they have none."""
    if should_preserve_node_meta:
        if stack:
            current_meta["stack_trace"] = "".join(stack)
        else:
            current_meta.pop("stack_trace", None)


def format_stack() -> list[str]:
    """The current stack trace, or the Python stack of the caller, as the standard library formats it."""
    if should_preserve_node_meta:
        return [current_meta.get("stack_trace", "")]
    return traceback.format_list(traceback.extract_stack()[:-1])


@contextlib.contextmanager
def annotate(annotation_dict: dict[str, Any]) -> Iterator[None]:
    """Add entries to what nodes made in the block have as `meta["custom"]`, where metadata is preserved."""
    global current_meta
    saved = current_meta
    current_meta = {**saved, "custom": {**saved.get("custom", {}), **annotation_dict}}
    try:
        yield
    finally:
        current_meta = saved


def annotate_fn(annotation_dict: dict[str, Any]) -> Callable[[Annotated], Annotated]:
    """A decorator: the nodes that the function makes are annotated."""

    def decorate(function: Annotated) -> Annotated:
        @functools.wraps(function)
        def annotated(*args: Any, **kwargs: Any) -> Any:
            with annotate(annotation_dict):
                return function(*args, **kwargs)

        return annotated  # type: ignore[return-value]

    return decorate


# ---- where nodes come from ----


class _NodeInfo(NamedTuple):
    name: str
    target: str
    graph_id: int


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
        self.node_info = None if node is None else _NodeInfo(node.name, str(node.target), id(node.graph))
        self.pass_name = pass_name
        self.action = [action] if isinstance(action, NodeSourceAction) else list(action or ())
        self.from_node: list[NodeSource] = [] if node is None else list(node.meta.get("from_node", ()))

    @property
    def name(self) -> str:
        """The name of the node, or nothing."""
        return self.node_info.name if self.node_info else ""

    @property
    def target(self) -> str:
        """What the node called, as text, or nothing."""
        return self.node_info.target if self.node_info else ""

    @property
    def graph_id(self) -> int:
        """The id of the node's graph, or -1."""
        return self.node_info.graph_id if self.node_info else -1

    @classmethod
    def _from_dict(cls, d: dict[str, Any] | None) -> NodeSource | None:
        if d is None:
            return None
        actions = [NodeSourceAction(text) for text in d.get("action", "").split("+") if text]
        found = cls(None, d.get("pass_name", ""), actions)
        if {"name", "target", "graph_id"} <= d.keys():
            found.node_info = _NodeInfo(d["name"], d["target"], d["graph_id"])
        found.from_node = [source for source in map(cls._from_dict, d.get("from_node") or ()) if source is not None]
        return found

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
