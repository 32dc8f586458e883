"""torch.fx's `passes.split_utils`: splitting by tags, attributes by dotted path, and values that are no tensors kept in one part.
The splitting is in `splitting/split_module.py`.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

from torchgraft.fx_passes.tools import CALLABLE_NODE_OPS, is_node_output_tensor
from torchgraft.ir.node import Node
from torchgraft.splitting.split_module import split_by_tags

__all__ = ["getattr_recursive", "move_non_tensor_nodes_on_boundary", "setattr_recursive", "split_by_tags"]


def getattr_recursive(obj: Any, name: str) -> Any:
    """The attribute at a dotted path, or None.

    >>> import torch
    >>> getattr_recursive(torch.nn.Sequential(torch.nn.Linear(2, 3)), "0.out_features")
    3
    """
    return functools.reduce(lambda value, part: getattr(value, part, None), name.split("."), obj)


def setattr_recursive(obj: Any, attr: str, value: Any) -> None:
    """Set the attribute at a dotted path."""
    path, _, name = attr.rpartition(".")
    setattr(getattr_recursive(obj, path) if path else obj, name, value)


def move_non_tensor_nodes_on_boundary(subgraphs: list[Any]) -> None:
    """Give nodes of accelerator parts that hand another part something that is no tensor to that part.

    A node goes together with what uses it in its own part. It stays where two other parts, or what goes with it, use it.
    """
    home: dict[Node, int] = {node: number for number, part in enumerate(subgraphs) for node in part.nodes}

    def users(node: Node) -> list[Node]:
        return [user for user in node._users if user in home]

    for number, part in enumerate(subgraphs):
        pending = deque(node for node in part.nodes if part.is_acc and not is_node_output_tensor(node))
        while pending:
            node = pending.popleft()
            targets = {home[user] for user in users(node)} - {number}
            if home[node] != number or len(targets) != 1:
                continue
            (target,) = targets
            moving = dict.fromkeys([node, *_dependents(node, number, home)])
            if any(home[user] not in (number, target) for member in moving for user in users(member)):
                continue
            part.nodes = [member for member in part.nodes if member not in moving]
            subgraphs[target].nodes.extend(moving)
            home.update(dict.fromkeys(moving, target))
            pending += [
                source
                for source in node.all_input_nodes
                if source.op in CALLABLE_NODE_OPS and home.get(source) == number and not is_node_output_tensor(source)
            ]


def _dependents(start: Node, part: int, home: dict[Node, int]) -> list[Node]:
    """Everything in the part that uses the node, directly or not."""
    found: dict[Node, None] = {}
    pending = [start]
    while pending:
        for user in pending.pop()._users:
            if home.get(user) == part and user not in found:
                found[user] = None
                pending.append(user)
    return list(found)
