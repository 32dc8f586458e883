"""Operators and modules of torch that always return new memory, although nothing in their schemas binds them to it, and
modules that do nothing else. The rest is answered by `analysis/effects`; a name missing here costs time, never a result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torchgraft.passes.layer_calls import LAYERS

_FUNCTION_NAMES = (
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear", "bilinear"),
    *(
        "batch_norm",
        "layer_norm",
        "group_norm",
        "instance_norm",
        "rms_norm",
        "softmax",
        "log_softmax",
        "matmul",
        "square",
    ),
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "adaptive_avg_pool1d", "adaptive_avg_pool2d"),
    *(
        "adaptive_avg_pool3d",
        "scaled_dot_product_attention",
        "cross_entropy",
        "cosine_similarity",
        "outer",
        "embedding",
    ),
)
FUNCTIONS: frozenset[Any] = frozenset(
    getattr(home, name) for home in (torch, functional) for name in _FUNCTION_NAMES if hasattr(home, name)
)
METHODS = frozenset({"softmax", "log_softmax", "matmul", "square", "outer"})
MODULES: frozenset[type] = frozenset(
    {*LAYERS, nn.Bilinear}
    | {
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
        nn.GroupNorm,
        nn.LayerNorm,
        nn.RMSNorm,
        nn.Softmax,
        nn.LogSoftmax,
    }
    | {nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.Embedding}
    | {nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d}
)


def returns_new_memory(op: str, target: Any) -> bool:
    """Whether a call of a function or method surely returns memory of its own."""
    return target in (METHODS if op == "call_method" else FUNCTIONS)


def makes_new_memory(module: Any) -> bool:
    """Whether calling a module surely returns memory of its own."""
    if type(module) not in MODULES:
        return False
    attributes = module.__dict__
    hooks = attributes["_forward_hooks"] or attributes["_forward_pre_hooks"] or _global_hooks()
    return not hooks and "forward" not in attributes


def is_plain_module(module: Any) -> bool:
    """Whether calling a module surely does no more than to compute a tensor in memory of its own."""
    if not makes_new_memory(module):
        return False
    is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return not (is_norm and module.training) and module.__dict__.get("max_norm") is None


def _global_hooks() -> bool:
    inner = nn.modules.module
    return bool(inner._global_forward_hooks or inner._global_forward_pre_hooks)
