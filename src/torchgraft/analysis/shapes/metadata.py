"""TensorMetadata: what there is to say about a tensor without its data, in the form that torch.fx notes in `node.meta`.
Who collects it is in `observed.py` and `passes/shape_prop.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchgraft.ir.arguments import map_aggregate


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


def tensor_metadata(tensor: torch.Tensor) -> TensorMetadata:
    """The metadata of one tensor.

    >>> tensor_metadata(torch.ones(2, 3)).stride
    (3, 1)
    """
    is_quantized = tensor.is_quantized
    return TensorMetadata(
        tensor.shape,
        tensor.dtype,
        tensor.requires_grad,
        () if tensor.layout in _SPARSE else tensor.stride(),
        memory_format_of(tensor),
        is_quantized,
        _quantization(tensor) if is_quantized else {},
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
    found = False

    def convert(leaf: Any) -> Any:
        nonlocal found
        if not isinstance(leaf, torch.Tensor):
            return leaf
        found = True
        return tensor_metadata(leaf)

    result = map_aggregate(value, convert)
    return result if found else None
