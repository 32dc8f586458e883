"""Remove nodes whose result nobody uses and that do nothing else.
Which nodes do something else is decided in `analysis/effects`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchgraft.analysis.effects import is_impure


def eliminate_dead_code(graph: Any, is_impure_node: Callable[[Any], bool] | None = None) -> bool:
    """Erase every node that is unused and has no effect, and say whether there was any.

    `is_impure_node` decides, in the place of `Node.is_impure`, which nodes must stay although they are unused.

    >>> import torch
    >>> from torchgraft.ir.graph import Graph
    >>> graph = Graph()
    >>> x = graph.placeholder("x")
    >>> unused, write = graph.call_function(torch.relu, (x,)), graph.call_method("mul_", (x, 2))
    >>> result = graph.output(x)
    >>> eliminate_dead_code(graph), list(graph.nodes)
    (True, [x, mul_, output])
    """
    # Walking backwards once is enough only where every node stands before its users.
    graph.lint()
    stays = is_impure if is_impure_node is None else is_impure_node
    dead = 0
    for node in reversed(graph.nodes):
        if not node.users and not stays(node):
            graph.erase_node(node)
            dead += 1
    return dead > 0
