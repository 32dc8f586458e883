"""The values of a run in which a program is lowered: traced tensors, symbolic numbers, and all else that nodes compute (`Flow`).
How trees of them become the arguments of a call or of a node; what is recorded for a call is in `operators.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchgraft.capturing.flowing.sizes import unwrapped
from torchgraft.ir.arguments import leaves, map_aggregate, map_plain
from torchgraft.ir.node import Node
from torchgraft.lowering.tensors import TracedTensor


@dataclass(slots=True, eq=False)
class Flow:
    """A value that is neither a tensor nor a whole number (a dtype, a flag, a container), and the node that computes it."""

    value: Any
    node: Node
    used: bool = False


def concrete(value: Any) -> Any:
    """A value with the real tensors and plain numbers of this run."""
    return map_aggregate(value, _concrete_leaf)


def _concrete_leaf(value: Any) -> Any:
    if type(value) is TracedTensor:
        return value.actual
    if type(value) is Flow:
        return value.value
    number = unwrapped(value)
    return value if number is None else number.value


def plain_values(value: Any) -> Any:
    """Values as torch takes them: traced tensors and symbolic numbers stay, all else is plain, containers are new."""
    return map_plain(value, lambda leaf: leaf.value if type(leaf) is Flow else leaf)


def traced_in(tree: Any) -> list[TracedTensor]:
    """The traced tensors in a tree of arguments."""
    return [leaf for leaf in leaves(tree) if type(leaf) is TracedTensor]


def flows_in(tree: Any) -> list[Flow]:
    """The values in a tree of arguments that are neither tensors nor numbers, and that nodes compute."""
    return [leaf for leaf in leaves(tree) if type(leaf) is Flow]


def has_nodes(tree: Any) -> bool:
    """Whether anything in a tree of arguments is computed by the program."""
    return any(type(leaf) is Flow or is_known(leaf) for leaf in leaves(tree))


def is_known(leaf: Any) -> bool:
    """Whether the recorder knows what a value is the result of: a tensor or a number."""
    return type(leaf) is TracedTensor or unwrapped(leaf) is not None
