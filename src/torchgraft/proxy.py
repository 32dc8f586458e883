"""Alias: the names that code written for torch.fx imports from `torch.fx.proxy`; they live in `torchgraft.capturing`."""

from torchgraft.analysis.signatures import check_for_mutable_operation as check_for_mutable_operation
from torchgraft.capturing.symbolic.proxy import Attribute as Attribute
from torchgraft.capturing.symbolic.proxy import ParameterProxy as ParameterProxy
from torchgraft.capturing.symbolic.proxy import Proxy as Proxy
from torchgraft.capturing.tracer_base import GraphAppendingTracer as GraphAppendingTracer
from torchgraft.capturing.tracer_base import Scope as Scope
from torchgraft.capturing.tracer_base import ScopeContextManager as ScopeContextManager
from torchgraft.capturing.tracer_base import TracerBase as TracerBase
from torchgraft.capturing.tracer_base import assert_traced as assert_fn  # noqa: F401
from torchgraft.errors import TraceError as TraceError
from torchgraft.fx_passes.semi_private import base_types as base_types
from torchgraft.fx_passes.semi_private import compatibility as compatibility
from torchgraft.graph import magic_methods as magic_methods
from torchgraft.graph import reflectable_magic_methods as reflectable_magic_methods
from torchgraft.ir.arguments import immutable_dict as immutable_dict
from torchgraft.ir.arguments import immutable_list as immutable_list
from torchgraft.ir.graph import Graph as Graph
from torchgraft.ir.node import Argument as Argument
from torchgraft.ir.node import Node as Node
from torchgraft.ir.node import Target as Target
