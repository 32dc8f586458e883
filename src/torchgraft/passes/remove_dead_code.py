"""Remove nodes whose result nobody uses and that do nothing else.
Which nodes do something else is decided in `analysis/effects`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchgraft.analysis.effects import is_impure
from torchgraft.passes.definition import Pass

if TYPE_CHECKING:
    from torchgraft.codegen.graph_module import GraphModule


@dataclass(frozen=True)
class RemoveDeadCode(Pass):
    """Erase what is neither used nor has an effect, in the program and in those it hands to operators such as `cond`.

    >>> import torch, torchgraft
    >>> def function(x):
    ...     unused = torch.relu(x)
    ...     return x + 1
    >>> RemoveDeadCode()(torchgraft.symbolic_trace(function)).changes
    1
    """

    def run(self, module: GraphModule) -> int:
        """Erase, and return how many nodes went."""
        return _erase_dead_nodes(module.graph, None)


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
    return _erase_dead_nodes(graph, is_impure_node) > 0


def _erase_dead_nodes(graph: Any, is_impure_node: Callable[[Any], bool] | None) -> int:
    # Walking backwards once is enough only where every node stands before its users.
    graph.lint()
    stays = is_impure if is_impure_node is None else is_impure_node
    erased = 0
    for node in reversed(graph.nodes):
        if not node.users and not stays(node):
            graph.erase_node(node)
            erased += 1
    return erased + sum(_erase_dead_nodes(program.graph, is_impure_node) for program in _programs_inside(graph))


def _programs_inside(graph: Any) -> list[Any]:
    """The programs that the graph hands to operators such as `cond`; those it calls as modules are their owners' business."""
    root = graph.owning_module
    if root is None:
        return []
    paths = dict.fromkeys(node.target for node in graph.nodes if node.op == "get_attr")
    modules = [root._modules.get(path) for path in paths]
    return [module for module in modules if hasattr(type(module), "recompile") and hasattr(type(module), "graph")]
