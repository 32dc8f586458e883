"""`to_model_explorer`: a program in the JSON that Google's Model Explorer opens: modules as layers, every use as an edge.
The names of its fields (`incomingEdges`, `outputsMetadata`, ...) are Model Explorer's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torchgraft.view.networkx_graph import as_networkx

if TYPE_CHECKING:
    import networkx

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
    path = attributes.get("module_path") or ""
    if attributes.get("op") == "call_module":
        path = path.rpartition(".")[0]
    uses = sorted(graph.in_edges(name, keys=True, data=True), key=lambda edge: edge[2])
    label = str(attributes.get("module") or attributes.get("target") or name)
    call = attributes.get("node_call_info") or {}
    details = {key: attributes.get(key) for key in _ATTRIBUTES}
    details["target"] = attributes.get("target")
    attributes_shown = {key: value for key, value in details.items() if value is not None}
    attributes_shown |= {f"argument {key}": value for key, value in call.get("args", {}).items()}
    return {
        "id": name,
        "label": label.partition("(")[0].removeprefix("torch.ops.").removeprefix("torch.nn.functional."),
        "namespace": path.replace(".", "/"),
        "attrs": [{"key": key, "value": _text(value)} for key, value in attributes_shown.items()],
        "incomingEdges": [
            {"sourceNodeId": source, "sourceNodeOutputId": "0", "targetNodeInputId": str(key)}
            for source, _, key, _ in uses
        ],
        "inputsMetadata": [
            {"id": str(key), "attrs": [{"key": "__tensor_tag", "value": _text(data.get("argument"))}]}
            for _, _, key, data in uses
        ],
        "outputsMetadata": [
            {"id": str(number), "attrs": [{"key": "tensor_shape", "value": text}]}
            for number, text in enumerate(_outputs(attributes.get("shape"), attributes.get("dtype")))
        ],
    }


def _outputs(shape: Any, dtype: Any) -> Iterator[str]:
    """The shape on an edge; a value of several tensors leaves by one edge, so they are written together."""
    if shape is not None:
        yield _shape_text(shape, dtype)


def _shape_text(shape: Any, dtype: Any) -> str:
    if shape is None:
        return "?"
    if any(isinstance(item, (tuple, list)) or item is None for item in shape):
        return ", ".join([_shape_text(*pair) for pair in zip(shape, dtype, strict=True)])
    return f"{dtype}[{','.join(map(str, shape))}]"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
