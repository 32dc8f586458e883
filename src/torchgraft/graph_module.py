"""Alias: the names that code written for torch.fx imports from `torch.fx.graph_module`; they live in `torchgraft.codegen`."""

from torchgraft.codegen.graph_module import GraphModule as GraphModule
from torchgraft.ir.graph import Graph as Graph
