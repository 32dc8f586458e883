"""torch.fx's experimental.optimization: batch norms fused into the layers before them, and dropout taken out.
The work of the first is `torchgraft.passes.FuseConvNorm`, which refuses where fusing would be wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn

from torchgraft.capturing.tracer import symbolic_trace
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.node import Node
from torchgraft.passes.fuse_conv_norm import FuseConvNorm


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


def replace_node_module(node: Node, modules: dict[str, torch.nn.Module], new_module: torch.nn.Module) -> None:
    """Put another module where the node's is, in the table too."""
    parent, _, name = node.target.rpartition(".")
    modules[node.target] = new_module
    setattr(modules[parent], name, new_module)
