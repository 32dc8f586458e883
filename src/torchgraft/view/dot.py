"""`to_dot`: a program in the DOT language of Graphviz and its many readers, as text; nothing is run and nothing is needed.
Drawings without Graphviz are made in `drawing/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torchgraft.view.networkx_graph import as_networkx

if TYPE_CHECKING:
    import networkx

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
        path = attributes.get("module_path") or ""
        if attributes.get("op") == "call_module":
            path = path.rpartition(".")[0]  # a module that is one node is no box around it
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
