"""Alias: the names that code written for torch.fx imports from `torch.fx.graph`; they live in `torchgraft.ir` and `codegen`."""

from torchgraft.codegen.source import CodeGen as CodeGen
from torchgraft.codegen.source import PythonCode as PythonCode
from torchgraft.ir.graph import Graph as Graph
from torchgraft.ir.node import Node as Node
from torchgraft.ir.node import map_arg as map_arg
