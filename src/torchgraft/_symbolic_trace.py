"""Alias: the names that code written for torch.fx imports from `torch.fx._symbolic_trace`; they live in `torchgraft.capture`."""

from torchgraft.capture.inputs import PH as PH
from torchgraft.capture.inputs import PHBase as PHBase
from torchgraft.capture.proxy import ProxyableClassMeta as ProxyableClassMeta
from torchgraft.capture.tracer import Tracer as Tracer
from torchgraft.capture.tracer import symbolic_trace as symbolic_trace
from torchgraft.ir.leaf_functions import wrap as wrap
