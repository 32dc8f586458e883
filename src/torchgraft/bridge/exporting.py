"""Parts of programs as torch.export's programs, which is what other makers' converters take.
What is done with them is in `backends/`; whole programs cross the bridge in `torch_export.py`.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram, export
from torch.utils import _pytree as pytree

from torchgraft.codegen.graph_module import GraphModule


class Exported(NamedTuple):
    """A program of torch.export, its inputs, and whether it returns one tensor rather than several."""

    program: ExportedProgram
    inputs: tuple[Any, ...]
    is_one: bool


def exported(part: GraphModule, inputs: tuple[Any, ...]) -> Exported:
    """Export a part for inputs of just these sizes; whatever it returns must be tensors.

    >>> import torchgraft
    >>> program = torchgraft.capture(lambda x: x.relu(), torch.ones(2))
    >>> exported(program, (torch.ones(2),)).is_one
    True
    """
    output = next(node for node in reversed(part.graph.nodes) if node.op == "output")
    return Exported(_export(part, inputs, {}), inputs, not isinstance(output.args[0], (tuple, list)))


def exported_model(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exported:
    """A model as torch.export sees it, without torchgraft; for comparisons."""
    program = _export(model, args, kwargs)
    inputs = tuple(pytree.tree_leaves((args, kwargs)))
    return Exported(program, inputs, program.call_spec.out_spec == pytree.tree_structure(0))


def _export(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch about torch
        return export(model, args, kwargs, strict=False).run_decompositions({})
