"""Alias: the names that code written for torch.fx imports from `torch.fx.proxy`; they live in `torchgraft.capture`."""

from torchgraft.capture.proxy import Attribute as Attribute
from torchgraft.capture.proxy import ParameterProxy as ParameterProxy
from torchgraft.capture.proxy import Proxy as Proxy
from torchgraft.capture.tracer_base import GraphAppendingTracer as GraphAppendingTracer
from torchgraft.capture.tracer_base import Scope as Scope
from torchgraft.capture.tracer_base import ScopeContextManager as ScopeContextManager
from torchgraft.capture.tracer_base import TracerBase as TracerBase
from torchgraft.errors import TraceError as TraceError
