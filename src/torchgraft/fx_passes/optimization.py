"""torch.fx's experimental.optimization: batch norms fused into the layers before them, dropout taken out, layouts chosen.
The work of the first is `torchgraft.passes.FuseConvNorm`, which refuses where fusing would be wrong; layouts are `mkldnn.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torchgraft.capturing.symbolic.tracer import Tracer, symbolic_trace
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.fx_passes.mkldnn import (
    MklSubgraph,
    UnionFind,
    extract_subgraph,
    gen_mkl_autotuner,
    modules_to_mkldnn,
    replace_node_module,
    reset_modules,
    use_layout,
    use_mkl_length,
)
from torchgraft.ir.node import Node
from torchgraft.passes.functionalize import Functionalize
from torchgraft.passes.fuse_conv_norm import FuseConvNorm

__all__ = [
    "MklSubgraph",
    "UnionFind",
    "extract_subgraph",
    "fuse",
    "gen_mkl_autotuner",
    "matches_module_pattern",
    "modules_to_mkldnn",
    "optimize_for_inference",
    "remove_dropout",
    "replace_node_module",
    "reset_modules",
    "use_mkl_length",
]


def fuse(model: nn.Module, inplace: bool = False, no_trace: bool = False) -> GraphModule:
    """A program of the model with every batch norm fused that can be; the model keeps its weights unless `inplace`.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> [type(layer).__name__ for layer in fuse(model).children()]
    ['Conv2d', 'ReLU']
    """
    model = model if inplace else copy.deepcopy(model)
    program = model if no_trace and isinstance(model, GraphModule) else symbolic_trace(model)
    FuseConvNorm().run(program)
    return program


def remove_dropout(model: nn.Module) -> GraphModule:
    """A program of the model without its dropout layers.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    >>> [type(layer).__name__ for layer in remove_dropout(model).children()]
    ['Linear']
    """
    program = symbolic_trace(model)
    for node in program.graph.nodes:
        if node.op == "call_module" and isinstance(program.get_submodule(node.target), nn.Dropout):
            node.replace_all_uses_with(node.all_input_nodes[0])
            program.graph.erase_node(node)
    program.delete_all_unused_submodules()
    return program


def matches_module_pattern(pattern: Iterable[type], node: Node, modules: dict[str, torch.nn.Module]) -> bool:
    """Whether a node and the node it takes its first argument from call modules of just these two types."""
    nodes = (node.args[0], node) if node.args else ()
    kinds = list(pattern)
    return len(nodes) == len(kinds) and all(
        isinstance(each, Node) and each.op == "call_module" and type(modules.get(each.target)) is kind
        for kind, each in zip(kinds, nodes, strict=True)
    )


def optimize_for_inference(
    model: torch.nn.Module, pass_config: dict[str, Any] | None = None, tracer: type[Tracer] = Tracer
) -> torch.nn.Module:
    """A program of the model that runs faster on a CPU: norms fused, dropout gone, stretches in oneDNN's own layout.

    `pass_config` switches the steps off (`{"conv_bn_fuse": False, "remove_dropout": False, "mkldnn_layout_optimize": False}`) or
    says which stretches are worth it (`{"mkldnn_layout_optimize": {"heuristic": f}}`, `f(stretch)` a truth value). Writes that
    nobody else can see become plain calls first; what else writes or is written keeps its layout.

    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()).eval()
    >>> [node.target for node in optimize_for_inference(model).graph.nodes if node.op == "call_method"]
    ['to_mkldnn', 'to_dense']
    """
    config: dict[str, Any] = {
        "conv_bn_fuse": True,
        "remove_dropout": True,
        "mkldnn_layout_optimize": {"heuristic": use_mkl_length},
        **(pass_config or {}),
    }
    if config["conv_bn_fuse"]:
        model = fuse(model)
    if config["remove_dropout"]:
        model = remove_dropout(model)
    layout = config["mkldnn_layout_optimize"]
    if layout is False:
        return model
    if not isinstance(layout, dict):
        raise RuntimeError(f"mkldnn_layout_optimize config is not a dict: it is {layout!r}; give False or a dict")
    if "heuristic" not in layout:
        raise RuntimeError('Heuristic not found in mkldnn_layout_optimize config; give {"heuristic": use_mkl_length}')
    copied = copy.deepcopy(model)
    program = GraphModule(copied, tracer().trace(copied), type(model).__name__)
    Functionalize().run(program)
    use_layout(program, layout["heuristic"])
    return program
