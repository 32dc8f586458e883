"""FLOPs of everything that is no matrix product: pointwise operators, reductions, norms, softmax, pooling, sorting, transforms.
An addition, multiplication, division, comparison, root, exponential or other basic function of one element counts one; moving,
filling, selecting and converting count none.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2, prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchgraft.analysis.cost.formulas import (
    ATTENTION_OPERATORS,
    FORMULAS,
    Formula,
    flop_formula,
    formula_of_operator,
    operators,
)

_REDUCTION = getattr(torch.Tag, "reduction", None)

# No arithmetic: the result holds elements that were there before, or constants.
_MOVES = """
    alias arange as_strided_scatter _assert_async _assert_scalar _assert_tensor_metadata block_diag cat channel_shuffle
    _chunk_cat clone complex constant_pad_nd copy copy_ detach diag_embed diagonal_backward diagonal_scatter embedding
    empty empty_like empty_permuted empty_strided eye fill fill_ flip full full_like _functional_assert_async gather
    im2col index index_copy_ index_fill index_fill_ index_put index_put_ index_select is_same_size lift lift_fresh
    linspace _local_scalar_dense masked_fill masked_fill_ masked_scatter masked_scatter_ masked_scatter_backward
    masked_select max_unpool2d max_unpool3d new_empty new_empty_strided new_full new_ones new_zeros nonzero
    nonzero_static one_hot ones ones_like _pack_padded_sequence _pin_memory pixel_shuffle pixel_unshuffle
    reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d
    replication_pad3d resize resize_ resize_as roll rot90 scalar_tensor scatter scatter_ select_backward select_scatter
    set_ slice_backward slice_scatter stack sym_constrain_range sym_constrain_range_for_size take _to_dense tril tril_
    tril_indices triu triu_ triu_indices _unsafe_index _unsafe_index_put _unsafe_masked_index unsafe_split
    unsafe_split_with_sizes _unsafe_view upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d value_selecting_reduction_backward
    where zero zero_ zeros zeros_like
"""
MOVES = frozenset(_MOVES.split())

# Operators that are several basic ones when written out, for each element that goes in. Softmax: maximum, difference,
# exponential, sum, division (or difference). A norm by known statistics is a scale and a shift; what those take is said below.
_COUNTS = {
    1: "rsub _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d "
    "fractional_max_pool3d",
    2: "floor_divide leaky_relu_backward _prelu_kernel _add_relu native_dropout_backward _batch_norm_no_update "
    "_native_batch_norm_legit_no_training",
    3: "addcmul addcdiv lerp sigmoid_backward tanh_backward softplus elu elu_backward hardsigmoid_backward logit mse_loss "
    "mse_loss_backward dist hardtanh_backward native_dropout",
    4: "polar sigmoid softplus_backward hardsigmoid log_sigmoid_forward soft_margin_loss _prelu_kernel_backward "
    "_softmax_backward_data _log_softmax_backward_data var std var_mean std_mean",
    5: "silu gelu hardswish hardswish_backward glu log_sigmoid_backward smooth_l1_loss smooth_l1_loss_backward huber_loss "
    "huber_loss_backward binary_cross_entropy_backward _softmax _log_softmax _safe_softmax",
    6: "mish native_group_norm _batch_norm_with_update _batch_norm_with_update_functional",
    7: "binary_cross_entropy",
    8: "binary_cross_entropy_with_logits",
    9: "silu_backward glu_backward",
    10: "gelu_backward",
    12: "mish_backward",
}
_PER_ELEMENT = {name: count for count, names in _COUNTS.items() for name in names.split()}
_GROWS_WITH_RESULT = frozenset({"native_dropout", "glu_backward", "glu"})

# One for each element that goes in.
_REDUCTIONS = """
    sum nansum mean prod amax amin aminmax max min argmax argmin any all count_nonzero norm linalg_vector_norm
    logsumexp cumsum cumprod cummax cummin logcumsumexp median mode nll_loss_forward nll_loss2d_forward
    nll_loss_backward nll_loss2d_backward embedding_dense_backward scatter_add scatter_add_ scatter_reduce
    scatter_reduce_ index_add index_add_ bincount trace _foreach_norm equal isin index_reduce histc col2im
    unfold_backward nanmedian reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
"""


def work_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, causal_aware: bool = True
) -> tuple[int, int] | None:
    """FLOPs and MACs of one call of an operator, or None where nothing is known about it.

    >>> x = torch.ones(2, 3)
    >>> work_of(torch.ops.aten.mm.default, (x, x.T), {}, x @ x.T)
    (24, 12)
    """
    formula = formula_of_operator(func)
    if formula is not None:
        if getattr(func, "overloadpacket", None) in ATTENTION_OPERATORS:
            kwargs = {"causal": causal_aware and _is_causal(func, args, kwargs)}
        return counted(formula, args, kwargs, result)
    if is_view(func):
        return 0, 0
    packet = getattr(func, "overloadpacket", func)
    name = getattr(packet, "__name__", str(func))
    if getattr(func, "namespace", "") == "aten" and (name in MOVES or name.endswith(("_like", "_copy"))):
        return (elements(result), 0) if name.startswith("rand") else (0, 0)
    tags = _tags(func, name)
    if torch.Tag.pointwise in tags or name.startswith("_foreach_"):
        return elements(result) or elements(args[:1]), 0
    if _REDUCTION is not None and _REDUCTION in tags:
        return elements(args[:1]), 0
    if torch.Tag.nondeterministic_seeded in tags and getattr(func, "namespace", "") == "aten":
        return elements(result), 0
    return None


def _tags(func: Any, name: str) -> set[Any]:
    """The tags of an operator, with those of the one that it is the in-place form of."""
    found = set(getattr(func, "tags", ()))
    if name.endswith("_") and not name.endswith("__") and isinstance(func, torch._ops.OpOverload):
        packet = getattr(getattr(torch.ops, func.namespace), name[:-1], None)
        for overload in () if packet is None else packet.overloads():
            found |= set(getattr(packet, overload).tags)
    return found


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal", False))


def counted(formula: Formula, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """FLOPs and MACs by a formula."""
    flops = int(formula.function(*args, result=result, **kwargs))
    return flops, flops // 2 if formula.multiply_adds else 0


def is_view(func: Any) -> bool:
    """Whether an operator hands out memory of an argument without writing it."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    if torch.Tag.inplace_view in func.tags:  # the argument itself becomes the view
        return True
    marks = [item.alias_info for item in schema.returns if item.alias_info is not None]
    return bool(marks) and not schema.is_mutable


def elements(tree: Any) -> int:
    """How many elements the tensors of a tree have."""
    return sum(leaf.numel() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def _times(count: int, of_result: bool) -> Callable[..., int]:
    def formula(*args: Any, result: Any, **options: Any) -> int:
        largest = result[0] if of_result and isinstance(result, (tuple, list)) else result if of_result else args[0]
        return count * elements(largest)

    return formula


for _name, _count in _PER_ELEMENT.items():
    for _operator in operators(_name):
        # A loss that is reduced has one result; what goes in says how much was done.
        FORMULAS[_operator] = Formula(_times(_count, of_result=_name in _GROWS_WITH_RESULT))
for _operator in operators(*_REDUCTIONS.split()):
    FORMULAS[_operator] = Formula(_times(1, of_result=False))


# ---- norms ----

# Mean: one addition. Variance: difference, square, addition. Then a scale and a shift, and those of an affine norm.
_STATISTICS, _SCALING, _AFFINE = 4, 2, 2


@flop_formula(*operators("native_layer_norm"))
def layer_norm(x: Tensor, shape: Any, weight: Tensor | None, *rest: Any, result: Any, **options: Any) -> int:
    return x.numel() * (_STATISTICS + _SCALING + (_AFFINE if weight is not None else 0))


@flop_formula(*operators("_fused_rms_norm"))
def rms_norm(x: Tensor, shape: Any, weight: Tensor | None, *rest: Any, result: Any, **options: Any) -> int:
    return x.numel() * (3 + (1 if weight is not None else 0))


@flop_formula(
    *operators("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
    *operators("cudnn_batch_norm", "miopen_batch_norm"),
)
def batch_norm(x: Tensor, *rest: Any, result: Any, **options: Any) -> int:
    """In evaluation scale and shift are made once a channel, so two for each element are left."""
    training = next((value for value in rest if isinstance(value, bool)), True)
    return x.numel() * (_SCALING + (_STATISTICS if training else 0))


@flop_formula(
    *operators("native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward"),
    *operators("cudnn_batch_norm_backward", "miopen_batch_norm_backward", "batch_norm_backward"),
    *operators("_fused_rms_norm_backward"),
)
def norm_gradient(first: Tensor, *rest: Any, result: Any, **options: Any) -> int:
    """The normalised input (2), its sums with the gradient (3), the gradient of the input (5) and of the weights (3)."""
    wanted = next((value for value in reversed(rest) if isinstance(value, (list, tuple))), (True, True, True))
    weights = len(wanted) > 1 and bool(wanted[1])
    return first.numel() * ((10 if wanted[0] else 0) + (3 if weights else 0))


# ---- pooling and resampling ----


@flop_formula(
    *operators(
        "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "avg_pool1d", "max_pool1d"
    )
)
def pooling(x: Tensor, kernel: Any, *rest: Any, result: Any, **options: Any) -> int:
    pooled = result[0] if isinstance(result, (tuple, list)) else result
    spatial = pooled.dim() - 2 if pooled.dim() > 2 else 1
    window = prod(kernel) if len(kernel) > 1 else kernel[0] ** spatial
    return pooled.numel() * int(window)


@flop_formula(
    *operators(*[f"max_pool{d}d_with_indices_backward" for d in (2, 3)], *[f"avg_pool{d}d_backward" for d in (2, 3)]),
    *operators(*[f"_adaptive_avg_pool{d}d_backward" for d in (2, 3)]),
    *operators(*[f"adaptive_max_pool{d}d_backward" for d in (2, 3)]),
    *operators(*[f"upsample_nearest{d}d_backward" for d in (1, 2, 3)]),
)
def pooling_gradient(gradient: Tensor, *rest: Any, result: Any, **options: Any) -> int:
    return max(gradient.numel(), elements(result))


def _weighted_sum(neighbours: int) -> Callable[..., int]:
    def formula(x: Tensor, *rest: Any, result: Any, **options: Any) -> int:
        return (2 * neighbours - 1) * max(elements(result), x.numel())

    return formula


_NEIGHBOURS = {
    "upsample_linear1d": 2, "upsample_bilinear2d": 4, "_upsample_bilinear2d_aa": 4, "upsample_trilinear3d": 8,
    "upsample_bicubic2d": 16, "_upsample_bicubic2d_aa": 16, "grid_sampler_2d": 4, "grid_sampler_3d": 8,
}  # fmt: skip
for _name, _count in _NEIGHBOURS.items():
    for _operator in operators(_name, f"{_name}_backward"):
        FORMULAS[_operator] = Formula(_weighted_sum(_count))


# ---- sorting, transforms, sums of rows ----


@flop_formula(
    *operators("sort", "topk", "kthvalue", "argsort", "_unique2", "unique_dim", "unique_consecutive", "searchsorted")
)
def sorting(x: Tensor, *rest: Any, result: Any, **options: Any) -> int:
    """Comparisons, as many as sorting the whole takes."""
    return x.numel() * max(ceil(log2(max(x.numel(), 2))), 1)


@flop_formula(*operators("_fft_c2c", "_fft_r2c", "_fft_c2r"))
def fourier(x: Tensor, dimensions: Any, *rest: Any, result: Tensor, **options: Any) -> int:
    """5 n log2 n for complex numbers, half of it where one side is real."""
    larger = x if x.numel() >= result.numel() else result
    points = prod(larger.shape[dimension] for dimension in dimensions)
    both_complex = x.is_complex() and result.is_complex()
    return int((5 if both_complex else 2.5) * larger.numel() * log2(max(points, 2)))


@flop_formula(*operators("_embedding_bag", "_embedding_bag_forward_only"))
def summed_rows(weight: Tensor, indices: Tensor, *rest: Any, result: Any, **options: Any) -> int:
    return indices.numel() * weight.shape[-1]
