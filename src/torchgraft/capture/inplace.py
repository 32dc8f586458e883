"""In-place operators in a finished trace: `y += x` becomes `y + x` where nobody could tell the difference.
Everything else stays in place, because an alias of the value may be looking.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node

_PLAIN_FORM = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
    operator.imatmul: operator.matmul,
    operator.ilshift: operator.lshift,
    operator.irshift: operator.rshift,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
}
_FRESH_OPERATORS = frozenset(_PLAIN_FORM.values()) | {operator.neg, operator.invert}


def simplify_in_place(graph: Graph, root: torch.nn.Module) -> None:
    """Replace in-place operators by plain ones where the value written is new and nothing else refers to it."""
    for node in graph.nodes:
        if node._op != "call_function" or node._target not in _PLAIN_FORM:
            continue
        written = node._args[0]
        if isinstance(written, Node) and len(written.users) == 1 and _makes_new_tensor(written, root):
            plain = _PLAIN_FORM[node._target]
            if node._name.startswith(node._target.__name__):
                node._rename(graph._target_to_str(plain))
            node.target = plain


def _makes_new_tensor(node: Node, root: torch.nn.Module) -> bool:
    """Whether the value of a node surely shares no memory with anything that was there before."""
    if node._op == "call_module":
        module = root.get_submodule(node._target)
        # A torch.nn module that owns parameters computes with them; those that hand their input through own none.
        owns = any(value is not None for table in (module._parameters, module._buffers) for value in table.values())
        return type(module).__module__.startswith("torch.nn.modules") and owns
    if node._op == "call_function" and node._target in _FRESH_OPERATORS:
        return True
    if node._op in ("call_function", "call_method"):
        return _returns_new_tensor(node)
    return False


def _returns_new_tensor(node: Node) -> bool:
    name = node._target if isinstance(node._target, str) else getattr(node._target, "__name__", "")
    from_torch = node._op == "call_method" or getattr(torch, name, None) is node._target
    packet: Any = getattr(torch.ops.aten, name, None) if from_torch and name and not name.startswith("__") else None
    if packet is None or not hasattr(packet, "overloads") or "out" in node._kwargs:
        return False
    for overload in packet.overloads():
        schema = getattr(packet, overload)._schema
        if any(item.alias_info is not None for item in schema.returns) and "out" not in overload:
            return False
        # Operators with a training switch hand their input through when it is off, whatever their schema says.
        if any(argument.name in ("train", "training") for argument in schema.arguments):
            return False
    return True
