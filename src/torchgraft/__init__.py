"""torchgraft captures PyTorch programs as small readable graphs, shows what is inside, changes them safely and runs them.
This page lists the public names; each is imported from the room it lives in when it is first used, so that
`import torchgraft` is quick and `graft --help` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchgraft.fx_passes.paths import MODULES as _MODULES
from torchgraft.fx_passes.paths import install as _install_paths_of_torch_fx
from torchgraft.public_names import homes_of
from torchgraft.version import __version__ as __version__

# The one table of public names: type checkers read it as imports, `homes_of` as text.
if TYPE_CHECKING:
    from torchgraft import distributed as distributed
    from torchgraft import passes as passes
    from torchgraft import quantize as quantize
    from torchgraft import schedule as schedule
    from torchgraft import subgraph_rewriter as subgraph_rewriter
    from torchgraft import zoo as zoo
    from torchgraft.analysis.cost import Cost as Cost
    from torchgraft.analysis.cost import Work as Work
    from torchgraft.analysis.cost import cost as cost
    from torchgraft.analysis.cost import flop_formula as flop_formula
    from torchgraft.analysis.effects import ProgramEffects as ProgramEffects
    from torchgraft.analysis.effects import effects as effects
    from torchgraft.analysis.effects import pure as pure
    from torchgraft.analysis.memory import Lifetime as Lifetime
    from torchgraft.analysis.memory import Memory as Memory
    from torchgraft.analysis.memory import liveness as liveness
    from torchgraft.analysis.memory import memory as memory
    from torchgraft.analysis.shapes import Shapes as Shapes
    from torchgraft.analysis.shapes import TensorMetadata as TensorMetadata
    from torchgraft.analysis.shapes import shapes as shapes
    from torchgraft.analysis.simulate import Calibration as Calibration
    from torchgraft.analysis.simulate import Link as Link
    from torchgraft.analysis.simulate import Machine as Machine
    from torchgraft.analysis.simulate import ParallelSimulation as ParallelSimulation
    from torchgraft.analysis.simulate import ProfileComparison as ProfileComparison
    from torchgraft.analysis.simulate import Simulation as Simulation
    from torchgraft.analysis.simulate import WhatIf as WhatIf
    from torchgraft.analysis.simulate import calibrate_machine as calibrate_machine
    from torchgraft.analysis.simulate import machine_names as machine_names
    from torchgraft.analysis.simulate import simulate as simulate
    from torchgraft.analysis.simulate import simulate_parallel as simulate_parallel
    from torchgraft.analysis.simulate import what_if as what_if
    from torchgraft.analysis.types import Dyn as Dyn
    from torchgraft.analysis.types import TensorType as TensorType
    from torchgraft.analysis.types import check_types as check_types
    from torchgraft.backends.adapt import adapt as adapt
    from torchgraft.backends.backend import Backend as Backend
    from torchgraft.backends.backend import register_backend as register_backend
    from torchgraft.backends.lower import lower as lower
    from torchgraft.backends.saving import load_lowered as load_lowered
    from torchgraft.bridge import from_export as from_export
    from torchgraft.bridge import from_fx as from_fx
    from torchgraft.bridge import to_fx as to_fx
    from torchgraft.bridge.symbolic_shapes import SymbolicShapes as SymbolicShapes
    from torchgraft.bridge.symbolic_shapes import symbolic_shapes as symbolic_shapes
    from torchgraft.capturing.program import capture as capture
    from torchgraft.capturing.symbolic.inputs import PH as PH
    from torchgraft.capturing.symbolic.proxy import Attribute as Attribute
    from torchgraft.capturing.symbolic.proxy import ParameterProxy as ParameterProxy
    from torchgraft.capturing.symbolic.proxy import Proxy as Proxy
    from torchgraft.capturing.symbolic.proxy import ProxyableClassMeta as ProxyableClassMeta
    from torchgraft.capturing.symbolic.tracer import Tracer as Tracer
    from torchgraft.capturing.symbolic.tracer import symbolic_trace as symbolic_trace
    from torchgraft.capturing.tracer_base import TracerBase as TracerBase
    from torchgraft.codegen.graph_module import GraphModule as GraphModule
    from torchgraft.codegen.source import CodeGen as CodeGen
    from torchgraft.errors import BackendError as BackendError
    from torchgraft.errors import BridgeError as BridgeError
    from torchgraft.errors import GraftError as GraftError
    from torchgraft.errors import GraphError as GraphError
    from torchgraft.errors import GuardError as GuardError
    from torchgraft.errors import InputError as InputError
    from torchgraft.errors import PassError as PassError
    from torchgraft.errors import QuantizeError as QuantizeError
    from torchgraft.errors import RunError as RunError
    from torchgraft.errors import ShapeError as ShapeError
    from torchgraft.errors import TraceError as TraceError
    from torchgraft.interpreter import Interpreter as Interpreter
    from torchgraft.interpreter import Transformer as Transformer
    from torchgraft.ir.arguments import immutable_dict as immutable_dict
    from torchgraft.ir.arguments import immutable_list as immutable_list
    from torchgraft.ir.arguments import map_aggregate as map_aggregate
    from torchgraft.ir.graph import Graph as Graph
    from torchgraft.ir.leaf_functions import wrap as wrap
    from torchgraft.ir.node import Node as Node
    from torchgraft.ir.node import has_side_effect as has_side_effect
    from torchgraft.ir.node import map_arg as map_arg
    from torchgraft.lowering.training import TrainingPrograms as TrainingPrograms
    from torchgraft.lowering.training import TrainingStep as TrainingStep
    from torchgraft.lowering.training import capture_training as capture_training
    from torchgraft.lowering.training_module import TrainingModule as TrainingModule
    from torchgraft.recording.calls import log_calls as log_calls
    from torchgraft.recording.doctor import doctor as doctor
    from torchgraft.recording.program_comparison import compare as compare
    from torchgraft.recording.record import record as record
    from torchgraft.recording.verify import verify as verify
    from torchgraft.reporting import Report as Report
    from torchgraft.reporting import report as report
    from torchgraft.results.progress import Progress as Progress
    from torchgraft.results.progress import follow_progress as follow_progress
    from torchgraft.rewriting.explain import explain as explain
    from torchgraft.rewriting.found import Found as Found
    from torchgraft.rewriting.found import call_any as call_any
    from torchgraft.rewriting.replace import Match as Match
    from torchgraft.rewriting.replace import ReplacedPatterns as ReplacedPatterns
    from torchgraft.rewriting.replace import replace_pattern as replace_pattern
    from torchgraft.rewriting.replace import replace_pattern_with_filters as replace_pattern_with_filters
    from torchgraft.rewriting.rewrite import PerMatch as PerMatch
    from torchgraft.rewriting.rewrite import rewrite as rewrite
    from torchgraft.splitting import Size as Size
    from torchgraft.splitting import Split as Split
    from torchgraft.splitting import Stages as Stages
    from torchgraft.splitting import Supported as Supported
    from torchgraft.splitting import split as split
    from torchgraft.splitting import split_module as split_module
    from torchgraft.view.call_info import CallInfo as CallInfo
    from torchgraft.view.call_info import node_call_info as node_call_info
    from torchgraft.view.drawing import Drawing as Drawing
    from torchgraft.view.drawing import draw as draw
    from torchgraft.view.graph_files import load_graph as load_graph
    from torchgraft.view.graph_files import save_graph as save_graph
    from torchgraft.view.graph_files import to_dot as to_dot
    from torchgraft.view.graph_files import to_model_explorer as to_model_explorer
    from torchgraft.view.module_summary import ModelSummary as ModelSummary
    from torchgraft.view.module_summary import summary as summary
    from torchgraft.view.networkx_edits import from_networkx as from_networkx
    from torchgraft.view.networkx_graph import to_networkx as to_networkx
    from torchgraft.view.program_diff import NodeChange as NodeChange
    from torchgraft.view.program_diff import ProgramDiff as ProgramDiff
    from torchgraft.view.program_diff import diff as diff


_HOME_OF = homes_of(__file__)
__all__ = sorted([*_HOME_OF, "__version__"])

_install_paths_of_torch_fx()


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home == __name__ or (home is None and name in _MODULES):
        value: Any = importlib.import_module(f"{__name__}.{name}")
    elif home is not None:
        value = getattr(importlib.import_module(home), name)
    else:
        raise AttributeError(f"module 'torchgraft' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
