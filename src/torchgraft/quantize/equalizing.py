"""Cross-layer equalization: two layers with a ReLU between them compute the same if a channel is divided by a number in the first
and multiplied by it in the second, so the ranges of both can be brought together. Needs no data; other corrections do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torchgraft.ir.node import Node
from torchgraft.passes.attributes import References
from torchgraft.passes.definition import Pass
from torchgraft.passes.fuse_conv_norm import replace_weights
from torchgraft.passes.layer_calls import Layer, is_layer, read_layer, weights_of_calls
from torchgraft.quantize.operations import first_input, operation, real_users

if TYPE_CHECKING:
    from torchgraft.codegen.graph_module import GraphModule

# A positive factor goes through these unchanged, and through poolings, too.
_HOMOGENEOUS = frozenset(
    {"relu", "leaky_relu", "max_pool1d", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "identity"}
)
_LEAST_RANGE = 1e-8


@dataclass(frozen=True)
class EqualizeLayers(Pass):
    """Bring the ranges of weights of neighbouring layers together, channel by channel; the program computes the same.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(torchgraft.zoo.create("mlp").eval())
    >>> EqualizeLayers()(program).changes
    1
    """

    rounds: int = 3

    def run(self, module: GraphModule) -> int:
        """Equalize every pair of layers, several times over, and return how many pairs there are."""
        pairs = _pairs(module)
        with torch.no_grad():
            for _ in range(self.rounds):
                for first, second in pairs:
                    _equalize(module, first, second)
        return len(pairs)


def _pairs(program: GraphModule) -> list[tuple[Node, Node]]:
    nodes = list(program.graph.nodes)
    calls = weights_of_calls(nodes, program)
    found = []
    for node in nodes:
        second = _plain_layer(node, program, calls)
        if second is None:
            continue
        value = second.source
        while operation(value, program) in _HOMOGENEOUS and len(real_users(value)) == 1:
            source = first_input(value)
            if source is None:
                break
            value = source
        first = _plain_layer(value, program, calls)
        if first is not None and len(real_users(value)) == 1 and first.outputs == second.inputs:
            found.append((value, node))
    return found


def _plain_layer(node: Node, program: GraphModule, calls: dict[int, int]) -> Layer | None:
    """A layer without groups whose weights nobody else uses."""
    if not is_layer(node, program):
        return None
    layer = read_layer(node, program)
    if isinstance(layer, str) or layer.transposed or layer.groups != 1 or calls.get(id(layer.weight), 0) != 1:
        return None
    return layer


def _equalize(program: GraphModule, first_node: Node, second_node: Node) -> None:
    first, second = read_layer(first_node, program), read_layer(second_node, program)
    assert isinstance(first, Layer) and isinstance(second, Layer)
    one, two = first.weight.detach(), second.weight.detach()
    leaving = one.flatten(1).abs().amax(1)
    entering = two.transpose(0, 1).flatten(1).abs().amax(1)
    factor = torch.sqrt(leaving / entering.clamp(min=_LEAST_RANGE)).clamp(1e-3, 1e3)
    factor = torch.where((leaving > _LEAST_RANGE) & (entering > _LEAST_RANGE), factor, torch.ones_like(factor))
    references = References(program)
    bias = torch.zeros_like(factor) if first.bias is None else first.bias.detach() / factor
    replace_weights(references, first, one / factor.reshape(-1, *[1] * (one.dim() - 1)), bias)
    other_bias = torch.zeros(second.outputs, dtype=two.dtype) if second.bias is None else second.bias.detach()
    replace_weights(references, second, two * factor.reshape(1, -1, *[1] * (two.dim() - 2)), other_bias.to(two.device))
