"""FLOPs of matrix products, convolutions, attention and recurrent layers, where a multiplication and an addition count as two.
Additions of a bias are left out, as torch's FlopCounterMode does, so that the two agree; everything else is in `elementwise.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import (
    flex_attention,
    flex_attention_backward,
)  # where torch's own counter finds them

from torchgraft.errors import GraftError

aten = torch.ops.aten


# ---- the table ----


Function = TypeVar("Function", bound=Callable[..., int])


@dataclass(frozen=True)
class Formula:
    """How to count one operator; `multiply_adds` says that its FLOPs come in pairs, one multiplication and one addition."""

    function: Callable[..., int]
    multiply_adds: bool = False


# Operators by name (all overloads) or overload; functions and module classes that a node calls.
FORMULAS: dict[Any, Formula] = {}


def flop_formula(*targets: Any, multiply_adds: bool = False) -> Callable[[Function], Function]:
    """Say how many FLOPs an operator does; usable as a decorator, and the last registration wins.

    A target is an operator (`torch.ops.mylib.foo`, or one overload of it), counted wherever it runs, or a function or module
    class, counted where a node calls it. The formula gets the arguments of the call, tensors as fakes, and its result as
    `result`; `multiply_adds` says that the FLOPs are multiply-adds, two each, so that they count as MACs too.

    >>> @flop_formula(torch.ops.aten.linalg_cross, multiply_adds=False)
    ... def cross(first, second, *rest, result, **options):
    ...     return 9 * result.numel() // 3
    """
    if not targets or not all(callable(target) for target in targets):
        raise GraftError(
            f"flop_formula needs the operators, functions or module classes that it is for, not {targets!r}; "
            "write @flop_formula(torch.ops.mylib.foo)"
        )

    def register(function: Function) -> Function:
        for target in targets:
            FORMULAS[target] = Formula(function, multiply_adds)
        return function

    return register


def formula_of_operator(func: Any) -> Formula | None:
    """The formula of an operator: of its overload, of its name, or of the name without the underscore of in-place forms."""
    found = FORMULAS.get(func)
    if found is not None or not isinstance(func, torch._ops.OpOverload):
        return found
    packet = func.overloadpacket
    found = FORMULAS.get(packet)
    name = packet.__name__
    if found is None and name.endswith("_") and not name.endswith("__"):
        found = FORMULAS.get(getattr(getattr(torch.ops, func.namespace), name[:-1], None))
    return found


def formula_of_call(op: str, target: Any) -> Formula | None:
    """The formula registered for what a node calls, where it is a function or the class of a module."""
    if op not in ("call_function", "call_module"):
        return None
    try:
        found = FORMULAS.get(target)
    except TypeError:  # not every callable can be a key
        return None
    is_operator = isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
    return None if is_operator else found


def operators(*names: str) -> list[Any]:
    """The operators of these names that this version of torch has."""
    return [getattr(aten, name) for name in names if hasattr(aten, name)]


# ---- products ----


_PACKED = operators("_weight_int8pack_mm", "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu")


@flop_formula(*operators("mm", "bmm", "mv", "linear", "_int_mm", "_scaled_mm"), *_PACKED, multiply_adds=True)
def product(first: Tensor, second: Tensor, *rest: Any, result: Tensor, **options: Any) -> int:
    return 2 * result.numel() * first.shape[-1]


@flop_formula(*operators("addmm", "baddbmm", "addmv", "_addmm_activation"), multiply_adds=True)
def added_product(bias: Tensor, first: Tensor, second: Tensor, *rest: Any, result: Tensor, **options: Any) -> int:
    return 2 * result.numel() * first.shape[-1]


@flop_formula(*operators("_grouped_mm", "_scaled_grouped_mm"), multiply_adds=True)
def grouped_product(first: Tensor, second: Tensor, *rest: Any, result: Tensor, **options: Any) -> int:
    """Each row, or each part of the inner dimension, belongs to one group."""
    if first.dim() == second.dim() == 2:
        return 2 * first.numel() * second.shape[-1]
    return 2 * result.numel() * first.shape[-1]


@flop_formula(aten.addbmm, multiply_adds=True)
def summed_product(bias: Tensor, first: Tensor, second: Tensor, *rest: Any, result: Tensor, **options: Any) -> int:
    return 2 * result.numel() * first.shape[0] * first.shape[-1]


@flop_formula(*operators("dot", "vdot"), multiply_adds=True)
def dot(first: Tensor, *rest: Any, result: Tensor, **options: Any) -> int:
    return 2 * first.numel()


@flop_formula(*operators("addr"), multiply_adds=True)
def outer(first: Tensor, *rest: Any, result: Tensor, **options: Any) -> int:
    return 2 * result.numel()


@flop_formula(*operators("_trilinear"))
def trilinear(first: Tensor, second: Tensor, third: Tensor, *expansions: Any, result: Tensor, **options: Any) -> int:
    size = max(first.dim() + len(expansions[0]), 1)
    operands = zip((first, second, third), expansions, strict=False)
    shapes = [_unsqueezed(tensor, dimensions, size) for tensor, dimensions in operands]
    return 3 * prod(max(sizes) for sizes in zip(*shapes, strict=True))


def _unsqueezed(tensor: Tensor, dimensions: Sequence[int], size: int) -> list[int]:
    sizes = iter(tensor.shape)
    return [1 if axis in dimensions else next(sizes) for axis in range(size)]


@flop_formula(*operators("_cdist_forward"))
def pairwise_distance(first: Tensor, *rest: Any, result: Tensor, **options: Any) -> int:
    return 3 * result.numel() * first.shape[-1]


# ---- convolutions ----


def convolution_work(x: Tensor, weight: Tensor, result: Sequence[int], transposed: bool) -> int:
    """Each weight is used once for each place of the output, or of the input where the convolution is transposed."""
    places = (x.shape if transposed else result)[2:]
    return 2 * int(x.shape[0]) * prod(places) * weight.numel()


_CONVOLUTIONS = operators("convolution", "_convolution", "cudnn_convolution", "convolution_overrideable")


@flop_formula(*_CONVOLUTIONS, *operators("_slow_conv2d_forward", "mkldnn_convolution"), multiply_adds=True)
def convolution(x: Tensor, weight: Tensor, *rest: Any, result: Any, **options: Any) -> int:
    result = result[0] if isinstance(result, tuple) else result
    transposed = rest[4] if len(rest) > 4 and isinstance(rest[4], bool) else options.get("transposed", False)
    return convolution_work(x, weight, result.shape, transposed)


@flop_formula(aten.convolution_backward, multiply_adds=True)
def convolution_gradient(gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any, result: Any, **options: Any) -> int:
    """The gradients of the input and of the weights do the work of the convolution once each.

    torch's FlopCounterMode counts the one of the weights as if there were a single group.
    """
    transposed, wanted = rest[4], rest[7] if len(rest) > 7 else options["output_mask"]
    return convolution_work(x, weight, gradient.shape, transposed) * (bool(wanted[0]) + bool(wanted[1]))


# ---- attention ----


def _attention_products(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[int, int]:
    """Multiply-adds of query with key and of scores with value; causal attention leaves out what lies in the future."""
    pairs = causal_pairs(int(query.shape[-2]), int(key.shape[-2])) if causal else query.shape[-2] * key.shape[-2]
    heads = prod(query.shape[:-2])
    return heads * pairs * query.shape[-1], heads * pairs * value.shape[-1]


def causal_pairs(queries: int, keys: int) -> int:
    """How many pairs of a query and a key there are where query i sees the keys up to i (torch aligns them at the start)."""
    if queries <= keys:
        return queries * (queries + 1) // 2
    return keys * (keys + 1) // 2 + (queries - keys) * keys


_ATTENTIONS = operators(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_ATTENTION_GRADIENTS = [gradient for name in _ATTENTIONS for gradient in operators(f"{name.__name__}_backward")]


@flop_formula(*_ATTENTIONS, multiply_adds=True)
def attention(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any, result: Any, causal: bool = False, **options: Any
) -> int:
    return 2 * sum(_attention_products(query, key, value, causal))


@flop_formula(*_ATTENTION_GRADIENTS, multiply_adds=True)
def attention_gradient(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, result: Any, causal: bool = False
) -> int:
    """Scores anew, then the gradients of scores and value, of query and of key."""
    scores, mixed = _attention_products(query, key, value, causal)
    return 2 * (scores + 2 * mixed + 2 * scores)


@flop_formula(flex_attention_backward, multiply_adds=True)
def flexible_attention_gradient(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any, result: Any, **options: Any
) -> int:
    return attention_gradient(query, query, key, value, result=result)


# What a mask function lets through is not known, so all pairs count.
flop_formula(flex_attention, multiply_adds=True)(attention)


def _layer_products(x: Tensor, weights: list[Any]) -> int:
    """The weights applied to each position, and attention between all positions, of a layer that is one operator."""
    batch, length, width = x.shape
    return 2 * (batch * length * sum(weight.numel() for weight in weights) + 2 * batch * length * length * width)


@flop_formula(*operators("_native_multi_head_attention"), multiply_adds=True)
def attention_layer(x: Tensor, key: Tensor, value: Tensor, *rest: Any, result: Any, **options: Any) -> int:
    return _layer_products(x, [rest[2], rest[4]])


@flop_formula(*operators("_transformer_encoder_layer_fwd"), multiply_adds=True)
def encoder_layer(x: Tensor, *rest: Any, result: Any, **options: Any) -> int:
    return _layer_products(x, [rest[2], rest[4], rest[13], rest[15]])


ATTENTION_OPERATORS = frozenset((*_ATTENTIONS, *_ATTENTION_GRADIENTS))


# ---- recurrent layers ----


@flop_formula(*operators("mkldnn_rnn_layer"), multiply_adds=True)
def recurrent_layer(x: Tensor, first: Tensor, second: Tensor, *rest: Any, result: Any, **options: Any) -> int:
    return 2 * x.shape[0] * x.shape[1] * (first.numel() + second.numel())


@flop_formula(*operators("mkldnn_rnn_layer_backward"), multiply_adds=True)
def recurrent_layer_gradient(x: Tensor, first: Tensor, second: Tensor, *rest: Any, result: Any, **options: Any) -> int:
    return 2 * recurrent_layer(x, first, second, result=result)
