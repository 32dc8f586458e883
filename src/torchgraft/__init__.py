"""torchgraft captures PyTorch programs as small readable graphs, shows what is inside, changes them safely and runs them.
This page lists the public names; each is imported from the room it lives in when it is first used, so that
`import torchgraft` is quick and `graft --help` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchgraft.version import __version__

if TYPE_CHECKING:
    from torchgraft.bridge import from_export, from_fx, to_fx
    from torchgraft.bridge.training import capture_training
    from torchgraft.capturing.inputs import PH
    from torchgraft.capturing.program import capture
    from torchgraft.capturing.proxy import Attribute, ParameterProxy, Proxy, ProxyableClassMeta
    from torchgraft.capturing.tracer import Tracer, symbolic_trace
    from torchgraft.capturing.tracer_base import TracerBase
    from torchgraft.codegen.graph_module import GraphModule
    from torchgraft.codegen.source import CodeGen
    from torchgraft.errors import BridgeError, GraftError, GraphError, GuardError, TraceError
    from torchgraft.interpreter import Interpreter, Transformer
    from torchgraft.ir.arguments import immutable_dict, immutable_list, map_aggregate
    from torchgraft.ir.graph import Graph
    from torchgraft.ir.leaf_functions import wrap
    from torchgraft.ir.node import Node, has_side_effect, map_arg
    from torchgraft.recording.doctor import doctor
    from torchgraft.recording.verify import verify
    from torchgraft.rewriting import Match, ReplacedPatterns, replace_pattern, replace_pattern_with_filters

_HOMES = {
    "torchgraft.bridge": ("from_export", "from_fx", "to_fx"),
    "torchgraft.bridge.training": ("capture_training",),
    "torchgraft.capturing.inputs": ("PH",),
    "torchgraft.capturing.program": ("capture",),
    "torchgraft.capturing.proxy": ("Attribute", "ParameterProxy", "Proxy", "ProxyableClassMeta"),
    "torchgraft.capturing.tracer": ("Tracer", "symbolic_trace"),
    "torchgraft.capturing.tracer_base": ("TracerBase",),
    "torchgraft.ir.leaf_functions": ("wrap",),
    "torchgraft.codegen.graph_module": ("GraphModule",),
    "torchgraft.codegen.source": ("CodeGen",),
    "torchgraft.errors": ("BridgeError", "GraftError", "GraphError", "GuardError", "TraceError"),
    "torchgraft.interpreter": ("Interpreter", "Transformer"),
    "torchgraft.ir.arguments": ("immutable_dict", "immutable_list", "map_aggregate"),
    "torchgraft.ir.graph": ("Graph",),
    "torchgraft.ir.node": ("Node", "has_side_effect", "map_arg"),
    "torchgraft.recording.doctor": ("doctor",),
    "torchgraft.recording.verify": ("verify",),
    "torchgraft.rewriting": ("Match", "ReplacedPatterns", "replace_pattern", "replace_pattern_with_filters"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
# The modules that torch.fx users reach as attributes after `import torch.fx as fx`.
_MODULES = frozenset(
    {"_symbolic_trace", "graph", "graph_module", "immutable_collections", "interpreter", "node", "passes", "proxy"}
    | {"operator_schemas", "subgraph_rewriter", "traceback", "zoo"}
)

__all__ = [
    "PH",
    "Attribute",
    "BridgeError",
    "CodeGen",
    "GraftError",
    "Graph",
    "GraphError",
    "GraphModule",
    "GuardError",
    "Interpreter",
    "Match",
    "Node",
    "ParameterProxy",
    "Proxy",
    "ProxyableClassMeta",
    "ReplacedPatterns",
    "TraceError",
    "Tracer",
    "TracerBase",
    "Transformer",
    "__version__",
    "capture",
    "capture_training",
    "doctor",
    "from_export",
    "from_fx",
    "has_side_effect",
    "immutable_dict",
    "immutable_list",
    "map_aggregate",
    "map_arg",
    "replace_pattern",
    "replace_pattern_with_filters",
    "subgraph_rewriter",
    "symbolic_trace",
    "to_fx",
    "verify",
    "wrap",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is not None:
        value = getattr(importlib.import_module(home), name)
    elif name in _MODULES:
        value = importlib.import_module(f"torchgraft.{name}")
    else:
        raise AttributeError(f"module 'torchgraft' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
