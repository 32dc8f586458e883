"""Operators that are several kernels one after the other on a GPU: what each of them has to do.
Those that are one kernel are described in `kernels.py`; on a CPU all are taken as one.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor

from torchgraft.analysis.simulate.kernels import Kernel, attention_flops, kernel_of, operator_name, type_of


def kernels_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, tf32: bool = False, gpu: bool = True
) -> list[Kernel]:
    """The kernels of one call of an operator; none where there is nothing to do.

    >>> import torch
    >>> aten, x, weight = torch.ops.aten, torch.ones(2, 3, 8, 8), torch.ones(4, 3, 1, 1)
    >>> args = (x, weight, torch.ones(4), [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    >>> [kernel.kind for kernel in kernels_of(aten.convolution.default, args, {}, torch.ones(2, 4, 8, 8))]
    ['convolution', 'elementwise']
    """
    name = operator_name(func)
    if name in _LAYERS:
        return _LAYERS[name](func, args, result, tf32)
    kernel = kernel_of(func, args, kwargs, result, tf32)
    if kernel is None:
        return []
    if not gpu:
        return [_recurrent_layer(kernel, args) if name == "mkldnn_rnn_layer" else kernel]
    if kernel.kind == "convolution":
        return _convolution(kernel, name, args, result)
    return [kernel]


def _recurrent_layer(kernel: Kernel, args: tuple[Any, ...]) -> Kernel:
    """One direction of a layer on a CPU, where steps come first."""
    x, inner, hidden = args[:3]
    return replace(kernel, sizes=(x.shape[0], x.shape[1], *hidden.shape), window=inner.shape[1])


def _convolution(kernel: Kernel, name: str, args: tuple[Any, ...], result: Any) -> list[Kernel]:
    if name == "convolution_backward":
        half = replace(kernel, flops=kernel.flops // 2)
        base = kernel.variant.partition("-")[0]
        last = "-last" if kernel.variant.endswith("-last") else ""
        wanted = args[10]
        found = [
            replace(half, variant=f"{base}-of-{side}{last}")
            for side, flag in zip(("input", "weight"), wanted, strict=False)
            if flag
        ]
        if wanted[2]:
            count, size, rows = args[0].numel(), args[0].numel() * args[0].itemsize, args[0].shape[1]
            work = Kernel("aten.sum", "reduction", kernel.type, count, size, elements=count, rows=rows)
            found.append(replace(work, variant="outer"))
        return found
    bias = args[2] if len(args) > 2 else None
    if not isinstance(bias, Tensor):
        return [kernel]
    made = result[0] if isinstance(result, tuple) else result
    return [kernel, _through(made, "aten.add_", "broadcast")]


def _through(tensor: Tensor, operator: str, variant: str = "", times: int = 2) -> Kernel:
    """A kernel that goes through a tensor, reading and writing it."""
    count, size = tensor.numel(), tensor.numel() * tensor.itemsize
    kernel = Kernel(operator, "elementwise", type_of(tensor), count, size * (times - 1), size, elements=count)
    return replace(kernel, variant=variant)


# ---- layers of transformers that are one operator ----


def _product(x: Tensor, weight: Tensor, rows: int, tf32: bool) -> Kernel:
    columns, depth = weight.shape
    kind = type_of(x)
    size = x.itemsize
    return Kernel(
        *("aten.addmm", "matmul", "tf32" if tf32 and kind == "fp32" else kind, 2 * rows * columns * depth),
        *((rows * depth + columns * depth) * size, rows * columns * size),
        sizes=(1, rows, columns, depth),
        variant="nt",
    )


def attention_kernel(
    query: Tensor, keys: int, heads: int, width: int, queries: int, masked: bool, causal: bool
) -> Kernel:
    """Attention of all heads as one kernel."""
    sizes = heads, queries, keys, width
    flops, token = attention_flops(sizes, causal), heads * width * query.itemsize
    variant = "masked" if masked else "causal" if causal else "full"
    traffic = token * (queries + 2 * keys), token * queries
    return Kernel("aten.scaled_dot_product_attention", "attention", type_of(query), flops, *traffic, sizes, variant)


def _attention_layer(func: Any, args: tuple[Any, ...], result: Any, tf32: bool) -> list[Kernel]:
    """torch's fast path of nn.MultiheadAttention: query, keys and values in one product, attention, the product behind it."""
    query, _, _, width, heads, inner, _, outer = args[:8]
    rows = prod(query.shape[:-1])
    batch, length = (query.shape[0], query.shape[1]) if query.dim() == 3 else (1, query.shape[0])
    wide = query.new_empty(*query.shape[:-1], 3 * width)
    return [
        _product(query, inner, rows, tf32),
        _through(wide, "aten._transform_bias_rescale_qkv", "broadcast"),
        attention_kernel(query, length, batch * heads, width // heads, length, False, False),
        _product(query, outer, rows, tf32),
    ]


def _encoder_layer(func: Any, args: tuple[Any, ...], result: Any, tf32: bool) -> list[Kernel]:
    """torch's fast path of nn.TransformerEncoderLayer."""
    x, width, heads = args[:3]
    attention = _attention_layer(func, (x, x, x, width, heads, args[3], args[4], args[5], args[6]), result, tf32)
    first, second = args[14], args[16]
    rows = prod(x.shape[:-1])
    norm = replace(_through(x, "aten.native_layer_norm", "layer-norm"), kind="norm", flops=8 * x.numel(), rows=rows)
    hidden = x.new_empty(*x.shape[:-1], first.shape[0])
    feed = [_product(x, first, rows, tf32), _through(hidden, "aten.gelu"), _product(hidden, second, rows, tf32)]
    ending = [_through(x, "aten.add", times=3), norm]
    return [*attention, *ending, *feed, *ending]


_LAYERS = {"_native_multi_head_attention": _attention_layer, "_transformer_encoder_layer_fwd": _encoder_layer}
