"""Remove nodes whose result nobody uses and that do nothing else, and what only led to a result that an edit took away.
Which nodes do something else is decided in `analysis/effects`.

Who makes an inner value the result of a program means the value that its node computed. The layers behind it led to the old
result and to nothing else: they go, with what they would have written into intermediate values and into their own state, and
with their guards. What never had a user stays for its effect, as does what writes an input or a tensor of the model by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchgraft.analysis.effects import effects_of, is_impure
from torchgraft.analysis.effects.findings import OUTSIDE
from torchgraft.analysis.effects.operators import ARITHMETIC
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.guards import is_guard
from torchgraft.ir.node import _side_effectful_functions
from torchgraft.passes.definition import Pass


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
    """Erase every node that is unused and has no effect or was cut off from the result; say whether there was any.

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
    cut_off = _cut_off(graph) if is_impure_node is None and graph._former_results else ()
    erased = 0
    for node in reversed(graph.nodes):
        if not node._users and (node in cut_off or not stays(node)):
            graph.erase_node(node)
            erased += 1
    graph._former_results.clear()
    return erased + sum(_erase_dead_nodes(program.graph, is_impure_node) for program in _programs_inside(graph))


def _cut_off(graph: Any) -> set[Any]:
    """The nodes that led to what was a result of the program, and lead to nothing else."""
    cut_off: set[Any] = set()
    unused: set[Any] = set()  # which led to nothing before the edit, and do nothing
    checks: dict[Any, None] = {}  # guards, and what is computed for guards alone; later nodes first
    for node in reversed(graph.nodes):
        if any(user not in cut_off and user not in checks and user not in unused for user in node._users):
            continue
        if node.op == "call_function" and is_guard(node.target):
            checks[node] = None
        elif node in graph._former_results or any(user in cut_off for user in node._users):
            if not _is_seen_outside(node):
                cut_off.add(node)
        elif any(user in checks for user in node._users):
            checks[node] = None
        elif not is_impure(node):
            unused.add(node)
    for node in reversed(checks):
        if any(source in cut_off for source in node.all_input_nodes):
            cut_off.add(node)
    return cut_off


def _is_seen_outside(node: Any) -> bool:
    """Whether a call does something beyond the values and layers it is made of: to an input, a tensor of the model, the world."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "get_attr":
        return False
    if node.op == "call_function" and node.target in _side_effectful_functions:
        return True
    effects = effects_of(node)
    return not effects.unknown and any(_is_the_callers(place, node) for place in effects.writes)


def _is_the_callers(place: Any, writer: Any) -> bool:
    """Whether memory is that of an input or of the model, other than a layer's own statistics; through views too."""
    if isinstance(place, str):
        return place == OUTSIDE or writer.op != "call_module"
    pending, seen = [place], {place}
    while pending:
        node = pending.pop()
        if node.op in ("placeholder", "get_attr"):
            return True
        effects = effects_of(node)
        # A call that may do anything is taken to return something of its own, as most do; so does arithmetic, if not on lists.
        for source in () if effects.unknown or node.target in ARITHMETIC else effects.shares:
            if isinstance(source, str):
                return True
            if source not in seen:
                seen.add(source)
                pending.append(source)
    return False


def _programs_inside(graph: Any) -> list[Any]:
    """The programs that the graph hands to operators such as `cond`; those it calls as modules are their owners' business."""
    root = graph.owning_module
    if root is None:
        return []
    paths = dict.fromkeys(node.target for node in graph.nodes if node.op == "get_attr")
    modules = [root._modules.get(path) for path in paths]
    return [module for module in modules if hasattr(type(module), "recompile") and hasattr(type(module), "graph")]
