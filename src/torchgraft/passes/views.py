"""Calls of `view`, which refuses layouts that `reshape` takes: kernels of integers and of images return channels last.
Who uses such kernels has these calls copy where they must; nobody may write into what they return.
"""

from __future__ import annotations

from typing import Any

import torch

from torchgraft.analysis.aliases import Aliases
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.node import Node

_RESHAPES: dict[Any, Any] = {
    torch.Tensor.view: torch.Tensor.reshape,
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}


def views_nobody_writes(program: GraphModule) -> list[Node]:
    """Calls of `view` for which nobody could tell a copy from the view.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: (x + 1).view(-1) + x.sin().view(-1).add_(1))
    >>> [node.name for node in views_nobody_writes(program)]
    ['view']
    """
    return _views(program)[0]


def has_written_views(program: GraphModule) -> bool:
    """Whether there are others, for which values have to lie in memory as the program was made for."""
    return bool(_views(program)[1])


def _views(program: GraphModule) -> tuple[list[Node], list[Node]]:
    """The calls that nobody writes through, and the others."""
    views = [node for node in program.graph.nodes if _is_view(node)]
    if not views:
        return [], []
    memory = Aliases(program.graph)
    written = [node for node in views if memory.is_written(node)]
    return [node for node in views if node not in written], written


def _is_view(node: Node) -> bool:
    is_method = node.op == "call_method" and node.target == "view"
    is_call = is_method or (node.op == "call_function" and any(node.target is known for known in _RESHAPES))
    return is_call and not (len(node.args) > 1 and isinstance(node.args[1], torch.dtype)) and "dtype" not in node.kwargs


def reshape_instead(node: Node) -> None:
    """Have one of these calls take any layout."""
    node.target = "reshape" if node.op == "call_method" else _RESHAPES[node.target]
