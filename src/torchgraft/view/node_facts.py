"""What people ask about a node besides its value: which part it plays, and which module it belongs to.
Shapes and dtypes are in `values.py`, arguments bound to their names in `call_info.py`, source lines in `ir/origin.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from torchgraft.capturing.symbolic.tracer import symbolic_trace
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import is_guard
from torchgraft.ir.node import Node
from torchgraft.ir.verify import find_attribute

ROLES = ("input", "tangent", "parameter", "buffer", "constant", "guard", "operation", "output")


def graph_of(program: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> tuple[Graph, Any]:
    """The graph of a program, and what must be kept alive while it is read; a plain model is captured first."""
    if isinstance(program, Graph):
        return program, program
    if isinstance(program, GraphModule):
        return program.graph, program
    homes = {".".join(base.__module__.split(".")[:2]) for base in type(program).__mro__}
    for home, door in (("torch.fx", "from_fx"), ("torch.export", "from_export")):
        if home in homes:
            raise GraftError(
                f"cannot look at a {type(program).__name__} of {home}: bring it in first, with torchgraft.{door}()"
            )
    if isinstance(program, torch.nn.Module):
        from torchgraft.capturing.program import capture

        module = capture(program, args, kwargs) if args or kwargs else symbolic_trace(program)
        return module.graph, module
    raise GraftError(
        f"cannot look at {type(program).__name__}: give a program (a GraphModule or Graph of torchgraft) or an nn.Module"
    )


def role_of(node: Node) -> str:
    """Which of `ROLES` a node has.

    >>> graph = Graph()
    >>> role_of(graph.placeholder("x")), role_of(graph.placeholder("tangents_1"))
    ('input', 'tangent')
    """
    if node.op == "placeholder":
        kind = node.meta.get("origin_kind")
        if kind in ROLES:
            return kind
        return "tangent" if str(node.target).startswith("tangents_") else "input"
    if node.op == "get_attr":
        owner = node.graph.owning_module
        value = find_attribute(owner, node.target)[0] if owner is not None else None
        if isinstance(value, torch.nn.Parameter):
            return "parameter"
        prefix, _, name = node.target.rpartition(".")
        holder = find_attribute(owner, prefix)[0] if owner is not None and prefix else owner
        is_buffer = isinstance(holder, torch.nn.Module) and name in holder._buffers
        # Values met while capturing become unsaved buffers of a GraphModule, but they are no state of the model.
        if is_buffer and node.target in node.graph._constants:
            is_buffer = False
        return "buffer" if is_buffer else "constant"
    if is_guard(node.target):
        return "guard"
    return "output" if node.op == "output" else "operation"


def origin_name(node: Node) -> str | None:
    """Which parameter, buffer or result of the model an input of a program is, where it has another name."""
    if node.op == "get_attr":
        return str(node.target)
    return node.meta.get("origin_name")


def module_stack_of(node: Node) -> list[tuple[str, str]]:
    """The modules around a node, outermost first, each as (path, name of its class).

    Programs write the paths in three ways (`layer1.0`, `L['self'].layer1[0]`, with or without the root); here they are
    those of `named_modules()`, and the root is "".
    """
    stack = node.meta.get("nn_module_stack") or {}
    result = []
    for path, kind in stack.values():
        name = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
        result.append((_plain_path(path), name))
    return result


def _plain_path(path: str) -> str:
    for prefix in ("L['self']", "L__self__"):
        if path.startswith(prefix):
            path = path.removeprefix(prefix)
            break
    for old, new in (("['", "."), ("']", ""), ("[", "."), ("]", "")):
        path = path.replace(old, new)
    # Calling one module twice gives its second call a path of its own, `fc@1`.
    return path.lstrip(".").partition("@")[0]


def module_path_of(node: Node) -> str:
    """The path of the innermost module that a node belongs to; "" is the model itself."""
    if node.op == "call_module":
        return str(node.target)
    if node.op == "get_attr" and "nn_module_stack" not in node.meta:
        return str(node.target).rpartition(".")[0]
    stack = module_stack_of(node)
    return stack[-1][0] if stack else ""


def phases_of(graph: Graph) -> dict[Node, str]:
    """ "forward" or "backward" for every node of a joint program; empty for other programs."""
    backward = {node for node in graph.nodes if node.meta.get("partitioner_tag") == "is_backward"}
    if not backward:
        return {}
    return {node: "backward" if node in backward or role_of(node) == "tangent" else "forward" for node in graph.nodes}
