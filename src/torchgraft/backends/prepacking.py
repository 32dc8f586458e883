"""Convolutions with the kernels that torch ships for CPUs and GPUs: weights packed once, with the sum and the activation that
follow computed in the same pass over memory. Linear layers are in `packed_linears.py`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from torchgraft.analysis.aliases import Aliases
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.copying import inherit_origin
from torchgraft.ir.node import Node
from torchgraft.passes.attributes import References
from torchgraft.passes.layer_calls import Layer, bound, is_layer, layer_arguments, read_layer, uses_of_values

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_SUMS = frozenset({operator.add, operator.iadd, torch.add})
# An activation as oneDNN takes it: its name, its numbers, its algorithm.
Activation = tuple[str, list[Any], str]
no_activation: Activation = ("none", [], "")
_nn = torch._C._nn
_BY_FUNCTION: dict[Any, Activation] = {
    **dict.fromkeys((torch.relu, torch.relu_, functional.relu), ("relu", [], "")),
    **dict.fromkeys((torch.sigmoid, torch.sigmoid_, functional.sigmoid), ("sigmoid", [], "")),
    **dict.fromkeys((torch.tanh, torch.tanh_, functional.tanh), ("tanh", [], "")),
    **dict.fromkeys((functional.silu, _nn.silu, _nn.silu_), ("swish", [], "")),
    **dict.fromkeys((functional.hardswish, _nn.hardswish, _nn.hardswish_), ("hardswish", [], "")),
    **dict.fromkeys((functional.hardsigmoid, _nn.hardsigmoid, _nn.hardsigmoid_), ("hardsigmoid", [], "")),
    functional.relu6: ("hardtanh", [0.0, 6.0], ""),
}
_BY_METHOD = {
    "relu": "relu",
    "relu_": "relu",
    "sigmoid": "sigmoid",
    "sigmoid_": "sigmoid",
    "tanh": "tanh",
    "tanh_": "tanh",
}


def convolution_and_sum(
    x: Any, other: Any, weight: Any, bias: Any, padding: Any, stride: Any, dilation: Any, groups: int, activation: Any
) -> Any:
    """A convolution, the sum with another tensor, and an activation; the sum may broadcast."""
    name, numbers, algorithm = activation
    if other.shape[0] != x.shape[0]:
        return _one_by_one(x, other, weight, bias, padding, stride, dilation, groups, activation)
    try:
        result = _CONVOLUTION_SUM(
            x,
            other,
            weight,
            bias,
            padding,
            stride,
            dilation,
            groups,
            "add",
            1.0,
            name if name != "none" else None,
            numbers,
            algorithm,
        )
    except RuntimeError:  # torch 2.11, where the result would have to be broadcast
        return _one_by_one(x, other, weight, bias, padding, stride, dilation, groups, activation)
    if other.shape != result.shape:  # the kernel would broadcast the other tensor alone, and take what it finds
        return _one_by_one(x, other, weight, bias, padding, stride, dilation, groups, activation)
    return result


def _one_by_one(x: Any, other: Any, *rest: Any) -> Any:
    *options, activation = rest
    plain = _CONVOLUTION(x, *options, *no_activation) + other
    return plain.relu_() if activation[0] == "relu" else plain


_CONVOLUTION: Any = None
_CONVOLUTION_SUM: Any = None
if torch.backends.mkldnn.is_available():
    _CONVOLUTION = torch.ops.mkldnn._convolution_pointwise.default
    _CONVOLUTION_SUM = torch.ops.mkldnn._convolution_pointwise.binary


def prepack(packer: Packer) -> int:
    """Put packed layers in the place of convolutions; how many there are."""
    with torch.no_grad():
        nodes = [node for node in packer.graph.nodes if is_layer(node, packer.body)]
        return sum([packer.convolution(node) for node in nodes])


def channels_last_weights(body: GraphModule) -> int:
    """Lay out the weights of convolutions of images with their channels last; how many there are. What torch computes with them
    has its channels last, too."""
    references, changed = References(body), 0
    for node in list(body.graph.nodes):
        layer = read_layer(node, body) if is_layer(node, body) else None
        if not isinstance(layer, Layer) or layer.dimensions != 2 or layer.module is not None:
            continue
        weight = bound(node, layer_arguments(node))["weight"]
        path = references.free_name(f"{node._name}_weight")
        body.register_buffer(
            path, layer.weight.detach().contiguous(memory_format=torch.channels_last), persistent=False
        )
        with body.graph.inserting_before(node):
            fetched = body.graph.create_node("get_attr", path)
        node.replace_input_with(weight, fetched)
        changed += 1
    return changed


@dataclass
class _Chain:
    """A layer and what follows it alone: perhaps a sum with another value, perhaps an activation."""

    nodes: list[Node]
    other: Node | None
    activation: Activation


class Packer:
    """Puts packed layers into a program, together with what follows them. It is made before the first edit, because nobody knows
    what calls of ours write."""

    def __init__(self, body: GraphModule, shapes: Any) -> None:
        self.body, self.graph, self.shapes = body, body.graph, shapes
        self.memory = Aliases(body.graph)
        self.references = References(body)

    def convolution(self, node: Node) -> bool:
        """Pack one, where that can be done."""
        layer = read_layer(node, self.body)
        if not isinstance(layer, Layer) or layer.dimensions != 2 or layer.transposed or not self.is_plain(layer):
            return False
        if not (layer.weight.is_cuda or (layer.weight.device.type == "cpu" and _CONVOLUTION is not None)):
            return False
        arguments = bound(node, layer_arguments(node)) if layer.module is None else vars(layer.module)
        options = [
            _pair(arguments.get(name, default)) for name, default in (("padding", 0), ("stride", 1), ("dilation", 1))
        ]
        shape = getattr(self.shapes.get(layer.source._name), "shape", None)
        if any(option is None for option in options) or shape is None or len(shape) != 4:
            return False
        chain = self.chain(node, only_relu=layer.weight.is_cuda)
        with self.graph.inserting_before(chain.nodes[-1]):
            calls = self._on_gpu if layer.weight.is_cuda else self._on_cpu
            new = calls(layer, chain, options, list(shape))
        self.replace(chain, new)
        return True

    def _on_cpu(self, layer: Layer, chain: _Chain, options: list[Any], shape: list[int]) -> Node:
        padding, stride, dilation = options
        packed = torch.ops.mkldnn._reorder_convolution_weight(
            layer.weight.detach(), padding, stride, dilation, layer.groups, shape
        )
        weight = self.constant(f"{layer.node._name}_packed", packed)
        bias = None if layer.bias is None else self.constant(f"{layer.node._name}_bias", layer.bias.detach())
        common = (weight, bias, padding, stride, dilation, layer.groups)
        if chain.other is None:
            return self.graph.call_function(_CONVOLUTION, (layer.source, *common, *chain.activation))
        return self.graph.call_function(convolution_and_sum, (layer.source, chain.other, *common, chain.activation))

    def _on_gpu(self, layer: Layer, chain: _Chain, options: list[Any], shape: list[int]) -> Node:
        padding, stride, dilation = options
        channels_last = layer.weight.detach().contiguous(memory_format=torch.channels_last)
        weight = self.constant(f"{layer.node._name}_weight", channels_last)
        values = layer.bias.detach() if layer.bias is not None else layer.weight.new_zeros(layer.outputs)
        if chain.activation[0] == "none":
            bias = None if layer.bias is None else self.constant(f"{layer.node._name}_bias", values)
            return self.graph.call_function(
                torch.conv2d, (layer.source, weight, bias, stride, padding, dilation, layer.groups)
            )
        common = (self.constant(f"{layer.node._name}_bias", values), stride, padding, dilation, layer.groups)
        if chain.other is None:
            return self.graph.call_function(torch.cudnn_convolution_relu, (layer.source, weight, *common))
        return self.graph.call_function(
            torch.cudnn_convolution_add_relu, (layer.source, weight, chain.other, 1.0, *common)
        )

    def is_plain(self, layer: Layer) -> bool:
        """Whether a layer computes with ordinary tensors of one dtype."""
        return (
            layer.weight.dtype in _TYPES
            and type(layer.weight) in (torch.Tensor, torch.nn.Parameter)
            and (layer.bias is None or layer.bias.dtype == layer.weight.dtype)
            and not self.memory.is_in(layer.node, torch.autocast)
        )

    def constant(self, name: str, value: torch.Tensor) -> Node:
        """A tensor that the program keeps."""
        path = self.references.free_name(name)
        self.body.register_buffer(path, value, persistent=False)
        return self.graph.create_node("get_attr", path)

    # ---- what follows a layer ----

    def chain(self, node: Node, only_relu: bool = False, both: bool = True) -> _Chain:
        """A layer and what its kernel can compute, too: a sum, an activation, or `both`."""
        chain = _Chain([node], None, no_activation)
        follower = self._follower(node)
        other = None if follower is None else self._other(follower, node)
        if follower is not None and other is not None and self._may_wait(node, follower):
            chain.nodes.append(follower)
            chain.other = other
            follower = self._follower(follower)
        activation = None if follower is None or (chain.other and not both) else activation_of(follower)
        if follower is not None and activation is not None and self._may_wait(node, follower):
            if activation[0] == "relu" or not (only_relu or chain.other):
                chain.nodes.append(follower)
                chain.activation = activation
        if only_relu and chain.activation is no_activation:  # cuDNN has no kernel for a sum alone
            return _Chain([node], None, no_activation)
        return chain

    def _follower(self, node: Node) -> Node | None:
        """The one node that uses a value, in the same region."""
        users = uses_of_values(node)
        if len(users) != 1 or self.memory.region.get(users[0]) is not self.memory.region.get(node):
            return None
        return None if users[0]._op == "output" else users[0]

    def _other(self, node: Node, value: Node) -> Node | None:
        """What is added to a value by a sum of two tensors of one shape."""
        is_sum = (node._op == "call_function" and node._target in _SUMS) or (
            node._op == "call_method" and node._target in ("add", "add_")
        )
        if not is_sum or node._kwargs or len(node._args) != 2:
            return None
        first, second = node._args
        if node._target in (operator.iadd, "add_") and first is not value:
            return None  # the other one is written
        other = second if first is value else first
        if not isinstance(other, Node) or other is value:
            return None
        facts = [self.shapes.get(item._name) for item in (other, value)]
        if any(getattr(fact, "shape", None) is None for fact in facts):
            return None
        return other if facts[0].shape == facts[1].shape and facts[0].dtype == facts[1].dtype else None

    def _may_wait(self, node: Node, until: Node) -> bool:
        """Whether the layer would compute the same in the place of a later node."""
        position = self.memory.position
        if node not in position or until not in position:
            return False
        read = {self.memory.class_of(source) for source in node._inputs if source in position}
        for between in list(position)[position[node] + 1 : position[until]]:
            written = self.memory.places_written(between)
            if written is None or not read.isdisjoint(written):
                return False
        return True

    def replace(self, chain: _Chain, new: Node) -> None:
        """Put a call in the place of a chain."""
        last = chain.nodes[-1]
        inherit_origin(new, last)
        self.shapes[new._name] = self.shapes.get(last._name)
        for node in chain.nodes[:-1]:  # what only asks for the shape of a value inside the chain
            node.replace_all_uses_with(new, lambda user: user not in chain.nodes)
        last.replace_all_uses_with(new)
        for node in reversed(chain.nodes):
            self.graph.erase_node(node)


def activation_of(node: Node) -> Activation | None:
    """The activation that a node computes, as oneDNN takes it."""
    if node._op == "call_method":
        name = _BY_METHOD.get(node._target)
        return None if name is None or len(node._args) != 1 or node._kwargs else (name, [], "")
    if node._op != "call_function":
        return None
    options = {key: value for key, value in node._kwargs.items() if key not in ("input", "inplace")}
    if node._target is functional.gelu:
        return ("gelu", [], options.get("approximate", "none")) if len(node._args) == 1 else None
    if node._target in (functional.leaky_relu, functional.hardtanh):
        names = ("negative_slope",) if node._target is functional.leaky_relu else ("min_val", "max_val")
        defaults = {"negative_slope": 0.01, "min_val": -1.0, "max_val": 1.0}
        values = [
            {**dict(zip(names, node._args[1:], strict=False)), **options}.get(name, defaults[name]) for name in names
        ]
        is_plain = all(type(value) in (int, float) for value in values)
        return (node._target.__name__, [float(value) for value in values], "") if is_plain else None
    try:
        found = _BY_FUNCTION.get(node._target)
    except TypeError:  # a callable object that cannot be a key
        return None
    return found if not options else None


def _pair(value: Any) -> list[int] | None:
    if type(value) is int:
        return [value, value]
    if isinstance(value, (tuple, list)) and all(type(item) is int for item in value):
        return [value[0]] * 2 if len(value) == 1 else list(value)
    return None
