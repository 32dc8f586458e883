"""What calls mean to quantization: which hand integers on, which add or join values, which are activations.
Calls are told by their meaning, so functions, methods, modules and ATen operators are all one.
"""

from __future__ import annotations

from typing import Any

import torch

from torchgraft.ir.node import Node
from torchgraft.ir.verify import find_attribute
from torchgraft.passes.layer_calls import is_metadata_read
from torchgraft.rewriting.meaning import coarse_key
from torchgraft.rewriting.modules import coarse_key_of_module

# What only moves or selects elements gives the same on steps as on numbers.
MOVES = frozenset(
    {"view", "reshape", "flatten", "unflatten", "permute", "transpose", "t", "contiguous", "squeeze", "unsqueeze", "movedim"}
    | {"expand", "repeat", "clone", "detach", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "flip", "roll", "narrow"}
    | {"select", "slice", "alias", "_unsafe_view", "repeat_interleave", "dropout", "feature_dropout", "identity", "view_as"}
    | {"reshape_as", "expand_as", "mT", "type_as", "lift_fresh", "swapaxes"}
)  # fmt: skip
SELECTS = frozenset({"max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d", "amax"})
AVERAGES = frozenset(
    {
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "adaptive_avg_pool1d",
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
        "mean",
    }
)
ACTIVATIONS = frozenset(
    {"relu", "relu6", "hardtanh", "hardswish", "silu", "gelu", "selu", "elu", "sigmoid", "tanh", "leaky_relu", "mish"}
    | {"hardsigmoid", "softplus", "logsigmoid", "celu", "clamp", "clamp_min"}
)  # fmt: skip
# Calls that multiply, or hold weights, and have no integer form; recurrent layers and attention are one call of torch's.
PRODUCTS = frozenset(
    {"matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention", "embedding", "embedding_bag"}
    | {"bilinear", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}
    | {"multi_head_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd"}
)
_WHOLE = (torch.nn.RNNBase, torch.nn.RNNCellBase, torch.nn.MultiheadAttention)


def operation(node: Node, root: torch.nn.Module) -> str:
    """The name of the operator that a call means; empty where it means nothing but itself.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(torch.nn.Sequential(torch.nn.MaxPool2d(2), torch.nn.SELU()))
    >>> [operation(node, program) for node in program.graph.nodes][1:3]
    ['max_pool2d', 'selu']
    """
    if node.op == "call_module":
        module = find_attribute(root, node.target)[0]
        if isinstance(module, torch.nn.Identity):
            return "identity"
        key: Any = coarse_key_of_module(module)
    elif node.op in ("call_function", "call_method"):
        key = coarse_key(node)
    else:
        return ""
    return key if isinstance(key, str) else ""


def product(node: Node, root: torch.nn.Module) -> str:
    """The name of a call that multiplies, or holds weights, and has no integer form; empty for others.

    >>> import torchgraft
    >>> program = torchgraft.capture(torch.nn.LSTM(2, 2), torch.ones(1, 2), level="function")
    >>> [name for node in program.graph.nodes if (name := product(node, program))]
    ['lstm']
    """
    if node.op == "call_module":
        module = find_attribute(root, node.target)[0]
        if isinstance(module, _WHOLE):
            return type(module).__name__
    name = operation(node, root) or str(getattr(node.target, "__name__", ""))
    return name if name in PRODUCTS else ""


def is_sum(node: Node, root: torch.nn.Module) -> bool:
    """Whether a call adds two values that the program computes."""
    return operation(node, root) == "add" and len(node.args) == 2 and all(isinstance(item, Node) for item in node.args)


def parts_of_join(node: Node) -> list[Node]:
    """The values that a concatenation joins; empty where they are not listed in the call."""
    listed = node.args[0] if node.args else node.kwargs.get("tensors")
    if not isinstance(listed, (list, tuple)) or not all(isinstance(item, Node) for item in listed):
        return []
    return list(listed)


def first_input(node: Node) -> Node | None:
    """The value that a call of one value works on."""
    value = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
    return value if isinstance(value, Node) else None


def real_users(node: Node) -> list[Node]:
    """The users that look at elements, and not only at the shape or the type."""
    return [user for user in node._users if not is_metadata_read(user) and not _asks_type(user, node)]


def is_shape_read(node: Node) -> bool:
    """Whether a call only asks for sizes, which are the same before and after an activation, a sum or a change of type."""
    asked = node.args[1] if node.target is getattr else node.target
    return is_metadata_read(node) and asked in ("size", "dim", "ndimension", "numel", "nelement", "shape", "ndim")


def _asks_type(user: Node, node: Node) -> bool:
    is_call = user.op in ("call_function", "call_method")
    return is_call and coarse_key(user) == "type_as" and user.args[0] is not node
