"""torchgraft captures PyTorch programs as small readable graphs, shows what is inside, changes them safely and runs them.
This page lists the public names; each is imported from the room it lives in when it is first used, so that
`import torchgraft` is quick and `graft --help` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchgraft.fx_passes.paths import install as _install_paths_of_torch_fx
from torchgraft.version import __version__

if TYPE_CHECKING:
    from torchgraft.analysis.cost import Cost, Work, cost, flop_formula
    from torchgraft.analysis.effects import ProgramEffects, effects, pure
    from torchgraft.analysis.memory import Lifetime, Memory, liveness, memory
    from torchgraft.analysis.shapes import Shapes, TensorMetadata, shapes
    from torchgraft.analysis.types import Dyn, TensorType, check_types
    from torchgraft.bridge import from_export, from_fx, to_fx
    from torchgraft.bridge.symbolic_shapes import SymbolicShapes, symbolic_shapes
    from torchgraft.capturing.program import capture
    from torchgraft.capturing.proxy import Attribute, ParameterProxy, Proxy, ProxyableClassMeta
    from torchgraft.capturing.symbolic.inputs import PH
    from torchgraft.capturing.symbolic.tracer import Tracer, symbolic_trace
    from torchgraft.capturing.tracer_base import TracerBase
    from torchgraft.codegen.graph_module import GraphModule
    from torchgraft.codegen.source import CodeGen
    from torchgraft.errors import (
        BridgeError,
        GraftError,
        GraphError,
        GuardError,
        PassError,
        RunError,
        ShapeError,
        TraceError,
    )
    from torchgraft.interpreter import Interpreter, Transformer
    from torchgraft.ir.arguments import immutable_dict, immutable_list, map_aggregate
    from torchgraft.ir.graph import Graph
    from torchgraft.ir.leaf_functions import wrap
    from torchgraft.ir.node import Node, has_side_effect, map_arg
    from torchgraft.lowering.training import capture_training
    from torchgraft.recording.calls import log_calls
    from torchgraft.recording.doctor import doctor
    from torchgraft.recording.program_comparison import compare
    from torchgraft.recording.record import record
    from torchgraft.recording.verify import verify
    from torchgraft.reporting import Report, report
    from torchgraft.rewriting import (
        Found,
        Match,
        PerMatch,
        ReplacedPatterns,
        call_any,
        explain,
        replace_pattern,
        replace_pattern_with_filters,
        rewrite,
    )
    from torchgraft.splitting import Size, Split, Stages, Supported, split, split_module
    from torchgraft.view.call_info import CallInfo, node_call_info
    from torchgraft.view.dot import to_dot
    from torchgraft.view.drawing import Drawing, draw
    from torchgraft.view.graph_files import load_graph, save_graph
    from torchgraft.view.model_explorer import to_model_explorer
    from torchgraft.view.module_summary import ModelSummary, summary
    from torchgraft.view.networkx_edits import from_networkx
    from torchgraft.view.networkx_graph import to_networkx
    from torchgraft.view.program_diff import NodeChange, ProgramDiff, diff

_HOMES = {
    "torchgraft.analysis.cost": ("Cost", "Work", "cost", "flop_formula"),
    "torchgraft.analysis.effects": ("ProgramEffects", "effects", "pure"),
    "torchgraft.analysis.memory": ("Lifetime", "Memory", "liveness", "memory"),
    "torchgraft.analysis.shapes": ("Shapes", "TensorMetadata", "shapes"),
    "torchgraft.analysis.types": ("Dyn", "TensorType", "check_types"),
    "torchgraft.bridge": ("from_export", "from_fx", "to_fx"),
    "torchgraft.bridge.symbolic_shapes": ("SymbolicShapes", "symbolic_shapes"),
    "torchgraft.lowering.training": ("capture_training",),
    "torchgraft.capturing.symbolic.inputs": ("PH",),
    "torchgraft.capturing.program": ("capture",),
    "torchgraft.capturing.proxy": ("Attribute", "ParameterProxy", "Proxy", "ProxyableClassMeta"),
    "torchgraft.capturing.symbolic.tracer": ("Tracer", "symbolic_trace"),
    "torchgraft.capturing.tracer_base": ("TracerBase",),
    "torchgraft.ir.leaf_functions": ("wrap",),
    "torchgraft.codegen.graph_module": ("GraphModule",),
    "torchgraft.codegen.source": ("CodeGen",),
    "torchgraft.errors": (
        "BridgeError",
        "GraftError",
        "GraphError",
        "GuardError",
        "PassError",
        "RunError",
        "ShapeError",
        "TraceError",
    ),
    "torchgraft.interpreter": ("Interpreter", "Transformer"),
    "torchgraft.ir.arguments": ("immutable_dict", "immutable_list", "map_aggregate"),
    "torchgraft.ir.graph": ("Graph",),
    "torchgraft.ir.node": ("Node", "has_side_effect", "map_arg"),
    "torchgraft.recording.calls": ("log_calls",),
    "torchgraft.recording.doctor": ("doctor",),
    "torchgraft.recording.program_comparison": ("compare",),
    "torchgraft.recording.record": ("record",),
    "torchgraft.recording.verify": ("verify",),
    "torchgraft.reporting": ("Report", "report"),
    "torchgraft.rewriting.explain": ("explain",),
    "torchgraft.rewriting.found": ("Found", "call_any"),
    "torchgraft.rewriting.replace": ("Match", "ReplacedPatterns", "replace_pattern", "replace_pattern_with_filters"),
    "torchgraft.rewriting.rewrite": ("PerMatch", "rewrite"),
    "torchgraft.splitting": ("Size", "Split", "Stages", "Supported", "split", "split_module"),
    "torchgraft.view.call_info": ("CallInfo", "node_call_info"),
    "torchgraft.view.dot": ("to_dot",),
    "torchgraft.view.graph_files": ("load_graph", "save_graph"),
    "torchgraft.view.model_explorer": ("to_model_explorer",),
    "torchgraft.view.module_summary": ("ModelSummary", "summary"),
    "torchgraft.view.networkx_edits": ("from_networkx",),
    "torchgraft.view.networkx_graph": ("to_networkx",),
    "torchgraft.view.program_diff": ("NodeChange", "ProgramDiff", "diff"),
    "torchgraft.view.drawing": ("Drawing", "draw"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
# The modules that torch.fx users reach as attributes after `import torch.fx as fx`.
_MODULES = frozenset(
    {
        "_symbolic_trace",
        "experimental",
        "graph",
        "graph_module",
        "immutable_collections",
        "interpreter",
        "node",
        "passes",
        "proxy",
    }
    | {"operator_schemas", "subgraph_rewriter", "tensor_type", "traceback", "zoo"}
)

__all__ = [
    "PH",
    "Attribute",
    "BridgeError",
    "CallInfo",
    "CodeGen",
    "Cost",
    "Drawing",
    "Dyn",
    "Found",
    "GraftError",
    "Graph",
    "GraphError",
    "GraphModule",
    "GuardError",
    "Interpreter",
    "Lifetime",
    "Match",
    "Memory",
    "ModelSummary",
    "Node",
    "NodeChange",
    "ParameterProxy",
    "PassError",
    "PerMatch",
    "ProgramDiff",
    "ProgramEffects",
    "Proxy",
    "ProxyableClassMeta",
    "ReplacedPatterns",
    "Report",
    "RunError",
    "ShapeError",
    "Shapes",
    "Size",
    "Split",
    "Stages",
    "Supported",
    "SymbolicShapes",
    "TensorMetadata",
    "TensorType",
    "TraceError",
    "Tracer",
    "TracerBase",
    "Transformer",
    "Work",
    "__version__",
    "call_any",
    "capture",
    "capture_training",
    "check_types",
    "compare",
    "cost",
    "diff",
    "doctor",
    "draw",
    "effects",
    "explain",
    "flop_formula",
    "from_export",
    "from_fx",
    "from_networkx",
    "has_side_effect",
    "immutable_dict",
    "immutable_list",
    "liveness",
    "load_graph",
    "log_calls",
    "map_aggregate",
    "map_arg",
    "memory",
    "node_call_info",
    "pure",
    "record",
    "replace_pattern",
    "replace_pattern_with_filters",
    "report",
    "rewrite",
    "save_graph",
    "shapes",
    "split",
    "split_module",
    "subgraph_rewriter",
    "summary",
    "symbolic_shapes",
    "symbolic_trace",
    "to_dot",
    "to_fx",
    "to_model_explorer",
    "to_networkx",
    "verify",
    "wrap",
]

_install_paths_of_torch_fx()


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
