"""Alias: the names that code written for torch.fx imports from `torch.fx.proxy`; they live in `torchgraft.capturing`."""

from torchgraft.capturing.symbolic.proxy import Attribute as Attribute
from torchgraft.capturing.symbolic.proxy import ParameterProxy as ParameterProxy
from torchgraft.capturing.symbolic.proxy import Proxy as Proxy
from torchgraft.capturing.tracer_base import GraphAppendingTracer as GraphAppendingTracer
from torchgraft.capturing.tracer_base import Scope as Scope
from torchgraft.capturing.tracer_base import ScopeContextManager as ScopeContextManager
from torchgraft.capturing.tracer_base import TracerBase as TracerBase
from torchgraft.errors import TraceError as TraceError
from torchgraft.fx_passes.semi_private import base_types as base_types
