"""Parts of programs as torch.export's programs, which is what other makers' converters take.
What is done with them is in `backends/`; whole programs cross the bridge in `torch_export.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram, export
from torch.nn import functional
from torch.utils import _pytree as pytree

from torchgraft.codegen.graph_module import GraphModule, with_own_graph


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
    part = _with_plain_attention(part)
    output = part.graph.output_node()
    program = _export(part, inputs, {})
    if not isinstance(output.args[0], (tuple, list)):
        return Exported(program, inputs)
    names = list(program.graph_signature.user_outputs)
    different = list(dict.fromkeys(names))
    if len(different) < len(names):  # converters want results that differ
        copied = with_own_graph(part)
        results = copied.graph.output_node().args[0]
        copied.graph.output_node().args = (tuple([results[names.index(name)] for name in different]),)
        program = _export(copied, inputs, {})
    return Exported(program, inputs, tuple([different.index(name) for name in names]))


def _with_plain_attention(part: GraphModule) -> GraphModule:
    """The part with attention as converters know it: of four dimensions, with keys and values for each query."""
    attention = functional.scaled_dot_product_attention
    if not part.graph.find_nodes(op="call_function", target=attention):
        return part
    result = with_own_graph(part)
    for node in result.graph.find_nodes(op="call_function", target=attention):
        node.target = _plain_attention
    return result


def _plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if enable_gqa:
        key, value = [
            part.unsqueeze(-3)
            .expand(*part.shape[:-2], query.size(-3) // part.size(-3), *part.shape[-2:])
            .flatten(-4, -3)
            for part in (key, value)
        ]
    before, is_plain_mask = query.shape[:-2], attn_mask is None or attn_mask.dim() == 2
    if query.dim() > 4 and key.shape[:-2] == value.shape[:-2] == before and is_plain_mask:
        query, key, value = [part.flatten(0, -4) for part in (query, key, value)]
    result = functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    return result.unflatten(0, before[:-1]) if result.dim() < len(before) + 2 else result


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
