"""How operators are taken apart on the way to core ATen: torch's own table, and those here, which ask about no size that does not
matter. torch's C++ code asks whether sizes are 1 where the answer changes nothing but the way memory is used.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions

from torchgraft.capturing.flowing.sizes import unwrapped
from torchgraft.lowering.layouts import contiguous, viewable
from torchgraft.lowering.sizes import merged
from torchgraft.lowering.tensors import TracedTensor
from torchgraft.lowering.values import concrete

_aten = torch.ops.aten


@functools.cache
def core_decompositions() -> dict[Any, Callable[..., Any] | None]:
    """What to compute in the place of each operator that is not in core ATen."""
    table = {**core_aten_decompositions(), **_OWN}
    del table[_aten.detach.default]  # torch's table drops it, and gradients would flow where the model stops them
    return table


def _product(sizes: Iterable[Any]) -> Any:
    return functools.reduce(operator.mul, sizes, 1)


def reshape(tensor: Any, sizes: Any) -> Any:
    """A view where the memory allows one, else a copy; which of the two, the layout of the inputs decides, which is checked."""
    if type(tensor) is not TracedTensor:
        return NotImplemented
    return _aten.view.default(viewable(tensor, sizes), sizes)


def flatten(tensor: Any, start: int = 0, end: int = -1) -> Any:
    if type(tensor) is not TracedTensor or not tensor.dim():
        return NotImplemented
    sizes, first, last = tensor.shape, start % tensor.dim(), end % tensor.dim()
    return reshape(tensor, [*sizes[:first], _product(sizes[first : last + 1]), *sizes[last + 1 :]])


def _contiguous(tensor: Any, *, memory_format: Any = torch.contiguous_format) -> Any:
    if type(tensor) is not TracedTensor:
        return NotImplemented
    return contiguous(tensor, memory_format)


def _linear(tensor: Any, weight: Any, bias: Any = None) -> Any:
    if tensor.dim() < 2 or weight.dim() != 2:
        return NotImplemented
    sizes = tensor.shape
    rows = tensor if len(sizes) == 2 else reshape(tensor, [_product(sizes[:-1]), sizes[-1]])
    if rows is NotImplemented:
        return NotImplemented
    turned = _aten.permute.default(weight, [1, 0])
    result = _aten.mm.default(rows, turned) if bias is None else _aten.addmm.default(bias, rows, turned)
    return result if len(sizes) == 2 else _aten.view.default(result, [*sizes[:-1], weight.shape[0]])


def _matmul(first: Any, second: Any) -> Any:
    if not (type(first) is TracedTensor and type(second) is TracedTensor) or first.dim() < 2 or second.dim() < 2:
        return NotImplemented
    if first.dim() == second.dim() == 2:
        return _aten.mm.default(first, second)
    if second.dim() == 2:
        sizes = first.shape
        result = _aten.mm.default(reshape(first, [_product(sizes[:-1]), sizes[-1]]), second)
        return _aten.view.default(result, [*sizes[:-1], second.shape[1]])
    rank = max(first.dim(), second.dim()) - 2
    batch = [
        merged([item.shape[place - rank - 2] for item in (first, second) if item.dim() >= rank - place + 2])
        for place in range(rank)
    ]
    if any(size is None for size in batch):
        return NotImplemented  # which of the two is repeated, if any, is for torch to ask
    one, other = (_as_batch(item, batch) for item in (first, second))
    result = _aten.bmm.default(one, other)
    return _aten.view.default(result, [*batch, first.shape[-2], second.shape[-1]])


def _broadcast_tensors(tensors: Any) -> Any:
    if any(type(item) is not TracedTensor for item in tensors):
        return NotImplemented
    rank = max(item.dim() for item in tensors)
    sizes = [merged([item.shape[place] for item in tensors if item.dim() >= -place]) for place in range(-rank, 0)]
    if any(size is None for size in sizes):
        return NotImplemented  # which of them is repeated, if any, is for torch to ask
    return [item if _has_sizes(item, sizes) else _aten.expand.default(item, sizes) for item in tensors]


def _has_sizes(tensor: Any, sizes: list[Any]) -> bool:
    """Whether a tensor has these sizes in every run."""
    return len(sizes) == tensor.dim() and all(map(_is_one, sizes, tensor.shape))


def _as_batch(tensor: Any, batch: list[Any]) -> Any:
    sizes = [*batch, *tensor.shape[-2:]]
    whole = tensor if _has_sizes(tensor, sizes) else _aten.expand.default(tensor, sizes)
    return reshape(whole, [_product(batch), *sizes[-2:]])


def _is_one(size: Any, other: Any) -> bool:
    """Whether two sizes are the same in every run."""
    numbers = unwrapped(size), unwrapped(other)
    return size == other if numbers == (None, None) else numbers[0] is numbers[1]


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention as matrix products and a softmax, as torch computes it where it has no kernel for the whole."""
    if dropout_p or enable_gqa or not isinstance(concrete(query.shape[-1]), int) or type(query) is not TracedTensor:
        return NotImplemented
    factor = math.sqrt(scale if scale is not None else 1 / math.sqrt(concrete(query.shape[-1])))
    if scale is None:
        int(query.shape[-1])  # fixes the width of a head
    scores = _aten.matmul.default(query * factor, _aten.transpose.int(key, -2, -1) * factor)
    if is_causal:
        visible = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        attn_mask = visible
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask.logical_not(), -math.inf)
        scores = scores + attn_mask
    return _aten.matmul.default(_aten._safe_softmax.default(scores, -1), value)


def _safe_softmax(tensor: Any, dim: int, dtype: Any = None) -> Any:
    """Rows that are hidden altogether become zeros; before the softmax, too, whose derivative would be no number there."""
    hidden = _aten.all.dim(_aten.eq.Scalar(tensor, -math.inf), dim, True)
    shown = _aten.masked_fill.Scalar(tensor, hidden, 0)
    return _aten.masked_fill.Scalar(_aten.softmax.int(shown, dim, dtype), hidden, 0)


def _batch_norm(
    tensor: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Any:
    if mean is None or variance is None:
        return NotImplemented
    if training:
        return _aten._native_batch_norm_legit.default(tensor, weight, bias, mean, variance, True, momentum, eps)[0]
    return _aten._native_batch_norm_legit_no_training.default(tensor, weight, bias, mean, variance, momentum, eps)[0]


# None is for those that stay: torch would take them apart into operators without a derivative (`copy`), or of a library's
# (`mkldnn_rnn_layer`).
_OWN: dict[Any, Callable[..., Any] | None] = {
    _aten.reshape.default: reshape,
    _aten.contiguous.default: _contiguous,
    _aten.flatten.using_ints: flatten,
    _aten.linear.default: _linear,
    _aten.matmul.default: _matmul,
    _aten.batch_norm.default: _batch_norm,
    _aten.fill.Tensor: None,
    _aten.fill_.Tensor: None,
    _aten.lstm.input: None,
    _aten.scaled_dot_product_attention.default: _attention,
    _aten._safe_softmax.default: _safe_softmax,
    _aten.broadcast_tensors.default: _broadcast_tensors,
}
