"""Fuse a batch norm into the convolution or linear layer beside it: in evaluation mode it is one multiplication and one
addition for each channel, which the weights can do. Which calls are layers and norms is said in `layer_calls.py`.

The model that the program was captured from keeps its weights: the program gets new ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from torchgraft.analysis.aliases import Aliases
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.choices import add_if
from torchgraft.ir.copying import inherit_origin
from torchgraft.ir.guards import check_training, check_value
from torchgraft.ir.modules import is_from_torch
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_of
from torchgraft.ir.printing import known_value
from torchgraft.ir.verify import find_attribute
from torchgraft.passes.attributes import References
from torchgraft.passes.definition import Pass
from torchgraft.passes.layer_calls import (
    Layer,
    Norm,
    bound,
    is_layer,
    is_metadata_read,
    is_norm,
    layer_arguments,
    norm_arguments,
    read_layer,
    read_norm,
    uses_of_values,
    weights_of_calls,
)


@dataclass(frozen=True)
class FuseConvNorm(Pass):
    """Fuse batch norms into the layers before or after them; `notes` says for each one that stays why it does.

    The program computes in evaluation mode from then on: a fused norm does not follow `.train()`, and a program that asked for
    its mode raises GuardError there.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval())
    >>> FuseConvNorm()(program).changes, [node.name for node in program.graph.nodes]
    (1, ['input_1', '_0', '_2', 'output'])
    """

    def run(self, module: GraphModule) -> int:
        """Fuse, and return the number of norms that went."""
        search = _Search(module)
        if not search.norms:
            return 0
        fused = 0
        references = References(module)
        with torch.no_grad():
            for node in search.norms:
                pair = search.pair(node)
                if not isinstance(pair, str):
                    _fuse(references, *pair)
                    fused += 1
        return fused

    def notes(self, module: GraphModule) -> list[str]:
        """Why the norms that are in the program are not fused."""
        search = _Search(module)
        reasons = [(node, search.pair(node)) for node in search.norms]
        return [f"'{node._name}'{_at(node)} stays: {reason}" for node, reason in reasons if isinstance(reason, str)]


class _Search:
    """Looks for the layer that each norm can be fused into."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        nodes = list(module.graph.nodes)
        self.norms = [node for node in nodes if is_norm(node, module)]
        self._calls = weights_of_calls(nodes, module) if self.norms else {}
        self._memory = Aliases(module.graph)
        self._nodes = nodes

    def pair(self, node: Node) -> tuple[Layer, Norm, bool] | str:
        """The layer, the norm and whether the norm comes after the layer; or why there is no such layer."""
        norm = read_norm(node, self.module)
        if isinstance(norm, str):
            return norm
        if self._calls.get(id(norm.mean), 0) > 1:
            return f"its statistics are shared by {self._calls[id(norm.mean)]} calls"
        first = f"'{norm.source._name}' before it is no convolution or linear layer"
        if is_layer(norm.source, self.module):
            layer = self._taking(norm, norm.source, self._reason_after)
            if isinstance(layer, Layer):
                return layer, norm, True
            first = f"the layer '{norm.source._name}' before it cannot take it: {layer}"
        users = uses_of_values(node)
        if len(users) != 1 or not is_layer(users[0], self.module):
            return f"{first}, and it is not followed by one alone"
        layer = self._taking(norm, users[0], self._reason_before)
        if isinstance(layer, Layer):
            return layer, norm, False
        return f"{first}, and the layer '{users[0]._name}' after it cannot either: {layer}"

    def _taking(self, norm: Norm, node: Node, reason: Callable[[Layer, Norm], str | None]) -> Layer | str:
        """The layer that a node calls, if it can take the norm; else why it cannot."""
        layer = read_layer(node, self.module)
        return layer if isinstance(layer, str) else reason(layer, norm) or layer

    def _reason_after(self, layer: Layer, norm: Norm) -> str | None:
        others = [user for user in uses_of_values(layer.node) if user is not norm.node]
        if others:
            return f"its result is also used by {', '.join(repr(user._name) for user in others)}"
        if layer.outputs != norm.mean.numel():
            return f"it returns {layer.outputs} channels and the norm takes {norm.mean.numel()}"
        return self._reason_either(layer, norm)

    def _reason_before(self, layer: Layer, norm: Norm) -> str | None:
        if layer.source is not norm.node:
            return "the norm does not make its input"
        if layer.inputs != norm.mean.numel():
            return f"it takes {layer.inputs} channels and the norm returns {norm.mean.numel()}"
        if layer.pads_with_zeros:
            return "it pads with zeros, which the norm would have to leave alone"
        if layer.transposed and not layer.kernel_is_one:
            return "at its borders a transposed convolution adds up fewer values, so no one bias is right"
        return self._reason_either(layer, norm)

    def _reason_either(self, layer: Layer, norm: Norm) -> str | None:
        memory = self._memory
        calls = self._calls.get(id(layer.weight), 0)
        if calls > 1:
            return f"it is used {calls} times"
        if layer.weight.dtype != norm.mean.dtype:
            return f"its weights are {layer.weight.dtype} and the statistics {norm.mean.dtype}"
        if layer.weight.device != norm.mean.device:
            return f"its weights are on {layer.weight.device} and the statistics on {norm.mean.device}"
        if memory.region[layer.node] is not memory.region[norm.node]:
            return "the two stand in different regions (torch.no_grad, autocast, …)"
        if memory.is_in(norm.node, torch.autocast):
            return "the two stand in an autocast region, which computes them in different types"
        if self._state_may_be_written and self._is_written(layer, norm):
            return "the program writes its weights or the statistics"
        guarded = _guarded_dimensions(layer, norm)
        noted = [len(known.shape) for node in (norm.source, norm.node) if hasattr(known := known_value(node), "shape")]
        for found in (guarded, norm.node.meta.get("dimensions"), *noted):
            if found is not None and found != layer.dimensions + 2:
                return f"the program is for {found} dimensions, where the norm does not go by the layer's channels"
        return None

    @cached_property
    def _state_may_be_written(self) -> bool:
        """The quick answer: modules of torch write no state but their own, and only norms in training have any."""
        plain = [
            node._op in ("placeholder", "output", "call_method")
            or (node._op == "call_module" and is_from_torch(find_attribute(self.module, node._target)[0]))
            or (node._op == "call_function" and getattr(node._target, "__module__", None) in ("torch", "_operator"))
            for node in self._nodes
        ]
        return not all(plain) and self._memory.has_writes

    def _is_written(self, layer: Layer, norm: Norm) -> bool:
        """Whether any node but the norm writes them; that one might where its mode is fetched, and is known not to."""
        tensors = [layer.weight, layer.bias, norm.mean, norm.variance, norm.weight, norm.bias]
        return any(self._memory.is_state_written(tensor, norm.node) for tensor in tensors if tensor is not None)


# ---- editing ----


def _fuse(references: References, layer: Layer, norm: Norm, after: bool) -> None:
    scale, shift = norm.scale_and_shift()
    weight, bias = _after(layer, scale, shift) if after else _before(layer, scale, shift)
    _guard_dimensions(layer, norm)
    replace_weights(references, layer, weight, bias)
    _settle_mode(references, norm.node)
    norm.node.replace_all_uses_with(layer.node if after else norm.source)
    _erase(references, norm.node)


def replace_weights(references: References, layer: Layer, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Give a layer of a program other weights; the model that the program was captured from keeps its own."""
    new = [nn.Parameter(item.to(layer.weight.dtype), layer.weight.requires_grad) for item in (weight, bias)]
    if layer.module is not None:
        _replace_module(references, layer, *new)
    else:
        _replace_tensors(references, layer, *new)


def _after(layer: Layer, scale: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bias = shift if layer.bias is None else layer.bias.detach().double() * scale + shift
    weight = layer.weight.detach()
    return scaled_weight(weight, scale.to(weight.dtype), layer.transposed, layer.groups), bias


def scaled_weight(weight: torch.Tensor, factor: torch.Tensor, transposed: bool, groups: int) -> torch.Tensor:
    """The weights of a layer of which each channel that comes out is so many times as large."""
    if not transposed:
        return weight * factor.reshape(-1, *[1] * (weight.dim() - 1))
    # Channel number j of group g comes from column j of the rows of that group.
    rows = factor.reshape(groups, 1, -1).expand(-1, weight.shape[0] // groups, -1)
    return weight * rows.reshape(weight.shape[0], -1, *[1] * (weight.dim() - 2))


def _before(layer: Layer, scale: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = layer.weight.detach()
    old_bias = 0.0 if layer.bias is None else layer.bias.detach().double()
    spatial = [1] * (weight.dim() - 2)
    sums = weight.double().flatten(2).sum(2) if weight.dim() > 2 else weight.double()
    if layer.transposed:
        added = (sums * shift.reshape(-1, 1)).reshape(layer.groups, -1, weight.shape[1]).sum(1).reshape(-1)
        return weight * scale.to(weight.dtype).reshape(-1, 1, *spatial), old_bias + added
    repeat = weight.shape[0] // layer.groups
    columns = scale.to(weight.dtype).reshape(layer.groups, 1, -1).expand(-1, repeat, -1).reshape(weight.shape[0], -1)
    shifts = shift.reshape(layer.groups, 1, -1).expand(-1, repeat, -1).reshape(weight.shape[0], -1)
    return weight * columns.reshape(weight.shape[0], -1, *spatial), old_bias + (sums * shifts).sum(1)


def _replace_module(references: References, layer: Layer, weight: nn.Parameter, bias: nn.Parameter) -> None:
    assert layer.module is not None
    fused = with_weights(layer.module, weight, bias)
    path = references.put(layer.node._target, fused)
    if path != layer.node._target:
        references.change(layer.node._target, -1)
        references.change(path, 1)
        layer.node.target = path


def with_weights(module: nn.Module, weight: nn.Parameter | None, bias: nn.Parameter | None) -> nn.Module:
    """A module like this one with other weights, not by its constructor, which would draw random weights first."""
    kind: Any = type(module)
    result = kind.__new__(kind)
    result.__dict__.update(
        {key: value.copy() if type(value) in (dict, OrderedDict) else value for key, value in module.__dict__.items()}
    )
    result._parameters = {"weight": weight, "bias": bias}
    return result


def _replace_tensors(references: References, layer: Layer, weight: nn.Parameter, bias: nn.Parameter) -> None:
    node = layer.node
    graph = node.graph
    arguments = bound(node, layer_arguments(node))
    weight_node, bias_node = arguments["weight"], arguments.get("bias")
    path = weight_node._target
    for key, value, old in (("weight", weight, weight_node), ("bias", bias, bias_node)):
        if old is not None and len(old._users) == 1 and references.is_only_use(old._target):
            references.put(old._target, value)
            continue
        if old is not None:
            placed = references.put_new(old._target, value)
        else:
            placed = references.put_new(f"{path.rpartition('.')[0]}.bias".lstrip("."), value)
        with graph.inserting_before(node):
            arguments[key] = graph.create_node("get_attr", placed)
        inherit_origin(arguments[key], node)
        references.change(placed, 1)
    node.args = tuple([arguments[name] for name in layer_arguments(node)[: max(3, len(node._args))]])
    node.kwargs = {name: value for name, value in node._kwargs.items() if name not in ("input", "weight", "bias")}
    if not weight_node._users:
        _erase(references, weight_node)
    if bias_node is not None and not bias_node._users:
        _erase(references, bias_node)


def _erase(references: References, node: Node) -> None:
    """Erase a node, the fetches that only it used, and what only they referred to."""
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    if node._op in ("get_attr", "call_module"):
        references.change(node._target, -1)
        references.drop_unused(node._target)
    for source in inputs:
        if source._op == "get_attr" and not source._users:
            _erase(references, source)


def _settle_mode(references: References, node: Node) -> None:
    """Where the program asks for the mode of a norm, have it refuse to train, and no longer count the batches."""
    mode = bound(node, norm_arguments(node)).get("training") if node._op == "call_function" else None
    if not isinstance(mode, Node):
        return
    graph = node.graph
    with graph.inserting_before(node):
        guard = graph.call_function(check_training, (mode, False, _at(node).strip(" ()") or "a norm that was fused"))
    inherit_origin(guard, node)
    for user in list(mode._users):
        if user._target is add_if and not user._users:
            _erase(references, user)


def _guard_dimensions(layer: Layer, norm: Norm) -> None:
    """A norm takes the second dimension for the channels and a layer without a batch the first: make sure of the batch.

    The modules for images and volumes refuse anything but a batch themselves.
    """
    if isinstance(norm.module, (nn.BatchNorm2d, nn.BatchNorm3d)):
        return
    if _guarded_dimensions(layer, norm) is not None:
        return
    graph, source = layer.node.graph, norm.source if norm.source is not layer.node else layer.source
    line = _at(norm.node).strip(" ()")
    with graph.inserting_before(layer.node if norm.source is layer.node else norm.node):
        found = graph.call_method("dim", (source,))
        expected = layer.dimensions + 2
        guard = graph.call_function(check_value, (found, expected, f"ndim of '{source._name}'", line))
    inherit_origin(found, norm.node)
    inherit_origin(guard, norm.node)


def _guarded_dimensions(layer: Layer, norm: Norm) -> Any:
    """The number of dimensions that the program was captured for, where it has a guard of it."""
    for node in (layer.source, layer.node, norm.source):
        for read in filter(is_metadata_read, node._users):
            if read._target in ("dim", "ndimension") or (read._target is getattr and read._args[1] == "ndim"):
                guards = [user for user in read._users if user._target is check_value]
                if guards:
                    return guards[0]._args[1]
    return None


def _at(node: Node) -> str:
    line = source_of(node)
    return f" ({line})" if line else ""
