"""Reading convolutions, linear layers and batch norms out of a program, whether they are modules or functions.
What is done with them is the business of the passes; nothing is edited here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torchgraft.ir.modules import has_hooks
from torchgraft.ir.node import Node
from torchgraft.ir.verify import find_attribute

_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
# (number of spatial dimensions, transposed)
_MODULES: dict[type, tuple[int, bool]] = {
    nn.Linear: (0, False),
    **{getattr(nn, f"Conv{number}d"): (number, False) for number in (1, 2, 3)},
    **{getattr(nn, f"ConvTranspose{number}d"): (number, True) for number in (1, 2, 3)},
}
LAYERS = tuple(_MODULES)
_FUNCTIONS: dict[Any, tuple[int, bool]] = {functional.linear: (0, False)}
for _number in (1, 2, 3):
    _FUNCTIONS[getattr(functional, f"conv{_number}d")] = (_number, False)
    _FUNCTIONS[getattr(functional, f"conv_transpose{_number}d")] = (_number, True)
_FUNCTIONS_OF_MODULES = {form: function for function, form in _FUNCTIONS.items()}
_aten = torch.ops.aten
# The operators themselves, as a program of ATen calls them, take the same arguments in the same order.
_FUNCTIONS |= {
    operator: (dimensions, False)
    for dimensions, packet in ((1, _aten.conv1d), (2, _aten.conv2d), (3, _aten.conv3d))
    for operator in (packet.default, packet.padding)
}
_FUNCTIONS |= {
    _aten.conv_transpose1d.default: (1, True),
    _aten.conv_transpose2d.input: (2, True),
    _aten.conv_transpose3d.input: (3, True),
    _aten.linear.default: (0, False),
}
_NORM_FUNCTIONS: dict[Any, tuple[str, ...]] = {
    functional.batch_norm: (
        *("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    ),
    torch.batch_norm: (
        *("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled"),
    ),
}
_NORM_FUNCTIONS[_aten.batch_norm.default] = _NORM_FUNCTIONS[torch.batch_norm]
_NORM_MODULES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_METADATA_METHODS = frozenset({"size", "dim", "ndimension", "numel", "nelement"})
_METADATA_ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "is_cuda", "layout"})


@dataclass
class Layer:
    """A call of a convolution (`dimensions` spatial ones) or of a linear layer (none)."""

    node: Node
    source: Node
    weight: torch.Tensor
    bias: torch.Tensor | None
    dimensions: int
    transposed: bool
    groups: int
    pads_with_zeros: bool
    module: nn.Module | None = None

    @property
    def kernel_is_one(self) -> bool:
        """Whether each place of the result is made of one place."""
        return all(size == 1 for size in self.weight.shape[2:])

    @property
    def outputs(self) -> int:
        """The number of channels that come out."""
        return self.weight.shape[1] * self.groups if self.transposed else self.weight.shape[0]

    @property
    def inputs(self) -> int:
        """The number of channels that go in."""
        return self.weight.shape[0] if self.transposed else self.weight.shape[1] * self.groups

    def as_function(self) -> tuple[Any, dict[str, Any]]:
        """The function that computes it, and the options that it is given beside weight and bias."""
        if self.module is not None:
            return function_of(self.module)
        names = layer_arguments(self.node)
        return self.node._target, {name: value for name, value in bound(self.node, names).items() if name in names[3:]}


@dataclass
class Norm:
    """A call of a batch norm that uses its running statistics."""

    node: Node
    source: Node
    mean: torch.Tensor
    variance: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    epsilon: float
    module: nn.Module | None = None

    def scale_and_shift(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm as `x * scale + shift`, in double precision."""
        scale = torch.rsqrt(self.variance.detach().double() + self.epsilon)
        if self.weight is not None:
            scale = scale * self.weight.detach().double()
        shift = -self.mean.detach().double() * scale
        if self.bias is not None:
            shift = shift + self.bias.detach().double()
        return scale, shift


def is_norm(node: Node, root: nn.Module) -> bool:
    """Whether a node calls a batch norm of any kind."""
    if node._op == "call_module":
        return isinstance(find_attribute(root, node._target)[0], nn.modules.batchnorm._BatchNorm)
    return node._op == "call_function" and _lookup(_NORM_FUNCTIONS, node._target) is not None


def is_layer(node: Node, root: nn.Module) -> bool:
    """Whether a node calls a convolution or linear layer of any kind."""
    if node._op == "call_module":
        module = find_attribute(root, node._target)[0]
        return isinstance(module, (nn.modules.conv._ConvNd, nn.Linear))
    return node._op == "call_function" and _lookup(_FUNCTIONS, node._target) is not None


def read_layer(node: Node, root: nn.Module) -> Layer | str:
    """A convolution or linear layer, or the reason why this one cannot be reckoned with."""
    if node._op == "call_module":
        layer = _layer_of_module(node, find_attribute(root, node._target)[0])
    else:
        layer = _layer_of_function(node, root)
    if isinstance(layer, Layer) and not layer.weight.is_floating_point():
        return f"its weights are of type {layer.weight.dtype}"
    return layer


def _layer_of_module(node: Node, module: Any) -> Layer | str:
    reason = _plain_module(module, _MODULES) or _one_input(node)
    if reason is not None:
        return reason
    padding, weight = getattr(module, "padding", 0), module.weight
    pads = getattr(module, "padding_mode", "zeros") == "zeros" and _is_padding(padding, weight)
    groups = getattr(module, "groups", 1)
    return Layer(node, node._inputs[0], weight, module.bias, *_MODULES[type(module)], groups, pads, module)


def _layer_of_function(node: Node, root: nn.Module) -> Layer | str:
    if _lookup(_FUNCTIONS, node._target) is None:
        return "it is no convolution"
    names = layer_arguments(node)
    arguments = bound(node, names)
    weight = parameter_of(arguments.get("weight"), root)
    bias = parameter_of(arguments.get("bias"), root)
    if weight is None or (bias is None and arguments.get("bias") is not None):
        return "its weights are computed by the program"
    source = arguments["input"]
    if not isinstance(source, Node) or any(isinstance(arguments.get(name), Node) for name in names[3:]):
        return "its options are computed by the program"
    pads, groups = _is_padding(arguments.get("padding", 0), weight), arguments.get("groups", 1)
    return Layer(node, source, weight, bias, *_FUNCTIONS[node._target], groups, pads)


def read_norm(node: Node, root: nn.Module) -> Norm | str:
    """A batch norm that does the same to every batch, or the reason why this one does not."""
    if node._op == "call_module":
        module: Any = find_attribute(root, node._target)[0]
        if module.training:
            return "it is in training mode and normalises by the statistics of the batch; call .eval() first"
        reason = _plain_module(module, _NORM_MODULES) or _one_input(node)
        if reason is not None:
            return reason
        if module.running_mean is None or module.running_var is None:
            return "it keeps no running statistics and normalises by those of the batch"
        state = (module.running_mean, module.running_var, module.weight, module.bias)
        return Norm(node, node._inputs[0], *state, module.eps, module)
    arguments = bound(node, norm_arguments(node))
    training = arguments.get("training", False)
    if isinstance(training, Node):
        training = find_attribute(root, training._target)[0] if training._op == "get_attr" else None
    if training is not False:
        return (
            "it is in training mode and normalises by the statistics of the batch; capture the model in evaluation mode"
        )
    names = ("running_mean", "running_var", "weight", "bias")
    nodes = [arguments.get(name) for name in names]
    tensors = [parameter_of(item, root) for item in nodes]
    if not isinstance(arguments["input"], Node) or any(
        a is not None and b is None for a, b in zip(nodes, tensors, strict=True)
    ):
        return "its statistics are computed by the program"
    mean, variance, weight, bias = tensors
    if mean is None or variance is None:
        return "it keeps no running statistics and normalises by those of the batch"
    return Norm(node, arguments["input"], mean, variance, weight, bias, arguments.get("eps", 1e-5))


def bound(node: Node, names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    return {**dict(zip(names, node._args, strict=False)), **node._kwargs}


def layer_arguments(node: Node) -> tuple[str, ...]:
    """The names of the arguments of a convolution or linear function, in order."""
    return _argument_names(*_FUNCTIONS[node._target])


def _argument_names(dimensions: int, transposed: bool) -> tuple[str, ...]:
    return ("input", "weight", "bias") if dimensions == 0 else _TRANSPOSED if transposed else _CONVOLUTION


def function_of(module: nn.Module) -> tuple[Any, dict[str, Any]]:
    """The function that a convolution or linear layer calls, and the options that it gives beside weight and bias.

    >>> function_of(nn.ConvTranspose1d(2, 2, 3, stride=2))
    (<built-in method conv_transpose1d of type object at ...>,
     {'stride': (2,), 'padding': (0,), 'output_padding': (0,), 'groups': 1, 'dilation': (1,)})
    """
    form = _MODULES[type(module)]
    return _FUNCTIONS_OF_MODULES[form], {name: getattr(module, name) for name in _argument_names(*form)[3:]}


def norm_arguments(node: Node) -> tuple[str, ...]:
    """The names of the arguments of a batch norm function, in order."""
    return _NORM_FUNCTIONS[node._target]


def uses_of_values(node: Node) -> list[Node]:
    """The users that look at the elements of a value, and not only at its shape or type."""
    return [user for user in node._users if not is_metadata_read(user)]


def is_metadata_read(node: Node) -> bool:
    """Whether a node asks for the shape, type or device of a tensor, and so cannot tell two tensors alike apart."""
    if node._op == "call_method":
        return node._target in _METADATA_METHODS
    return node._op == "call_function" and node._target is getattr and node._args[1] in _METADATA_ATTRIBUTES


def weights_of_calls(nodes: Iterator[Node] | Any, root: nn.Module) -> dict[int, int]:
    """How often each weight and each running mean is used by a layer or norm, by the identity of the tensor."""
    result: dict[int, int] = {}
    for node in nodes:
        if node._op == "call_module":
            module = find_attribute(root, node._target)[0]
            tensor = getattr(module, "running_mean", None) if is_norm(node, root) else getattr(module, "weight", None)
        elif node._op == "call_function" and (is_norm(node, root) or is_layer(node, root)):
            names = _lookup(_NORM_FUNCTIONS, node._target)
            key = "weight" if names is None else "running_mean"
            tensor = parameter_of(bound(node, names or layer_arguments(node)).get(key), root)
        else:
            continue
        if isinstance(tensor, torch.Tensor):
            result[id(tensor)] = result.get(id(tensor), 0) + 1
    return result


def parameter_of(value: Any, root: nn.Module) -> torch.Tensor | None:
    """The tensor that a get_attr node fetches."""
    if not isinstance(value, Node) or value._op != "get_attr":
        return None
    tensor = find_attribute(root, value._target)[0]
    return tensor if isinstance(tensor, torch.Tensor) else None


def _plain_module(module: Any, classes: Any) -> str | None:
    if type(module) not in classes:
        return f"it is a {type(module).__name__}, which may compute something else"
    if has_hooks(module):
        return "it has hooks, which would see other values"
    if "forward" in module.__dict__ or "parametrizations" in module._modules:
        return "its forward or its weights were replaced"
    return None


def _one_input(node: Node) -> str | None:
    is_plain = len(node._args) + len(node._kwargs) == 1 and len(node._inputs) == 1
    return None if is_plain else "it is called with more than its input"


def _is_padding(padding: Any, weight: torch.Tensor) -> bool:
    if padding == "same":
        return any(size != 1 for size in weight.shape[2:])
    if isinstance(padding, str):
        return padding != "valid"
    return any(padding) if isinstance(padding, (tuple, list)) else bool(padding)


def _lookup(table: dict[Any, Any], target: Any) -> Any:
    try:
        return table.get(target)
    except TypeError:  # a callable object that cannot be a key
        return None
