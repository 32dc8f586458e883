"""TensorMetadata: what there is to say about a tensor without its data, in the form that torch.fx notes in `node.meta`.
`shapes` collects it for a program; `passes/shape_prop.py` notes it on nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torchgraft.analysis.dry_run import DryRun, program_of
from torchgraft.codegen.calling import example_inputs
from torchgraft.ir.arguments import leaves, map_aggregate
from torchgraft.ir.node import Node
from torchgraft.ir.printing import tensor_text
from torchgraft.results.shown import NamedTexts


class TensorMetadata(NamedTuple):
    """Everything about a tensor but its data; the fields are those of torch.fx's class.

    >>> import torch, torchgraft
    >>> metadata = torchgraft.shapes(torch.nn.Linear(4, 2), torch.ones(3, 4))["output"]
    >>> metadata.shape, metadata.dtype, metadata.requires_grad
    (torch.Size([3, 2]), torch.float32, True)
    """

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    stride: tuple[int, ...]
    memory_format: torch.memory_format | None
    is_quantized: bool
    qparams: dict[str, Any]


_MEMORY_FORMATS = (torch.channels_last, torch.channels_last_3d)
_SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def tensor_metadata(result: torch.Tensor, include_contiguity: bool = True) -> TensorMetadata:
    """The metadata of one tensor, with its order in memory unless that is not wanted.

    >>> tensor_metadata(torch.ones(2, 3)).stride
    (3, 1)
    """
    is_quantized = result.is_quantized
    return TensorMetadata(
        result.shape,
        result.dtype,
        result.requires_grad,
        () if result.layout in _SPARSE else result.stride(),
        memory_format_of(result) if include_contiguity else None,
        is_quantized,
        _quantization(result) if is_quantized else {},
    )


def memory_format_of(tensor: torch.Tensor) -> torch.memory_format | None:
    """The order in which a tensor lies in memory, where it is one of those that torch has a name for."""
    if tensor.layout in _SPARSE:
        return None
    if tensor.is_contiguous():
        return torch.contiguous_format
    return next((form for form in _MEMORY_FORMATS if tensor.is_contiguous(memory_format=form)), None)


def _quantization(tensor: torch.Tensor) -> dict[str, Any]:
    scheme = tensor.qscheme()
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return {"qscheme": scheme, "scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
    return {
        "qscheme": scheme,
        "scale": tensor.q_per_channel_scales().tolist(),
        "zero_point": tensor.q_per_channel_zero_points().tolist(),
        "axis": tensor.q_per_channel_axis(),
    }


def tree_metadata(value: Any) -> Any:
    """The same tree with metadata in the place of tensors, or None where there is no tensor in it."""
    if isinstance(value, torch.Tensor):
        return tensor_metadata(value)
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves(value)):
        return None
    return map_aggregate(value, lambda leaf: tensor_metadata(leaf) if isinstance(leaf, torch.Tensor) else leaf)


# ---- shapes of a run ----


class Shapes(NamedTexts):
    """Metadata by the names of nodes; a tuple or list where the value is one. Values that hold no tensor are left out.

    >>> import torch, torchgraft
    >>> found = torchgraft.shapes(torch.nn.Linear(4, 2), torch.ones(3, 4))
    >>> found["output"].shape
    torch.Size([3, 2])
    """

    def _text_of(self, value: Any) -> str:
        if isinstance(value, (tuple, list)) and tensor_text(value) is None:
            return f"({', '.join(map(self._text_of, value))})"
        return tensor_text(value) or str(value)


def shapes(program: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None, *, compute: bool = False) -> Shapes:
    """What every value of a program looks like when it runs on such inputs.

    Nothing is computed unless `compute` says so, which a program needs whose shapes depend on values (`nonzero`).

    >>> import torch
    >>> print(shapes(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()), torch.ones(2, 3)))
    input...  f32[2, 3]
    ...       f32[2, 4]
    ...       f32[2, 4]
    output    f32[2, 4]
    """
    values, keywords = example_inputs(args, kwargs)
    subject = program_of(program, values, keywords, compute)
    found = Shapes()

    def note(node: Node, value: Any) -> None:
        metadata = tree_metadata(value)
        if metadata is not None:
            found[node.name] = metadata

    DryRun(subject, values, keywords, node_done=note, compute=compute).forward()
    return found
