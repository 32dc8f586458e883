"""Files of graphs: pickle (which needs no torch to be read), GraphML, node-link JSON, DOT and Model Explorer's JSON.
What a node and an edge say is decided in `networkx_graph.py`; how a file is written whole or not at all, in `results/files.py`.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchgraft.errors import GraftError
from torchgraft.results.files import write_whole
from torchgraft.view.networkx_graph import EDGE_ATTRIBUTES, NODE_ATTRIBUTES, as_networkx, import_networkx

if TYPE_CHECKING:
    import networkx


_SUFFIXES = {".pickle": "pickle", ".pkl": "pickle", ".graphml": "graphml", ".json": "json", ".dot": "dot", ".gv": "dot"}
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


_WRITERS: dict[str, Callable[[Any], bytes]] = {
    "pickle": pickle.dumps,
    "graphml": _to_graphml,
    "json": _to_json,
    "dot": lambda graph: to_dot(graph).encode(),
    "model-explorer": lambda graph: (json.dumps(to_model_explorer(graph), indent=1) + "\n").encode(),
}
_READERS: dict[str, Callable[[bytes], Any]] = {"pickle": pickle.loads, "graphml": _from_graphml, "json": _from_json}


# ---- Model Explorer ----


_ATTRIBUTES = ("op", "role", "phase", "origin_name", "module", "source", "source_text", "result")


def to_model_explorer(program: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A program, or a graph of `to_networkx`, as a graph collection of Model Explorer, ready for `json.dump`.

    >>> import torchgraft
    >>> collection = to_model_explorer(torchgraft.symbolic_trace(lambda x: x * x))
    >>> collection["graphs"][0]["nodes"][1]["incomingEdges"]
    [{'sourceNodeId': 'x', 'sourceNodeOutputId': '0', 'targetNodeInputId': '0'},
     {'sourceNodeId': 'x', 'sourceNodeOutputId': '0', 'targetNodeInputId': '1'}]
    """
    graph = as_networkx(program, args, kwargs)
    name = graph.graph.get("name") or "program"
    nodes = [_node(graph, node, attributes) for node, attributes in graph.nodes(data=True)]
    return {"label": name, "graphs": [{"id": name, "nodes": nodes}]}


def _node(graph: networkx.MultiDiGraph, name: str, attributes: dict[str, Any]) -> dict[str, Any]:
    uses = sorted(graph.in_edges(name, keys=True, data=True), key=lambda edge: edge[2])
    label = str(attributes.get("module") or attributes.get("target") or name)
    call = attributes.get("node_call_info") or {}
    shape = _shape_text(attributes.get("shape"), attributes.get("dtype"))
    details = {key: attributes.get(key) for key in (*_ATTRIBUTES, "target")}
    attributes_shown = {key: value for key, value in details.items() if value is not None}
    attributes_shown |= {f"argument {key}": value for key, value in call.get("args", {}).items()}
    return {
        "id": name,
        "label": label.partition("(")[0].removeprefix("torch.ops.").removeprefix("torch.nn.functional."),
        "namespace": _home(attributes).replace(".", "/"),
        "attrs": [{"key": key, "value": _text(value)} for key, value in attributes_shown.items()],
        "incomingEdges": [
            {"sourceNodeId": source, "sourceNodeOutputId": "0", "targetNodeInputId": str(key)}
            for source, _, key, _ in uses
        ],
        "inputsMetadata": [
            {"id": str(key), "attrs": [{"key": "__tensor_tag", "value": _text(data.get("argument"))}]}
            for _, _, key, data in uses
        ],
        # A value of several tensors leaves by one edge, so their shapes are written together.
        "outputsMetadata": [{"id": "0", "attrs": [{"key": "tensor_shape", "value": shape}]}] if shape != "?" else [],
    }


def _shape_text(shape: Any, dtype: Any) -> str:
    if shape is None:
        return "?"
    if any(isinstance(item, (tuple, list)) or item is None for item in shape):
        return ", ".join([_shape_text(*pair) for pair in zip(shape, dtype, strict=True)])
    return f"{dtype}[{','.join(map(str, shape))}]"


def _home(attributes: dict[str, Any]) -> str:
    """The path of the module that is drawn around a node; one that is a node itself is no box around it."""
    path: str = attributes.get("module_path") or ""
    return path.rpartition(".")[0] if attributes.get("op") == "call_module" else path


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


# ---- DOT ----


_COLOURS = {
    "input": "#cfe8d5",
    "tangent": "#f6d3c9",
    "parameter": "#fff1c4",
    "buffer": "#f3e6c8",
    "constant": "#ececec",
    "guard": "#f4f4f4",
    "operation": "#dbe7f6",
    "output": "#cfe8d5",
}


def to_dot(program: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> str:
    """A program, or a graph of `to_networkx`, in the DOT language: modules are clusters, every use is an edge with its shape.

    >>> import torch, torchgraft
    >>> text = to_dot(torchgraft.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU())), torch.ones(2, 3))
    >>> for line in text.splitlines():
    ...     if "->" in line:
    ...         print(line)
      "input_1" -> "_0" [label="2x3", tooltip="input"];
      "_0" -> "output" [label="2x3", tooltip="result"];
    """
    graph = as_networkx(program, args, kwargs)
    lines = [
        f"digraph {_quoted(graph.graph.get('name') or 'program')} {{",
        '  graph [rankdir=TB, fontname="Helvetica", style="rounded", color="#9aa5b1"];',
        '  node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=11, color="#5b6b7b"];',
        '  edge [fontname="Helvetica", fontsize=9, color="#5b6b7b"];',
        *_cluster(graph, _module_tree(graph), "", "  "),
        *_edges(graph),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _module_tree(graph: networkx.MultiDiGraph) -> dict[str, Any]:
    """Nodes by the modules that hold them: each level has its nodes under None and its modules by their names."""
    tree: dict[Any, Any] = {}
    for name, attributes in graph.nodes(data=True):
        path = _home(attributes)
        level = tree
        for part in path.split(".") if path else []:
            level = level.setdefault(part, {})
        level.setdefault(None, []).append(name)
    return tree


def _cluster(graph: networkx.MultiDiGraph, level: dict[Any, Any], path: str, indent: str) -> Iterator[str]:
    for name in level.get(None, ()):
        yield f"{indent}{_quoted(name)} [{_node_attributes(name, graph.nodes[name])}];"
    for part, inner in level.items():
        if part is None:
            continue
        inner_path = f"{path}.{part}" if path else part
        yield f"{indent}subgraph {_quoted('cluster_' + inner_path)} {{"
        yield f"{indent}  label={_quoted(inner_path)};"
        yield from _cluster(graph, inner, inner_path, indent + "  ")
        yield f"{indent}}}"


def _node_attributes(name: str, attributes: dict[str, Any]) -> str:
    target = attributes.get("module") or attributes.get("origin_name") or attributes.get("target") or ""
    lines = [name, str(target).removeprefix("torch.ops."), attributes.get("result") or ""]
    label = "\\n".join([_escaped(line) for line in dict.fromkeys(lines) if line])
    call = attributes.get("node_call_info") or {}
    details = [f"{key} = {value}" for key, value in call.get("args", {}).items()]
    if attributes.get("source"):
        details.append(f"{attributes['source']}  {attributes.get('source_text') or ''}")
    tooltip = "\\n".join([_escaped(line) for line in details]) or _escaped(str(attributes.get("op")))
    colour = _COLOURS.get(attributes.get("role") or "", _COLOURS["operation"])
    return f'label="{label}", tooltip="{tooltip}", fillcolor="{colour}"'


def _edges(graph: networkx.MultiDiGraph) -> Iterator[str]:
    for source, user, attributes in graph.edges(data=True):
        shape = attributes.get("shape")
        is_plain = shape is not None and all(not isinstance(size, (tuple, list)) for size in shape)
        parts = [f"label={_quoted('x'.join(map(str, shape)) or 'scalar')}"] if is_plain else []
        parts.append(f"tooltip={_quoted(attributes.get('argument') or '')}")
        yield f"  {_quoted(source)} -> {_quoted(user)} [{', '.join(parts)}];"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\r", " ").replace("\n", " ")


def _quoted(text: Any) -> str:
    return f'"{_escaped(str(text))}"'
