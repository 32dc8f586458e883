"""Copies of whole graphs: in memory (`copy.deepcopy`) and as plain data (`pickle`), metadata included.
Neither traces anything again; functions travel by the name they are imported under.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchgraft.errors import GraphError
from torchgraft.ir.arguments import EMPTY_DICT, map_aggregate
from torchgraft.ir.node import _LEAVES, Node, map_arg
from torchgraft.ir.printing import qualified_name
from torchgraft.ir.verify import lint
from torchgraft.results.tables import listed

if TYPE_CHECKING:
    from torchgraft.ir.graph import Graph


def copy_graph(source: Graph, memo: dict[int, Any]) -> Graph:
    """A graph with the same nodes, names, order and metadata. Owners, hooks and insertion points do not come along."""
    result = type(source).__new__(type(source))
    type(source).__init__(result, tracer_cls=source._tracer_cls, tracer_extras=source._tracer_extras)
    memo[id(source)] = result
    result._graph_namespace = source._graph_namespace.copy()
    result._constants = dict(source._constants)
    try:
        _copy_nodes(source, result, memo)
    except KeyError:
        lint(source)  # which says which node uses one that comes later, or is none of the graph's
        raise
    result._length = source._length
    result._order_is_stale = source._order_is_stale
    if source._code_generator is not None:
        result._code_generator = copy.deepcopy(source._code_generator, memo)
    return result


def _copy_nodes(source: Graph, result: Graph, memo: dict[int, Any]) -> None:
    copies: dict[Node, Node] = {}
    lookup = copies.__getitem__
    root = previous = result._root
    for node in source.nodes:
        clone = Node(result, node._name, node._op, node._target)
        clone._type = node._type
        clone._origin = node._origin
        clone._order = node._order
        clone._guarded = node._guarded
        if node._meta is not None:
            clone._meta = dict(node._meta)
        copies[node] = memo[id(node)] = clone
        args = node._args
        if args:
            clone._args = tuple(
                [lookup(a) if type(a) is Node else a if type(a) in _LEAVES else map_arg(a, lookup) for a in args]
            )
        if node._kwargs:
            clone._kwargs = map_arg(node._kwargs, lookup)
        if node._inputs:
            clone._inputs = inputs = tuple([copies[item] for item in node._inputs])
            for item in inputs:
                item._users[clone] = None
        previous._next = clone
        clone._prev = previous
        previous = clone
    previous._next = root
    root._prev = previous


class _NodeReference(NamedTuple):
    position: int


class _FunctionReference(NamedTuple):
    path: str


# The metadata that says where in the user's program a node comes from.
_WHERE_FROM = ("stack_trace", "nn_module_stack", "source_fn_stack")


def inherit_origin(node: Node, source: Node) -> None:
    """Say that a node, which is there for another one, comes from where that comes from: the user's line and the modules.

    Of a program that was read from a file, or came from another library, metadata alone knows that.
    """
    if source._origin is not None:
        node._origin = source._origin
    if node._meta is not None or source._meta is not None:
        known = source.meta
        node.meta.update({key: known[key] for key in _WHERE_FROM if key in known})


def graph_state(graph: Graph) -> dict[str, Any]:
    """The graph as data that pickle can write."""
    numbers = {node: index for index, node in enumerate(graph.nodes)}

    def encode_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            return _NodeReference(numbers[leaf])
        # torch.save uses a protocol of pickle that cannot write these.
        return _FunctionReference(str(leaf)) if isinstance(leaf, torch.memory_format) else leaf

    def encode(value: Any) -> Any:
        return map_aggregate(value, encode_leaf)

    rows = []
    left_out: dict[str, list[str]] = {}
    for node in graph.nodes:
        target = _FunctionReference(_import_path(node)) if node._op == "call_function" else node._target
        args, kwargs = encode(node._args), encode(node._kwargs)
        rows.append((node._op, target, args, kwargs, node._name, node._type, _picklable_meta(node, numbers, left_out)))
    _warn_of(left_out)
    return {
        "rows": rows,
        "namespace": (graph._graph_namespace._used, graph._graph_namespace._counts),
        "constants": graph._constants,
        "tracer_cls": graph._tracer_cls if _can_pickle(graph._tracer_cls) else None,
        "tracer_extras": graph._tracer_extras,
        "codegen": graph._code_generator,
    }


def restore_graph(graph: Graph, state: dict[str, Any]) -> None:
    """Fill a bare graph from what `graph_state` returned."""
    graph.__init__(tracer_cls=state["tracer_cls"], tracer_extras=state["tracer_extras"])  # type: ignore[misc]
    nodes: list[Node] = []

    def walk(value: Any) -> Any:
        if isinstance(value, _NodeReference):
            return nodes[value.position]
        if isinstance(value, _FunctionReference):
            return import_object(value.path)
        if type(value) is tuple:
            return tuple([walk(item) for item in value])
        if isinstance(value, (list, dict, slice, tuple)):
            return _map_references(value, walk)
        return value

    for op, target, args, kwargs, name, type_expr, meta in state["rows"]:
        if isinstance(target, _FunctionReference):
            target = import_object(target.path)
        node = Node(graph, name, op, target, walk(args), walk(kwargs) if kwargs else EMPTY_DICT, type_expr)
        node._meta = walk(meta) if meta else {}
        graph._link(node, graph._root)
        nodes.append(node)
    used, counts = state["namespace"]
    graph._graph_namespace._used, graph._graph_namespace._counts = set(used), dict(counts)
    graph._constants = dict(state["constants"])
    graph._code_generator = state["codegen"]


def _map_references(value: Any, walk: Any) -> Any:
    if isinstance(value, slice):
        return slice(walk(value.start), walk(value.stop), walk(value.step))
    if isinstance(value, dict):
        return type(value)([(key, walk(item)) for key, item in value.items()])
    if hasattr(value, "_fields"):
        return type(value)._make([walk(item) for item in value])  # see `rebuild_tuple`
    return type(value)([walk(item) for item in value])


def _import_path(node: Node) -> str:
    path = qualified_name(node._target)
    try:
        found = import_object(path)
    except (ImportError, AttributeError):
        found = None
    if found != node._target:  # a method of a class is a new object each time it is looked up
        raise GraphError(
            f"cannot pickle node '{node._name}': its function {node._target!r} cannot be imported as '{path}'; "
            "define it at the top level of an importable module"
        )
    return path


def import_object(path: str) -> Any:
    """The object at a dotted path, as `qualified_name` writes it; ImportError or AttributeError where there is none."""
    parts = path.split(".")
    if parts[0] == "torch":
        value: Any = torch
        for part in parts[1:]:
            value = getattr(value, part)
        return getattr(value, "__torchgraft_original__", value)  # another thread may be tracing
    if len(parts) == 1:
        import builtins

        return getattr(builtins, path)
    for length in range(len(parts) - 1, 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            value = getattr(value, part)
        return getattr(value, "__torchgraft_original__", value)
    raise ImportError(f"no module on the way to '{path}'")


def _can_pickle(value: Any) -> bool:
    try:
        pickle.dumps(value, protocol=2)  # what torch.save uses
    except Exception:  # pickling runs arbitrary user code, which may raise anything
        return False
    return True


def _picklable_meta(node: Node, numbers: dict[Node, int], left_out: dict[str, list[str]]) -> dict[str, Any]:
    """The metadata of a node as it goes into a file; what cannot go is noted in `left_out`."""
    result = {}
    for key, value in node.meta.items():
        encoded = _replace_nodes(value, numbers)
        if isinstance(encoded, (str, int, float, bool, type(None))) or _can_pickle(encoded):
            result[key] = encoded
        elif _can_pickle(described := _described(encoded)):
            result[key] = described
        else:
            left_out.setdefault(f"'{key}' ({type(value).__name__})", []).append(node._name)
    return result


def _warn_of(left_out: dict[str, list[str]]) -> None:
    for what, names in left_out.items():
        nodes = listed([f"'{name}'" for name in names], 1)
        warnings.warn(f"metadata {what} of node {nodes} cannot be pickled and is left out", stacklevel=4)


def _described(value: Any) -> Any:
    """Metadata that torch and captures write, in a form that can go into files: fakes as tensors on the meta device, classes that
    cannot be imported by their names."""
    if isinstance(value, torch.memory_format):
        return _FunctionReference(str(value))
    if isinstance(value, torch.Tensor):
        return _without_data(value)
    if isinstance(value, type):
        return value if _can_pickle(value) else f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (list, dict)) or type(value) is tuple or hasattr(value, "_fields"):
        return _map_references(value, _described)
    return value


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    if _can_pickle(tensor) or any(isinstance(size, torch.SymInt) for size in (*tensor.shape, *tensor.stride())):
        return tensor
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


def _replace_nodes(value: Any, numbers: dict[Node, int]) -> Any:
    """Metadata with references in the place of nodes; containers keep their kind. A node of another graph stays, and fails."""
    if isinstance(value, Node):
        return _NodeReference(numbers[value]) if value in numbers else value
    if isinstance(value, (list, dict)) or type(value) is tuple:
        return _map_references(value, lambda item: _replace_nodes(item, numbers))
    return value
