"""Alias: what code written for torch.fx imports from `torch.fx._symbolic_trace`; it lives in `torchgraft.capturing`."""

from torchgraft.capturing.symbolic.inputs import PH as PH
from torchgraft.capturing.symbolic.inputs import PHBase as PHBase
from torchgraft.capturing.symbolic.proxy import ProxyableClassMeta as ProxyableClassMeta
from torchgraft.capturing.symbolic.tracer import Tracer as Tracer
from torchgraft.capturing.symbolic.tracer import symbolic_trace as symbolic_trace
from torchgraft.ir.leaf_functions import wrap as wrap
