"""What a call of an operator gives a machine to do: its kernels, each with a kind, sizes, arithmetic and bytes.
FLOPs and bytes are those of `cost/`; how long a kernel takes is decided in `timing.py`.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchgraft.analysis.cost.count import distinct_bytes, traffic
from torchgraft.analysis.cost.elementwise import MOVES, is_view, work_of
from torchgraft.analysis.cost.formulas import causal_pairs

TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.int8: "int8",
    torch.uint8: "int8",
}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel's work. `sizes` are those of the matrix product that it is or can be written as: how many of them there are,
    rows, columns, depth. `variant` tells apart what machines do in different ways, such as a depthwise convolution.
    """

    operator: str
    kind: str
    type: str = "fp32"
    flops: int = 0
    read: int = 0
    written: int = 0
    sizes: tuple[int, ...] = ()
    variant: str = ""
    window: int = 1

    @property
    def bytes(self) -> int:
        """All that it moves."""
        return self.read + self.written

    def to_dict(self) -> dict[str, Any]:
        """Plain values, from which `Kernel(**values)` makes it again."""
        return asdict(self)


_MATMULS = frozenset(
    "mm addmm bmm baddbmm addbmm mv addmv dot vdot linear _addmm_activation _scaled_mm _int_mm".split()
)
_CONVOLUTIONS = frozenset(
    "convolution _convolution cudnn_convolution convolution_overrideable convolution_backward _slow_conv2d_forward "
    "mkldnn_convolution".split()
)
_ATTENTIONS = ("_scaled_dot_product_", "_flash_attention", "_efficient_attention", "scaled_dot_product_attention")
_RECURRENT = frozenset("mkldnn_rnn_layer mkldnn_rnn_layer_backward _cudnn_rnn lstm gru rnn_tanh rnn_relu".split())
_NORMS = (
    *("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm", "_batch_norm", "batch_norm"),
    *("cudnn_batch_norm", "_fused_rms_norm", "_softmax", "_log_softmax", "_safe_softmax", "var", "std"),
)
_POOLS = ("max_pool", "avg_pool", "_adaptive_avg_pool", "adaptive_max_pool", "upsample_", "_upsample_", "grid_sampler")
_GATHERS = frozenset(
    "embedding index index_select gather _embedding_bag _embedding_bag_forward_only masked_select take index_put index_put_ "
    "scatter scatter_ scatter_add scatter_add_ index_add_ index_copy_ _unsafe_index _index_put_impl_ embedding_dense_backward "
    "index_add scatter_reduce scatter_reduce_ nll_loss_backward nll_loss_forward nll_loss2d_forward nll_loss2d_backward".split()
)
_SORTS = frozenset("sort topk kthvalue argsort _unique2 unique_dim unique_consecutive searchsorted multinomial".split())
_REDUCTIONS = frozenset(
    "sum nansum mean prod amax amin aminmax max min argmax argmin any all count_nonzero norm linalg_vector_norm logsumexp "
    "cumsum cumprod cummax cummin logcumsumexp median mode mse_loss smooth_l1_loss binary_cross_entropy".split()
)
_NOTHING = ("_record_function", "empty", "new_empty", "unsafe_", "_unsafe_view", "lift_fresh", "sym_", "_assert", "is_same_size", "resize_")


@functools.cache
def kind_of(func: Any) -> str:
    """The kind of kernel that an operator runs: "nothing" for views, "unknown" where nothing is known about it.

    >>> aten = torch.ops.aten
    >>> kind_of(aten.mm.default), kind_of(aten.relu.default), kind_of(aten.view.default)
    ('matmul', 'elementwise', 'nothing')
    """
    name = operator_name(func)
    if is_view(func) or name.startswith(_NOTHING):
        return "nothing"
    if name == "_local_scalar_dense":
        return "wait"
    for kind, names in (
        *(("matmul", _MATMULS), ("convolution", _CONVOLUTIONS), ("recurrent", _RECURRENT)),
        *(("gather", _GATHERS), ("sort", _SORTS), ("reduction", _REDUCTIONS)),
    ):
        if name in names:
            return kind
    for kind, starts in (("attention", _ATTENTIONS), ("norm", _NORMS), ("pooling", _POOLS)):
        if name.startswith(starts):
            return kind
    if getattr(func, "namespace", "") == "aten" and (name in MOVES or name.endswith(("_like", "_copy"))):
        return "copy"
    tags = set(getattr(func, "tags", ()))
    if torch.Tag.pointwise in tags or torch.Tag.nondeterministic_seeded in tags or name.startswith(("_foreach", "_fused_")):
        return "elementwise"
    return ""  # the formulas of `cost` have the last word


def operator_name(func: Any) -> str:
    """The name of an operator without its namespace and overload.

    >>> operator_name(torch.ops.aten.add.Tensor)
    'add'
    """
    packet = getattr(func, "overloadpacket", func)
    return str(getattr(packet, "__name__", func))


def kernel_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, tf32: bool = False) -> Kernel | None:
    """The work of one call; None where it is nothing to do, as for a view.

    >>> x = torch.ones(2, 3)
    >>> kernel = kernel_of(torch.ops.aten.mm.default, (x, x.T), {}, x @ x.T)
    >>> kernel.kind, kernel.flops, kernel.bytes, kernel.sizes
    ('matmul', 24, 64, (1, 2, 2, 3))
    """
    kind = kind_of(func)
    if kind == "nothing":
        return None
    work = work_of(func, args, kwargs, result)
    if not kind:
        kind = "unknown" if work is None else "elementwise"
    read, written = traffic(func, args, kwargs, result)
    type_ = type_of(args, kwargs, result)
    sizes: tuple[int, ...] = ()
    variant, window = "", 1
    if kind == "matmul":
        sizes = _product_sizes(func, args, result)
        variant = _layout(args)
    elif kind == "convolution":
        sizes, variant, window = _convolution_sizes(func, args, result)
    elif kind == "attention":
        sizes, variant = _attention_sizes(func, args, kwargs)
    elif kind in ("reduction", "norm", "copy", "pooling", "gather"):
        variant = _pattern(func, kind, args, result)
    if tf32 and type_ == "fp32" and kind in ("matmul", "convolution", "recurrent"):
        type_ = "tf32"
    return Kernel(str(func), kind, type_, 0 if work is None else work[0], read, written, sizes, variant, window)


def type_of(*trees: Any) -> str:
    """The type that is computed with: that of the first tensor of floating point, else of the first tensor."""
    first = None
    for leaf in pytree.tree_leaves(trees):
        if isinstance(leaf, Tensor):
            if leaf.is_floating_point() or leaf.is_complex():
                return TYPES.get(leaf.dtype, "fp32")
            first = leaf if first is None else first
    return "fp32" if first is None else TYPES.get(first.dtype, "fp32")


# ---- the product that a kernel is ----


def _product_sizes(func: Any, args: tuple[Any, ...], result: Any) -> tuple[int, ...]:
    matrices = [value for value in args if isinstance(value, Tensor) and value.dim() > 0]
    name = operator_name(func)
    if name in ("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation") and len(matrices) > 2:
        matrices = matrices[-2:]
    first, second = matrices[0], matrices[1]
    if name == "linear":
        return 1, first.numel() // max(first.shape[-1], 1), second.shape[0], first.shape[-1]
    count = first.shape[0] if first.dim() == 3 else 1
    rows = first.shape[-2] if first.dim() > 1 else 1
    columns = second.shape[-1] if second.dim() > 1 else 1
    return count, rows, columns, first.shape[-1]


def _layout(args: tuple[Any, ...]) -> str:
    """For each of the two matrices whether its rows (n) or its columns (t) lie together."""
    matrices = [value for value in args if isinstance(value, Tensor) and value.dim() > 1][-2:]
    return "".join("n" if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else "t" for tensor in matrices)


def _convolution_sizes(func: Any, args: tuple[Any, ...], result: Any) -> tuple[tuple[int, ...], str, int]:
    name = operator_name(func)
    if name == "convolution_backward":
        gradient, x, weight, _, stride, padding, dilation, transposed, _, groups, wanted = args[:11]
        made, direction = gradient.shape, "-backward"
        direction = {(True, False): "-of-input", (False, True): "-of-weight"}.get((wanted[0], wanted[1]), "-backward")
    else:
        x, weight = args[:2]
        made, direction = (result[0] if isinstance(result, tuple) else result).shape, ""
        rest = [*args[2:], *[None] * 7]
        stride, dilation, transposed, groups = rest[1], rest[3], rest[4], rest[6]
    groups = int(groups or 1)
    kernel = weight.shape[2:]
    window = int(prod(kernel))
    if transposed is True:
        sizes = groups, x.shape[0] * prod(x.shape[2:]), weight.shape[1] * window, x.shape[1] // groups
    else:
        sizes = groups, made[0] * prod(made[2:]), weight.shape[0] // groups, weight.shape[1] * window
    strides = prod(stride) if isinstance(stride, (list, tuple)) else 1
    dilations = prod(dilation) if isinstance(dilation, (list, tuple)) else 1
    variant = _convolution_class(x, groups, kernel, strides, dilations, transposed is True)
    last = "-last" if x.dim() == 4 and _is_channels_last(x, weight) else ""
    return tuple(int(size) for size in sizes), variant + direction + last, window


def _convolution_class(x: Tensor, groups: int, kernel: Any, stride: int, dilation: int, transposed: bool) -> str:
    if groups > 1:
        return "depthwise" if groups == x.shape[1] else "grouped"
    if transposed:
        return "transposed"
    if prod(kernel) == 1:
        return "pointwise" if stride == 1 else "strided-pointwise"
    if len(kernel) == 2 and tuple(kernel) == (3, 3) and stride == 1 and dilation == 1:
        return "3x3"
    return "patch" if stride == prod(kernel) else "general"


def _is_channels_last(x: Tensor, weight: Tensor) -> bool:
    return (x.stride(1) == 1 and x.shape[1] > 1) or (weight.stride(1) == 1 and weight.shape[1] > 1 and prod(weight.shape[2:]) > 1)


def _attention_sizes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], str]:
    """Heads of all examples, queries, keys, width of a head."""
    query, key = args[:2] if "backward" not in operator_name(func) else args[1:3]
    heads = prod(query.shape[:-2])
    masked = len(args) > 3 and isinstance(args[3], Tensor) or kwargs.get("attn_mask") is not None
    causal = bool(kwargs.get("is_causal")) or any(value is True for value in args[3:])
    variant = ("masked" if masked else "causal" if causal else "full") + (
        "-backward" if "backward" in operator_name(func) else ""
    )
    return (int(heads), int(query.shape[-2]), int(key.shape[-2]), int(query.shape[-1])), variant


def attention_flops(sizes: tuple[int, ...], causal: bool) -> int:
    """Two products over all pairs of queries and keys, or over those that are not masked."""
    heads, queries, keys, width = sizes
    return 4 * heads * width * (causal_pairs(queries, keys) if causal else queries * keys)


# ---- how memory is gone through ----


def _pattern(func: Any, kind: str, args: tuple[Any, ...], result: Any) -> str:
    """What machines are slower or faster at than at going through memory in order."""
    name = operator_name(func)
    if kind == "norm":
        for word in ("batch_norm", "group_norm", "layer_norm", "rms_norm", "softmax"):
            if word in name:
                return word.replace("_", "-") + ("-backward" if "backward" in name else "")
        return "variance"
    if kind == "copy":
        source = next((leaf for leaf in pytree.tree_leaves(args[::-1]) if isinstance(leaf, Tensor)), None)
        target = next((leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)), None)
        return "strided" if _is_transposition(source, target) else "plain"
    if kind == "reduction":
        x = next((leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)), None)
        made = next((leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)), None)
        if x is None or made is None or made.numel() <= 1:
            return "all"
        return "inner" if x.dim() and made.shape[-1:] != x.shape[-1:] else "outer"
    return "backward" if "backward" in name else ""


def _is_transposition(source: Any, target: Any) -> bool:
    if source is None or target is None or source.numel() != target.numel() or source.dim() != target.dim():
        return False
    sizes = [size for size in source.shape if size > 1]
    orders = [
        sorted(range(len(sizes)), key=[s for s, size in zip(t.stride(), t.shape, strict=True) if size > 1].__getitem__)
        for t in (source, target)
    ]
    return len(sizes) > 1 and orders[0][0] != orders[1][0]


def touched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> list[tuple[int, int, bool]]:
    """The memory that a call goes through: which, how many bytes, and whether it was made by it."""
    found = []
    seen = set()
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            seen.add(id(leaf))
            found.append((leaf.untyped_storage()._cdata, distinct_bytes(leaf), False))
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Tensor) and id(leaf) not in seen and leaf.layout is torch.strided:
            found.append((leaf.untyped_storage()._cdata, distinct_bytes(leaf), True))
    return found
