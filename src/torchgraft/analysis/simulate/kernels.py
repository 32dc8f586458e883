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

from torchgraft.analysis.cost.count import traffic
from torchgraft.analysis.cost.elementwise import MOVES, is_view, work_of
from torchgraft.analysis.cost.formulas import causal_pairs
from torchgraft.ir.arguments import tensors_of

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
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel's work. `sizes` are those of the matrix product that it is or can be written as: how many of them there are,
    rows, columns, depth. `variant` tells apart what machines do in different ways, such as a depthwise convolution. `rows` are
    what norms and reductions go through one by one, `images` those of a convolution and `window` the places of its kernel;
    `passes` counts kernels that go through the same memory one after the other.
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
    images: int = 1
    elements: int = 0
    rows: int = 0
    passes: int = 1

    @property
    def bytes(self) -> int:
        """All that it moves."""
        return self.read + self.written

    def to_dict(self) -> dict[str, Any]:
        """Plain values, from which `Kernel(**values)` makes it again."""
        return asdict(self)


# The kinds of kernels, by the names of operators.
_KINDS = {
    "matmul": """
        mm addmm bmm baddbmm addbmm mv addmv dot vdot linear _addmm_activation _scaled_mm _int_mm _grouped_mm
    """,
    "convolution": """
        convolution _convolution cudnn_convolution convolution_overrideable convolution_backward
        _slow_conv2d_forward mkldnn_convolution
    """,
    "recurrent": """
        mkldnn_rnn_layer mkldnn_rnn_layer_backward _cudnn_rnn lstm gru rnn_tanh rnn_relu
    """,
    "gather": """
        embedding index index_select gather _embedding_bag _embedding_bag_forward_only masked_select take
        index_put index_put_ scatter scatter_ scatter_add scatter_add_ index_add_ index_copy_ _unsafe_index
        _index_put_impl_ embedding_dense_backward index_add scatter_reduce scatter_reduce_ nll_loss_backward
        nll_loss_forward nll_loss2d_forward nll_loss2d_backward
    """,
    "sort": """
        sort topk kthvalue argsort _unique2 unique_dim unique_consecutive searchsorted multinomial
    """,
    "reduction": """
        sum nansum mean prod amax amin aminmax max min argmax argmin any all count_nonzero norm
        linalg_vector_norm logsumexp cumsum cumprod cummax cummin logcumsumexp median mode mse_loss
        smooth_l1_loss binary_cross_entropy
    """,
    "wait": "_local_scalar_dense",
}
_KIND_OF_NAME = {name: kind for kind, names in _KINDS.items() for name in names.split()}
# The same, by how names begin.
_BEGINNINGS = {
    "attention": "_scaled_dot_product_ _flash_attention _efficient_attention scaled_dot_product_attention",
    "norm": """
        native_layer_norm native_group_norm native_batch_norm _native_batch_norm _batch_norm batch_norm cudnn_batch_norm
        _fused_rms_norm _softmax _log_softmax _safe_softmax var std
    """,
    "pooling": "max_pool avg_pool _adaptive_avg_pool adaptive_max_pool upsample_ _upsample_ grid_sampler",
}
_NOTHING = "_record_function empty new_empty unsafe_ _unsafe_view lift_fresh sym_ _assert is_same_size resize_"


@functools.cache
def kind_of(func: Any) -> str:
    """The kind of kernel that an operator runs: "nothing" for views, "unknown" where nothing is known about it.

    >>> aten = torch.ops.aten
    >>> kind_of(aten.mm.default), kind_of(aten.relu.default), kind_of(aten.view.default)
    ('matmul', 'elementwise', 'nothing')
    """
    name = operator_name(func)
    if is_view(func) or name.startswith(tuple(_NOTHING.split())):
        return "nothing"
    found = _KIND_OF_NAME.get(name)
    if found is not None:
        return found
    for kind, beginnings in _BEGINNINGS.items():
        if name.startswith(tuple(beginnings.split())):
            return kind
    if getattr(func, "namespace", "") == "aten" and (name in MOVES or name.endswith(("_like", "_copy"))):
        return "copy"
    tags = set(getattr(func, "tags", ()))
    if (
        torch.Tag.pointwise in tags
        or torch.Tag.nondeterministic_seeded in tags
        or name.startswith(("_foreach", "_fused_"))
    ):
        return "elementwise"
    return ""  # the formulas of `cost` have the last word


def operator_name(func: Any) -> str:
    """The name of an operator without its namespace and overload.

    >>> operator_name(torch.ops.aten.add.Tensor)
    'add'
    """
    packet = getattr(func, "overloadpacket", func)
    return str(getattr(packet, "__name__", func))


def kernel_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, tf32: bool = False
) -> Kernel | None:
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
    found = _DETAILS[kind](func, args, kwargs, result) if kind in _DETAILS else {}
    type_ = type_of(args, kwargs, result)
    if tf32 and type_ == "fp32" and kind in ("matmul", "convolution", "recurrent"):
        type_ = "tf32"
    read, written = traffic(func, args, kwargs, result)
    elements = max(_elements(args), _elements(result))
    details = {"elements": elements} | found
    return Kernel(str(func), kind, type_, 0 if work is None else work[0], read, written, **details)


def _elements(tree: Any) -> int:
    return max((tensor.numel() for tensor in tensors_of(tree)), default=0)


def type_of(*trees: Any) -> str:
    """The type that is computed with: that of the first tensor of floating point, else of the first tensor."""
    tensors = tensors_of(trees)
    chosen = next(
        (item for item in tensors if item.is_floating_point() or item.is_complex()), next(iter(tensors), None)
    )
    return "fp32" if chosen is None else TYPES.get(chosen.dtype, "fp32")


# ---- the product that a kernel is ----


def _product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
    matrices = [value for value in args if isinstance(value, Tensor) and value.dim() > 0]
    name = operator_name(func)
    if name in ("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation") and len(matrices) > 2:
        matrices = matrices[1:3]
    first, second = matrices[0], matrices[1]
    if name == "linear":
        return {
            "sizes": (1, first.numel() // max(first.shape[-1], 1), second.shape[0], first.shape[-1]),
            "variant": "nt",
        }
    count = first.shape[0] if first.dim() == 3 else 1
    rows = first.shape[-2] if first.dim() > 1 else 1
    columns = second.shape[-1] if second.dim() > 1 else 1
    if name == "_grouped_mm" and first.dim() == 2 and second.dim() == 3:  # each row belongs to one of the groups
        count, rows = second.shape[0], -(-rows // max(second.shape[0], 1))
    # For each of the two whether its rows (n) or its columns (t) lie together.
    layout = "".join("n" if x.dim() < 2 or x.stride(-1) == 1 or x.shape[-1] == 1 else "t" for x in (first, second))
    return {"sizes": (count, rows, columns, first.shape[-1]), "variant": layout}


def _convolution(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
    direction = ""
    if operator_name(func) == "convolution_backward":
        gradient, x, weight, _, stride, _, _, transposed, _, groups, wanted = args[:11]
        made = gradient.shape
        direction = {(True, False): "-of-input", (False, True): "-of-weight"}.get((wanted[0], wanted[1]), "-backward")
    else:
        x, weight = args[:2]
        made = (result[0] if isinstance(result, tuple) else result).shape
        rest = [*args[2:], *[None] * 7]
        stride, transposed, groups = rest[1], rest[4] is True, rest[6]
    groups, kernel = int(groups or 1), weight.shape[2:]
    window = int(prod(kernel))
    if transposed:
        sizes = groups, x.shape[0] * prod(x.shape[2:]), weight.shape[1] * window, x.shape[1] // groups
    else:
        sizes = groups, made[0] * prod(made[2:]), weight.shape[0] // groups, weight.shape[1] * window
    strides = prod(stride) if isinstance(stride, (list, tuple)) else 1
    variant = _convolution_class(x, groups, kernel, strides, transposed) + direction
    if _is_channels_last(x, weight):
        variant += "-last"
    return {
        "sizes": tuple(int(size) for size in sizes),
        "variant": variant,
        "window": window,
        "images": int(x.shape[0]),
    }


def _convolution_class(x: Tensor, groups: int, kernel: Any, stride: int, transposed: bool) -> str:
    if groups > 1:
        return "depthwise" if groups == x.shape[1] else "grouped"
    if transposed:
        return "transposed"
    if prod(kernel) == 1:
        return "pointwise" if stride == 1 else "strided"
    return "general"


def _is_channels_last(x: Tensor, weight: Tensor) -> bool:
    """Whether the values of all channels lie together, in the image or in the weights."""
    return any(t.dim() > 3 and t.shape[1] > 1 and t.stride(1) == 1 and prod(t.shape[2:]) > 1 for t in (x, weight))


def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
    """Heads of all examples, queries, keys, width of a head."""
    backward = "backward" in operator_name(func)
    query, key = args[1:3] if backward else args[:2]
    masked = (
        any(isinstance(value, Tensor) and value.dim() > 1 for value in args[3:4]) or kwargs.get("attn_mask") is not None
    )
    causal = bool(kwargs.get("is_causal")) or any(value is True for value in args[3:])
    variant = ("masked" if masked else "causal" if causal else "full") + ("-backward" if backward else "")
    sizes = int(prod(query.shape[:-2])), int(query.shape[-2]), int(key.shape[-2]), int(query.shape[-1])
    return {"sizes": sizes, "variant": variant}


def attention_flops(sizes: tuple[int, ...], causal: bool) -> int:
    """Two products over all pairs of queries and keys, or over those that are not masked."""
    heads, queries, keys, width = sizes
    return 4 * heads * width * (causal_pairs(queries, keys) if causal else queries * keys)


# ---- how memory is gone through ----


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
    name, x = operator_name(func), tensors_of(args)[0]
    words = ("batch_norm", "group_norm", "layer_norm", "rms_norm", "softmax")
    word = next((word for word in words if word in name), "variance")
    backward = "-backward" if "backward" in name else ""
    size, rows = x.numel(), 1
    if word in ("layer_norm", "rms_norm"):
        shapes = [value for value in args if isinstance(value, (list, tuple))]
        rows = size // max(prod(shapes[0]) if shapes else x.shape[-1], 1)
    elif word == "group_norm":
        numbers = [value for value in args if type(value) is int]
        rows = x.shape[0] * (numbers[-1] if numbers else 1)
    elif word == "batch_norm":
        flags = [value for value in args if isinstance(value, bool)]
        trains = flags[0] if flags else "no_training" not in name and "no_update" not in name
        word = "batch-norm-training" if trains and not backward else "batch_norm"
        rows = x.shape[1] if trains and x.dim() > 1 else x.shape[0] * (x.shape[1] if x.dim() > 1 else 1)
    else:
        axis = next((value for value in args[1:] if type(value) is int), -1)
        rows = size // max(x.shape[axis] if x.dim() else 1, 1)
    return {"variant": word.replace("_", "-") + backward, "rows": int(rows), "elements": size}


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
    sources, targets = tensors_of(args), tensors_of(result)
    name = operator_name(func)
    if name == "roll":
        axes = args[2] if len(args) > 2 else ()
        return {"variant": "indexed", "passes": max(len(axes), 1)}
    if name in ("constant_pad_nd", "pad"):
        return {"variant": "indexed", "passes": 2}
    if not sources or not targets:
        return {"variant": "fill"}
    if name in ("where", "masked_fill", "masked_fill_"):
        return {"variant": "broadcast"}
    return {"variant": "strided" if any(_is_reordered(source, targets[0]) for source in sources) else "plain"}


def _is_reordered(source: Tensor, target: Tensor) -> bool:
    """Whether neighbours of one are no neighbours of the other."""
    if source.numel() != target.numel() or source.dim() != target.dim():
        return source.dim() > 0 and source.numel() > 1 and _inner_stride(source) != 1
    return _inner_axis(source) != _inner_axis(target)


def _inner_stride(tensor: Tensor) -> int:
    return min((stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1), default=1)


def _inner_axis(tensor: Tensor) -> int:
    axes = [axis for axis, size in enumerate(tensor.shape) if size > 1]
    return min(axes, key=lambda axis: (tensor.stride(axis), -axis), default=-1)


def _reduction(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
    x, made = next(iter(tensors_of(args)), None), next(iter(tensors_of(result)), None)
    if x is None or made is None:
        return {"variant": "all"}
    if operator_name(func).startswith(("cum", "logcum")):
        return {"variant": "scan", "rows": x.numel() // max(x.shape[-1] if x.dim() else 1, 1)}
    if made.numel() <= 1:
        return {"variant": "all", "rows": 1}
    axes = next((value for value in args[1:] if isinstance(value, (list, tuple))), None) or [
        value for value in args[1:] if type(value) is int
    ]
    inner = not axes or any(axis % x.dim() == x.dim() - 1 for axis in axes)
    return {"variant": "inner" if inner else "outer", "rows": made.numel()}


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
    """Whether all operands lie in the same order, so that one can go straight through them."""
    tensors = [tensor for tensor in tensors_of((args, result)) if tensor.numel() > 1]
    if operator_name(func).startswith(("_foreach", "_fused_adam", "_fused_sgd")):
        return {"variant": "foreach"}
    if any(t.shape != tensors[0].shape or _steps(t) != _steps(tensors[0]) for t in tensors[1:]):
        return {"variant": "broadcast"}
    return {"variant": ""}


def _steps(tensor: Tensor) -> list[int]:
    """How far the neighbours along each dimension are apart, where there are any."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _pooling(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
    name = operator_name(func)
    return {
        "variant": ("resampling" if "upsample" in name or "grid" in name else "")
        + ("-backward" if "backward" in name else "")
    }


def _gather(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
    name = operator_name(func)
    writes = any(word in name for word in ("scatter", "put", "add", "copy_", "backward"))
    return {
        "variant": "scatter" if writes else "",
        "elements": _elements(result) if not writes else _elements(args[1:]),
    }


_DETAILS: dict[str, Any] = {
    "matmul": _product,
    "convolution": _convolution,
    "attention": _attention,
    "norm": _norm,
    "copy": _copy,
    "reduction": _reduction,
    "elementwise": _elementwise,
    "pooling": _pooling,
    "gather": _gather,
}
