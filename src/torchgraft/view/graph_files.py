"""Files of graphs: pickle (which needs no torch to be read), GraphML, node-link JSON, DOT and Model Explorer's JSON.
What a node and an edge say is decided in `networkx_graph.py`; how a file is written whole or not at all, in `results/files.py`.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchgraft.errors import GraftError
from torchgraft.results.files import write_whole
from torchgraft.view.dot import to_dot
from torchgraft.view.model_explorer import to_model_explorer
from torchgraft.view.networkx_graph import EDGE_ATTRIBUTES, NODE_ATTRIBUTES, as_networkx, import_networkx

if TYPE_CHECKING:
    import networkx

_SUFFIXES = {
    ".pickle": "pickle",
    ".pkl": "pickle",
    ".graphml": "graphml",
    ".json": "json",
    ".dot": "dot",
    ".gv": "dot",
}
FORMATS = ("pickle", "graphml", "json", "dot", "model-explorer")


def save_graph(
    program: Any,
    path: str | PathLike[str],
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    format: str | None = None,
) -> Path:
    """Write a program, or a graph of `to_networkx`, to a file, and return its path.

    The format is "pickle", "graphml", "json" (node-link), "dot" or "model-explorer"; without one, the suffix of the file decides.
    Example inputs give shapes, as in `to_networkx`.

    >>> import tempfile, torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: x * x)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load_graph(save_graph(program, f"{folder}/square.graphml")).number_of_edges("x", "mul")
    2
    """
    place = Path(path)
    chosen = format if format is not None else _SUFFIXES.get(place.suffix.lower())
    if chosen not in FORMATS:
        found = f"format {format!r}" if format is not None else f"a file name that ends in {place.suffix!r}"
        raise GraftError(
            f"cannot save a graph with {found}: the formats are {', '.join(FORMATS)}, the suffixes {', '.join(_SUFFIXES)}"
        )
    write_whole(place, _WRITERS[chosen](as_networkx(program, args, kwargs)))
    return place


def load_graph(path: str | PathLike[str]) -> networkx.MultiDiGraph:
    """Read a graph that `save_graph` wrote as pickle, GraphML or node-link JSON.

    A pickle can run code when it is read: load only files that you trust. The two others are plain data.

    >>> import tempfile, torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: x.relu())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = torchgraft.save_graph(program, f"{folder}/relu.json")
    ...     list(load_graph(path))
    ['x', 'relu', 'output']
    """
    place = Path(path)
    chosen = _SUFFIXES.get(place.suffix.lower())
    reader = _READERS.get(chosen or "")
    if reader is None:
        raise GraftError(f"cannot load a graph from '{place}': only .pickle, .graphml and .json files can be read back")
    try:
        content = place.read_bytes()
    except OSError as error:
        raise GraftError(f"cannot read '{place}': {error.strerror or error}") from error
    networkx = import_networkx()
    try:
        graph = reader(content)
    except Exception as error:  # a damaged file makes these readers raise nearly anything
        raise GraftError(f"cannot load a graph from '{place}': it is no {chosen} file of a graph ({error})") from error
    if not isinstance(graph, networkx.MultiDiGraph):
        raise GraftError(
            f"cannot load a graph from '{place}': it holds a {type(graph).__name__}, and save_graph() writes a MultiDiGraph"
        )
    return graph


# ---- GraphML: attributes are texts and numbers, so everything else is JSON inside a text ----

_NOT_IN_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _to_graphml(graph: networkx.MultiDiGraph) -> bytes:
    networkx = import_networkx()
    flat = networkx.MultiDiGraph(**_flat(graph.graph))
    for name, attributes in graph.nodes(data=True):
        flat.add_node(name, **_flat(attributes))
    for source, user, key, attributes in graph.edges(keys=True, data=True):
        flat.add_edge(source, user, key=key, **_flat(attributes))
    text = "\n".join(networkx.generate_graphml(flat))
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'.encode()


def _flat(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: _flat_value(value) for name, value in attributes.items() if value is not None}


def _flat_value(value: Any) -> Any:
    if isinstance(value, str):
        # A text that would be taken for JSON, or that XML cannot hold or would trim, is written as JSON as well.
        is_safe = value[:1] not in ("[", "{", '"') and value == value.strip() and not _NOT_IN_XML.search(value)
        return value if is_safe else json.dumps(value)
    return value if isinstance(value, (bool, int, float)) else json.dumps(value)


def _from_graphml(content: bytes) -> networkx.MultiDiGraph:
    networkx = import_networkx()
    flat = networkx.parse_graphml(content.decode("utf-8"), edge_key_type=int, force_multigraph=True)
    result = networkx.MultiDiGraph(
        **{key: _full_value(value) for key, value in flat.graph.items() if "_default" not in key}
    )
    for name, attributes in flat.nodes(data=True):
        result.add_node(name, **_restored(attributes, NODE_ATTRIBUTES))
    for source, user, key, attributes in flat.edges(keys=True, data=True):
        result.add_edge(source, user, key=key, **_restored(attributes, EDGE_ATTRIBUTES))
    return result


def _full_value(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("[", "{", '"'):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _restored(attributes: dict[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """Attributes as `to_networkx` gives them: in its order, None where they are missing, shapes as tuples."""
    found = {name: _full_value(value) for name, value in attributes.items() if name not in ("id", "key")}
    result = {name: found.pop(name, None) for name in known}
    result.update(found)
    return _with_tuples(result)


def _with_tuples(attributes: dict[str, Any]) -> dict[str, Any]:
    for name in ("shape", "dtype", "memory_format"):
        if name in attributes:
            attributes[name] = _tuples(attributes[name])
    return attributes


def _tuples(value: Any) -> Any:
    return tuple([_tuples(item) for item in value]) if isinstance(value, list) else value


# ---- node-link JSON ----


def _to_json(graph: networkx.MultiDiGraph) -> bytes:
    data = import_networkx().node_link_data(graph, edges="edges")
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


def _from_json(content: bytes) -> networkx.MultiDiGraph:
    graph = import_networkx().node_link_graph(json.loads(content), edges="edges")
    for _, attributes in graph.nodes(data=True):
        _with_tuples(attributes)
    for _, _, attributes in graph.edges(data=True):
        _with_tuples(attributes)
    return graph


def _to_model_explorer_json(graph: networkx.MultiDiGraph) -> bytes:
    return (json.dumps(to_model_explorer(graph), indent=1) + "\n").encode()


_WRITERS: dict[str, Callable[[Any], bytes]] = {
    "pickle": pickle.dumps,
    "graphml": _to_graphml,
    "json": _to_json,
    "dot": lambda graph: to_dot(graph).encode(),
    "model-explorer": _to_model_explorer_json,
}
_READERS: dict[str, Callable[[bytes], Any]] = {"pickle": pickle.loads, "graphml": _from_graphml, "json": _from_json}
