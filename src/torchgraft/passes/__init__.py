"""Edits of a program, one file each, and the pipeline that runs them by name. What they need to know about a program is
answered in `analysis/`; edits that match a pattern are in `rewriting/`.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchgraft.passes.definition import Pass, PassReport
    from torchgraft.passes.fold_constants import FoldConstants
    from torchgraft.passes.functionalize import Functionalize
    from torchgraft.passes.fuse_activations import FuseActivations
    from torchgraft.passes.fuse_conv_norm import FuseConvNorm
    from torchgraft.passes.merge_common import MergeCommon
    from torchgraft.passes.merge_linears import MergeLinears
    from torchgraft.passes.normalize_arguments import NormalizeArguments
    from torchgraft.passes.pipeline import Pipeline, PipelineReport, Step
    from torchgraft.passes.propagate_shapes import PropagateShapes
    from torchgraft.passes.recompute import Recompute
    from torchgraft.passes.registry import find, names, register
    from torchgraft.passes.remove_dead_code import RemoveDeadCode
    from torchgraft.passes.remove_no_ops import RemoveNoOps
    from torchgraft.passes.reorder_for_memory import ReorderForMemory
    from torchgraft.passes.replace_module import ReplaceModule

# Imported when they are first used: `graph.eliminate_dead_code()` reaches into this folder and needs only one file of it.
_HOMES = {
    "definition": "Pass PassReport",
    "pipeline": "Pipeline PipelineReport Step",
    "registry": "find names register",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "FoldConstants",
    "Functionalize",
    "FuseActivations",
    "FuseConvNorm",
    "MergeCommon",
    "MergeLinears",
    "NormalizeArguments",
    "Pass",
    "PassReport",
    "Pipeline",
    "PipelineReport",
    "PropagateShapes",
    "Recompute",
    "RemoveDeadCode",
    "RemoveNoOps",
    "ReorderForMemory",
    "ReplaceModule",
    "Step",
    "find",
    "names",
    "register",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'torchgraft.passes' has no attribute '{name}'")
    # A pass is in the file of its name: FoldConstants in fold_constants.py.
    home = _HOME_OF.get(name) or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    value = getattr(importlib.import_module(f"torchgraft.passes.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
