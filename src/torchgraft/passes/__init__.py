"""Edits of a program, one file each, and the pipeline that runs them by name. What they need to know about a program is
answered in `analysis/`; edits that match a pattern are in `rewriting/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchgraft.public_names import on_first_use

# `graph.eliminate_dead_code()` reaches into this folder and needs only one file of it.
if TYPE_CHECKING:
    from torchgraft.passes.definition import Pass as Pass
    from torchgraft.passes.definition import PassReport as PassReport
    from torchgraft.passes.fold_constants import FoldConstants as FoldConstants
    from torchgraft.passes.functionalize import Functionalize as Functionalize
    from torchgraft.passes.fuse_activations import FuseActivations as FuseActivations
    from torchgraft.passes.fuse_conv_norm import FuseConvNorm as FuseConvNorm
    from torchgraft.passes.merge_common import MergeCommon as MergeCommon
    from torchgraft.passes.merge_linears import MergeLinears as MergeLinears
    from torchgraft.passes.normalize_arguments import NormalizeArguments as NormalizeArguments
    from torchgraft.passes.pipeline import Pipeline as Pipeline
    from torchgraft.passes.pipeline import PipelineReport as PipelineReport
    from torchgraft.passes.pipeline import Step as Step
    from torchgraft.passes.propagate_shapes import PropagateShapes as PropagateShapes
    from torchgraft.passes.recompute import Recompute as Recompute
    from torchgraft.passes.registry import find as find
    from torchgraft.passes.registry import names as names
    from torchgraft.passes.registry import register as register
    from torchgraft.passes.remove_dead_code import RemoveDeadCode as RemoveDeadCode
    from torchgraft.passes.remove_no_ops import RemoveNoOps as RemoveNoOps
    from torchgraft.passes.reorder_for_memory import ReorderForMemory as ReorderForMemory
    from torchgraft.passes.replace_module import ReplaceModule as ReplaceModule

__all__, __getattr__, __dir__ = on_first_use(__name__, __file__)
