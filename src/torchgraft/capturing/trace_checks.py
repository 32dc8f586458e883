"""What is refused before a symbolic trace begins, and what is looked at when it is over.
The refusals on the way are raised where they are noticed; how they are told from the model's own errors is in `refusals.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from torchgraft.capturing.proxy import Proxy
from torchgraft.capturing.reads import asks_types
from torchgraft.errors import TraceError
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import are_different, check_value
from torchgraft.ir.modules import has_hooks
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_line

_NUMBERS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "item", getattr, len})


def refuse_root_hooks(root: torch.nn.Module) -> None:
    if not type(root).__call__.__module__.startswith(("torch.", "torchgraft.")):
        raise TraceError(
            f"cannot trace {type(root).__name__}: it is called in a way of its own ({type(root).__name__}.__call__), and a trace "
            "begins with its forward; trace a function that calls it, with the model as an attribute of a module around it, "
            "or give it no __call__"
        )
    if has_hooks(root):
        raise TraceError(
            f"cannot trace {type(root).__name__}: hooks are registered on it, and the traced program would not run them; "
            "remove them and register them on the traced module instead, or trace a module that contains this one"
        )


def is_memo(value: Any) -> bool:
    """Whether a value put into a dict is computed from the model or constants alone, so that a program may compute it anew."""
    if not isinstance(value, Proxy):
        return isinstance(value, torch.Tensor)
    pending, seen = [value.node], set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node._op == "placeholder" or (node._op != "get_attr" and not node._inputs):
            return False
        pending += node._inputs
    return True


def drop_constants(graph: Graph, constants: list[Node]) -> None:
    """Drop constants that only Python looked at."""
    for node in reversed(constants):
        if not node._erased and not node.users:
            fetched = [source for source in node._inputs if source._op == "get_attr"]
            graph.erase_node(node)
            for source in fetched:
                if not source.users:
                    graph.erase_node(source)


def guard_identities(graph: Graph) -> None:
    """Have the program check that no two inputs are one tensor: stand-ins never are, and the model may ask for it."""
    inputs = [node for node in graph.nodes if node._op == "placeholder" and not str(node._target).startswith("*")]
    if len(inputs) > 1:
        with graph.inserting_after(inputs[-1]):
            answer = graph.create_node("call_function", are_different, tuple(inputs))
        with graph.inserting_after(answer):
            details = (answer, True, "no two inputs being one tensor", "a line that compares them by `is`")
            graph.create_node("call_function", check_value, details)


def refuse_compared_types(graph: Graph) -> None:
    """`type(x.size(0)) is int` is false for the stand-in of a size, and nothing is called that could notice."""
    for node in graph.nodes:
        if node._target in _NUMBERS and node._op in ("call_method", "call_function") and node._origin is not None:
            if asks_types(node._origin[0]) and _is_number(node):
                raise TraceError(
                    f"cannot trace a function that compares types and reads the number '{node._name}' at "
                    f"{source_line(*node._origin[:2])}: the stand-in for a number has a type of its own; use isinstance, "
                    "give example inputs to capture(), or keep the function as a leaf (torchgraft.wrap)"
                )


def _is_number(node: Node) -> bool:
    return node._target is not getattr or node._args[1] in ("shape", "ndim")
