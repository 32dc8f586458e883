"""Activations, poolings and means as kernels take them: as part of a layer's own call, or as a function with plain options.
Where they stand in a program is the business of `lowering.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchgraft.ir.node import Node
from torchgraft.ir.verify import find_attribute
from torchgraft.quantize.native.layers import PostOperation
from torchgraft.rewriting.meaning import Meaning, meaning_of_call
from torchgraft.rewriting.modules import meaning_of_module_call

_aten: Any = torch.ops.aten

# Functions of one value, by the names of operators; the rest of their arguments are plain numbers.
PLAIN: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(_aten, name)
    for name in (
        *("relu", "hardtanh", "hardswish", "silu", "gelu", "selu", "elu", "sigmoid", "tanh", "leaky_relu", "mish"),
        *("hardsigmoid", "softplus"),
    )
}


# What oneDNN calls activations that its kernels do; the second are done by those of linear layers only.
_BY_ALL = {"relu": "relu", "relu6": "hardtanh", "hardtanh": "hardtanh", "hardswish": "hardswish", "silu": "swish"}
_BY_LINEAR = {"gelu": "gelu", "tanh": "tanh", "leaky_relu": "leaky_relu"}
_BOUNDS = {"hardtanh": ("min_val", "max_val"), "leaky_relu": ("negative_slope",)}


def post_operation(node: Node, program: torch.nn.Module, dimensions: int) -> PostOperation | None:
    """What oneDNN calls an activation, where its kernel of a linear layer (no dimensions) or convolution does it."""
    meaning = _meaning(node, program)
    known = {} if dimensions > 2 else _BY_ALL if dimensions else {**_BY_ALL, **_BY_LINEAR}
    if not isinstance(meaning.key, str) or meaning.key not in known:
        return None
    name, given = meaning.key, meaning.arguments
    options = (0.0, 6.0) if name == "relu6" else tuple([float(given[option]) for option in _BOUNDS.get(name, ())])
    return PostOperation(known[name], options, given.get("approximate", "none") if name == "gelu" else "")


def options_of(node: Node, program: torch.nn.Module) -> tuple[Any, ...] | None:
    """The options of an activation in the order of its operator; None where they are not plain."""
    meaning = _meaning(node, program)
    if not isinstance(meaning.key, str):
        return None
    options = [value for name, value in meaning.arguments.items() if name not in ("self", "input")]
    if any(isinstance(value, Node) or not isinstance(value, (int, float, str, bool)) for value in options):
        return None
    if meaning.key == "gelu":  # whose one option goes by its name alone
        return () if options == ["none"] else None
    return tuple(options)


def pool_options(node: Node, program: torch.nn.Module) -> tuple[tuple[int, ...], ...] | None:
    """Kernel, stride, padding and dilation of a `max_pool2d`; None where it is another pooling or rounds up."""
    meaning = _meaning(node, program)
    given = meaning.arguments
    if isinstance(meaning.key, tuple) and meaning.key[0] == "function":
        given = {"stride": [], "padding": 0, "dilation": 1, "ceil_mode": False, **given}
    elif meaning.key != "max_pool2d":
        return None
    if given.get("ceil_mode") or given.get("return_indices") or "kernel_size" not in given:
        return None
    values = [given[name] for name in ("kernel_size", "stride", "padding", "dilation")]
    values[1] = values[1] or values[0]
    pairs = [tuple(value) if isinstance(value, (list, tuple)) else (value, value) for value in values]
    if not all(len(pair) == 2 and all(isinstance(item, int) for item in pair) for pair in pairs):
        return None
    return tuple(pairs)


def average_options(node: Node, program: torch.nn.Module) -> tuple[tuple[int, ...], bool] | None:
    """The dimensions that a mean goes over, and whether they stay; None where it is no mean of whole dimensions."""
    meaning = _meaning(node, program)
    given = meaning.arguments
    if meaning.key == "adaptive_avg_pool2d":
        size = given.get("output_size")
        return ((-2, -1), True) if size in (1, (1, 1), [1, 1]) else None
    if meaning.key != "mean" or given.get("dtype") is not None or "out" in given:
        return None
    dims = given.get("dim")
    dims = (dims,) if type(dims) is int else tuple(dims) if isinstance(dims, (list, tuple)) else ()
    keeps = given.get("keepdim", False)
    return (dims, keeps) if dims and all(type(dim) is int for dim in dims) and type(keeps) is bool else None


def _meaning(node: Node, program: torch.nn.Module) -> Meaning:
    if node.op == "call_module":
        return meaning_of_module_call(node, find_attribute(program, node.target)[0])
    return meaning_of_call(node)
