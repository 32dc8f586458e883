"""Merge linear layers that read the same value into one with all their rows: queries, keys and values; a gate and what it lets
through. One large product takes less time than several small ones. Which calls are layers is said in `layer_calls.py`.

The model that the program was captured from keeps its weights: the program gets new ones.
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
from torchgraft.passes.definition import Pass
from torchgraft.passes.layer_calls import Layer, is_layer, read_layer

# Calls whose answer depends on how the elements lie in memory, which for a slice of a larger result is another way.
_ASK_FOR_LAYOUT = frozenset({"stride", "is_contiguous", "as_strided", "data_ptr", "storage_offset", "view_as"})


@dataclass(frozen=True)
class MergeLinears(Pass):
    """Merge linear layers of the same input into one product, whose columns are then handed out.

    Sums may be taken in another order, so results are equal up to rounding. Layers whose results are written or returned stay.

    >>> import torch, torchgraft
    >>> query, key = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    >>> f = lambda x: query(x).relu().sum() + key(x).relu().sum()
    >>> program = torchgraft.capture(f, torch.ones(2, 4), level="function")
    >>> MergeLinears()(program).changes
    1
    >>> [node.name for node in program.graph.find_nodes(op="call_function", target=torch.nn.functional.linear)]
    ['linear_2']
    """

    def run(self, module: GraphModule) -> int:
        """Merge, and return the number of products that went."""
        memory = Aliases(module.graph)
        groups: dict[Any, list[Layer]] = {}
        for node in module.graph.nodes:
            layer = read_layer(node, module) if is_layer(node, module) else None
            if isinstance(layer, Layer) and _may_be_merged(layer, memory):
                like = (layer.source, memory.region[node], layer.weight.dtype, layer.weight.device)
                groups.setdefault((*like, layer.bias is None), []).append(layer)
        references = References(module)
        merged = 0
        for layers in groups.values():
            position = [memory.position[layer.node] for layer in layers]
            if len(layers) > 1 and not memory.is_touched_between(layers[0].source, position[0], position[-1]):
                _merge(references, layers, memory)
                merged += len(layers) - 1
        return merged


def _may_be_merged(layer: Layer, memory: Aliases) -> bool:
    node = layer.node
    if layer.dimensions or layer.weight.dim() != 2 or memory.is_written(node) or memory.outlives(node):
        return False
    state = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    if any(memory.is_state_written(tensor) or type(tensor) not in _PLAIN for tensor in state):
        return False
    return all(_takes_any_layout(user) for item in _sharing(node, memory) for user in item._users)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _sharing(node: Node, memory: Aliases) -> list[Node]:
    """A value and the views of it."""
    found, place = [node], memory.class_of(node)
    for item in found:
        found += [user for user in item._users if user not in found and memory.class_of(user) == place]
    return found


def _takes_any_layout(user: Node) -> bool:
    name = user._target if isinstance(user._target, str) else getattr(user._target, "__name__", "")
    if user._op == "call_method" and name == "view":
        return not isinstance(user._args[1], torch.dtype)  # it becomes `reshape`
    return name.partition(".")[0] not in _ASK_FOR_LAYOUT | {"view", "_unsafe_view"}


def _merge(references: References, layers: list[Layer], memory: Aliases) -> None:
    first = layers[0]
    graph = first.node.graph
    for layer in layers:
        for item in _sharing(layer.node, memory):
            for user in item._users:
                if user._op == "call_method" and user._target == "view":
                    user.target = "reshape"
    # One that reads the same value as the first cannot fail where that does not, so that nothing is lost by its coming earlier.
    with graph.inserting_before(first.node), torch.no_grad():
        rows = [_constant(references, first, "weight", torch.cat([layer.weight.detach() for layer in layers]))]
        if first.bias is not None:
            biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
            rows.append(_constant(references, first, "bias", torch.cat(biases)))
        product = graph.call_function(functional.linear, (first.source, *rows))
        sizes = [layer.outputs for layer in layers]
        pieces = graph.call_function(torch.split, (product, sizes), {"dim": -1})
    for new in (*rows, product, pieces):
        inherit_origin(new, first.node)
    for number, layer in enumerate(layers):
        _replace(references, layer.node, pieces, number)


def _constant(references: References, layer: Layer, name: str, value: torch.Tensor) -> Node:
    path = references.put_new(
        f"{layer.node._name}_merged_{name}", torch.nn.Parameter(value, layer.weight.requires_grad)
    )
    references.change(path, 1)
    return layer.node.graph.create_node("get_attr", path)


def _replace(references: References, node: Node, pieces: Node, number: int) -> None:
    graph, inputs = node.graph, node._inputs
    with graph.inserting_before(node):
        piece = graph.call_function(operator.getitem, (pieces, number))
    inherit_origin(piece, node)
    node.replace_all_uses_with(piece)
    graph.erase_node(node)
    for old in (node, *inputs):
        if old._op in ("get_attr", "call_module") and not old._users:
            if old is not node:
                graph.erase_node(old)
            references.change(old._target, -1)
            references.drop_unused(old._target)
