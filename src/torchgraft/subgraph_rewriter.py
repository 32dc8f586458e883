"""The path under which torch.fx users import pattern rewriting.
The work lives in `torchgraft.rewriting`.
"""

from torchgraft.capturing.symbolic.tracer import symbolic_trace as symbolic_trace
from torchgraft.codegen.graph_module import GraphModule as GraphModule
from torchgraft.ir.graph import Graph as Graph
from torchgraft.ir.node import Node as Node
from torchgraft.rewriting.replace import Match, ReplacedPatterns, replace_pattern, replace_pattern_with_filters

__all__ = ["Match", "ReplacedPatterns", "replace_pattern", "replace_pattern_with_filters"]
