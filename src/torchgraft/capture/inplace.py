"""In-place operators in a finished trace: `y += x` becomes `y + x` where nobody could tell the difference.
Everything else stays in place, because an alias of the value may be looking.
"""

from __future__ import annotations

import operator

import torch

from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node

PLAIN_FORM = {
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
_FRESH_OPERATORS = frozenset(PLAIN_FORM.values()) | {operator.neg, operator.invert}


def simplify_in_place(graph: Graph, root: torch.nn.Module) -> None:
    """Replace in-place operators by plain ones where the value written is new and nothing else refers to it.

    `v += w` keeps the type of `v`, and `v + w` may not; so the types must be known to agree.
    """
    types: dict[Node, torch.dtype | None] = {}
    for node in graph.nodes:
        if node._op != "call_function" or node._target not in PLAIN_FORM:
            continue
        written, other = node._args
        if not isinstance(written, Node) or len(written.users) > 1 or not _makes_new_tensor(written, root):
            continue
        if isinstance(other, Node):
            known = _type_of(written, root, types)
            if known is None or known != _type_of(other, root, types):
                continue
        elif isinstance(other, float):
            known = _type_of(written, root, types)
            if known is None or not known.is_floating_point:
                continue
        elif not isinstance(other, int):
            continue
        node.target = PLAIN_FORM[node._target]


def _type_of(node: Node, root: torch.nn.Module, types: dict[Node, torch.dtype | None]) -> torch.dtype | None:
    """The element type of a value where modules of torch.nn decide it, or None."""
    if node not in types:
        types[node] = None
        if node._op == "call_module":
            module = root.get_submodule(node._target)
            if type(module).__module__.startswith("torch.nn.modules") and not _in_autocast(node):
                # Products with a weight need, and give, the type of the weight; other modules keep the type they get.
                weight = next(
                    (value for value in module._parameters.values() if value is not None and value.dim() > 1), None
                )
                first = node._args[0] if node._args else None
                if weight is not None:
                    types[node] = weight.dtype
                elif isinstance(first, Node):
                    types[node] = _type_of(first, root, types)
            if types[node] is None:
                types[node] = _type_wanted(node, root)
        elif node._op == "placeholder":
            types[node] = _type_wanted(node, root)
        elif node._op == "call_function" and (node._target in _FRESH_OPERATORS or node._target in PLAIN_FORM):
            known = {_type_of(item, root, types) for item in node._inputs}
            if len(known) == 1:
                types[node] = known.pop()
    return types[node]


def _type_wanted(node: Node, root: torch.nn.Module) -> torch.dtype | None:
    """The element type a value must have because a product with a weight takes it, or would raise."""
    for user in node.users:
        if user._op == "call_module" and user._args and user._args[0] is node and not _in_autocast(user):
            module = root.get_submodule(user._target)
            takes_indices = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
            if type(module).__module__.startswith("torch.nn.modules") and not takes_indices:
                weight = next(
                    (value for value in module._parameters.values() if value is not None and value.dim() > 1), None
                )
                if weight is not None:
                    return weight.dtype
    return None


def _in_autocast(node: Node) -> bool:
    depth = 0
    while (node := node._prev) is not node.graph._root:
        if node._target is exit_context:
            depth += 1
        elif node._target is enter_context:
            if depth == 0 and node._args[0] is torch.autocast:
                return True
            depth = max(depth - 1, 0)
    return False


def _makes_new_tensor(node: Node, root: torch.nn.Module) -> bool:
    """Whether the value of a node surely shares no memory with anything that was there before."""
    if node._op == "call_module":
        module = root.get_submodule(node._target)
        # A torch.nn module that owns parameters computes with them; those that hand their input through own none.
        owns = any(value is not None for table in (module._parameters, module._buffers) for value in table.values())
        hooks = module._forward_hooks or module._forward_pre_hooks  # a hook may have kept the output
        return type(module).__module__.startswith("torch.nn.modules") and owns and not hooks
    # Schemas do not say it of all functions (atleast_2d hands its input through); Python's operators always do.
    return node._op == "call_function" and node._target in _FRESH_OPERATORS
