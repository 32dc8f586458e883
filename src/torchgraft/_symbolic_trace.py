"""Alias: what code written for torch.fx imports from `torch.fx._symbolic_trace`; it lives in `torchgraft.capturing`, and the
tools that tracers of others are written with in `torchgraft.fx_passes.tracing`.
"""

import functools as functools
from types import FunctionType as FunctionType

from torch import ScriptObject as ScriptObject

from torchgraft.capturing.symbolic.inputs import PH as PH
from torchgraft.capturing.symbolic.inputs import PHBase as PHBase
from torchgraft.capturing.symbolic.inputs import PHWithMeta as PHWithMeta
from torchgraft.capturing.symbolic.inputs import _assert_is_none as _assert_is_none
from torchgraft.capturing.symbolic.proxy import ParameterProxy as ParameterProxy
from torchgraft.capturing.symbolic.proxy import Proxy as Proxy
from torchgraft.capturing.symbolic.proxy import ProxyableClassMeta as ProxyableClassMeta
from torchgraft.capturing.symbolic.proxy import _proxyable_classes as _proxyable_classes
from torchgraft.capturing.symbolic.tracer import Tracer as Tracer
from torchgraft.capturing.symbolic.tracer import symbolic_trace as symbolic_trace
from torchgraft.capturing.tracer_base import Scope as Scope
from torchgraft.capturing.tracer_base import ScopeContextManager as ScopeContextManager
from torchgraft.capturing.tracer_base import TracerBase as TracerBase
from torchgraft.codegen.graph_module import GraphModule as GraphModule
from torchgraft.fx_passes.semi_private import PyTreeCodeGenOfInfo as _PyTreeCodeGen  # noqa: F401
from torchgraft.fx_passes.semi_private import PyTreeInfo as _PyTreeInfo  # noqa: F401
from torchgraft.fx_passes.semi_private import base_types as base_types
from torchgraft.fx_passes.semi_private import compatibility as compatibility
from torchgraft.fx_passes.tracing import Patcher as _Patcher  # noqa: F401
from torchgraft.fx_passes.tracing import autowrap_check as _autowrap_check  # noqa: F401
from torchgraft.fx_passes.tracing import find_proxy_in as _find_proxy  # noqa: F401
from torchgraft.fx_passes.tracing import is_fx_tracing as is_fx_tracing
from torchgraft.fx_passes.tracing import module_call as _orig_module_call  # noqa: F401
from torchgraft.fx_passes.tracing import module_getattr as _orig_module_getattr  # noqa: F401
from torchgraft.fx_passes.tracing import patch_function as _patch_function  # noqa: F401
from torchgraft.fx_passes.tracing import patch_wrapped_functions as _patch_wrapped_functions  # noqa: F401
from torchgraft.ir.arguments import map_aggregate as map_aggregate
from torchgraft.ir.graph import Graph as Graph
from torchgraft.ir.leaf_functions import wrap as wrap
from torchgraft.ir.leaf_functions import wrapped_functions as _wrapped_fns_to_patch  # noqa: F401
from torchgraft.ir.leaf_functions import wrapped_methods as _wrapped_methods_to_patch  # noqa: F401

is_fx_symbolic_tracing = is_fx_tracing
HAS_VARSTUFF = 4 | 8  # inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def __getattr__(name: str) -> object:
    if name == "_is_fx_tracing_flag":
        return is_fx_tracing()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
