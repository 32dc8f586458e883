"""Where a program cuts gradients off (`detach`, regions without gradients), kept through torch.export's decompositions.
Those trace with gradients off, so they drop every cut, and the decomposed program would return other gradients than the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.export import ExportedProgram

from torchgraft.ir.graph import Graph

# An operator that no decomposition knows: it stays where it is put, and becomes a detach at the end.
_LIBRARY = torch.library.Library("torchgraft", "FRAGMENT")
_LIBRARY.define("cut_gradient(Tensor x) -> Tensor")
_LIBRARY.impl("cut_gradient", lambda x: x.clone(), "CompositeExplicitAutograd")
_CUT = torch.ops.torchgraft.cut_gradient.default
_DETACH = frozenset({torch.ops.aten.detach.default, torch.ops.aten.detach_.default, torch.ops.aten.detach_copy.default})


def mark_cuts(program: ExportedProgram) -> None:
    """Put a mark before every `detach`, and on everything that leaves a region without gradients."""
    modules = [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    for module in modules:
        for node in list(module.graph.nodes):
            if node.target in _DETACH:
                _mark(node, node.args[:1])
            elif _switches_gradients(node) and node.args[0] is False:
                output = getattr(module, node.args[1].target).graph.output_node()
                _mark(output, output.args[0])
        module.recompile()


def _switches_gradients(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled"


def _mark(user: torch.fx.Node, values: Iterable[Any]) -> None:
    for value in list(values):
        if not isinstance(value, torch.fx.Node) or (value.op == "placeholder" and user.target not in _DETACH):
            continue  # what a region is given was computed outside of it
        example = value.meta.get("val")
        if not isinstance(example, torch.Tensor) or not (example.is_floating_point() or example.is_complex()):
            continue
        with user.graph.inserting_before(user):
            mark = user.graph.call_function(_CUT, (value,))
        mark.meta = {
            key: entry for key, entry in value.meta.items() if key in ("val", "stack_trace", "nn_module_stack")
        }
        user.replace_input_with(value, mark)


def cut_at_marks(graph: Graph) -> None:
    """Turn the marks into `detach`."""
    for node in graph.find_nodes(op="call_function", target=_CUT):
        node.target = torch.ops.aten.detach.default
        node._rename("detach")
        for user in [user for user in node.users if user.target is torch.ops.aten.alias.default]:
            # What a detach is decomposed into.
            user.replace_all_uses_with(node)
            graph.erase_node(user)
