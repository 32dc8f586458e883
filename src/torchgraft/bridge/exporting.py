"""Parts of programs as torch.export's programs, which is what other makers' converters take.
What is done with them is in `backends/`; whole programs cross the bridge in `torch_export.py`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram, export
from torch.utils import _pytree as pytree

from torchgraft.codegen.graph_module import GraphModule


class Exported(NamedTuple):
    """A program of torch.export, its inputs, and which of its tensors the part returns: one, or a tuple of several."""

    program: ExportedProgram
    inputs: tuple[Any, ...]
    places: int | tuple[int, ...] = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors among the inputs, by the names that converters keep."""
        named = zip(self.program.graph_signature.user_inputs, self.inputs, strict=True)
        return {str(name): value for name, value in named if isinstance(value, torch.Tensor)}

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the part returns, of the tensors that the program computes."""
        if isinstance(self.places, int):
            return tensors[self.places]
        return tuple([tensors[place] for place in self.places])


def exported(part: GraphModule, inputs: tuple[Any, ...]) -> Exported:
    """Export a part for inputs of just these sizes; whatever it returns must be tensors, and each is computed once.

    >>> import torchgraft
    >>> program = torchgraft.capture(lambda x: (x, x * 2, x.detach()), torch.ones(2))
    >>> exported(program, (torch.ones(2),)).places
    (0, 1, 2)
    """
    output = part.graph.output_node()
    program = _export(part, inputs, {})
    if not isinstance(output.args[0], (tuple, list)):
        return Exported(program, inputs)
    names = list(program.graph_signature.user_outputs)
    different = list(dict.fromkeys(names))
    if len(different) < len(names):  # converters want results that differ
        copied = GraphModule(part, copy.deepcopy(part.graph), type(part).__name__)
        results = copied.graph.output_node().args[0]
        copied.graph.output_node().args = (tuple([results[names.index(name)] for name in different]),)
        program = _export(copied, inputs, {})
    return Exported(program, inputs, tuple([different.index(name) for name in names]))


def exported_model(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exported:
    """A model as torch.export sees it, without torchgraft; for comparisons."""
    program = _export(model, args, kwargs)
    inputs = tuple(pytree.tree_leaves((args, kwargs)))
    is_one = program.call_spec.out_spec == pytree.tree_structure(0)
    return Exported(program, inputs, 0 if is_one else tuple(range(len(program.graph_signature.user_outputs))))


def _export(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch about torch
        return export(model, args, kwargs, strict=False).run_decompositions({})
