"""Linear layers with oneDNN's kernel: weights packed once, with the activation or the sum that follows in the same call.
Where torch's own call is quicker (small layers) it stays; which is quicker is measured. Convolutions are in `prepacking.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from torchgraft.backends.prepacking import Packer, no_activation
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.node import Node
from torchgraft.passes.attributes import References
from torchgraft.passes.layer_calls import Layer, is_layer, parameter_of, read_layer

_LINEAR: Any = None
_LINEAR_SUM: Any = None
if torch.backends.mkldnn.is_available():
    _LINEAR = torch.ops.mkldnn._linear_pointwise.default
    _LINEAR_SUM = torch.ops.mkldnn._linear_pointwise.binary
# Multiplications below which a call of oneDNN costs more than it saves on any machine.
_LEAST_WORK = 1 << 17
_ROUNDS, _SECONDS = 5, 0.02
# What was measured in this process, by sizes and threads.
_is_quicker: dict[tuple[int, int, int, int], bool] = {}


def linear_and_sum(x: Any, other: Any, weight: Any, bias: Any, outputs: int) -> Any:
    """A linear layer and the sum with another tensor, which may broadcast."""
    if other.shape[:-1] == x.shape[:-1] and other.shape[-1] == outputs:
        return _LINEAR_SUM(x, other, weight, bias, "add")
    return _LINEAR(x, weight, bias, *no_activation) + other


def pack_linears(packer: Packer) -> int:
    """Put packed layers in the place of linear layers that gain from it; how many there are. The ranks of all values have to
    follow from those of the inputs."""
    if _LINEAR is None:
        return 0
    with torch.no_grad():
        nodes = [node for node in packer.graph.nodes if _read(node, packer.body) is not None]
        # Read anew, because what a layer takes may be packed by now.
        return sum([_pack(packer, layer) for node in nodes if (layer := _read(node, packer.body)) is not None])


def _read(node: Node, body: GraphModule) -> Layer | None:
    """A linear layer, also one that is spelled as `addmm`; None for other calls."""
    if node._op == "call_function" and node._target is torch.addmm and len(node._args) == 3 and not node._kwargs:
        bias, columns = (parameter_of(node._args[number], body) for number in (0, 2))
        source = node._args[1]
        if bias is None or columns is None or bias.dim() != 1 or not isinstance(source, Node):
            return None
        return Layer(node, source, columns.t(), bias, 0, False, 1, True)
    layer = read_layer(node, body) if is_layer(node, body) else None
    return layer if isinstance(layer, Layer) and layer.dimensions == 0 else None


def _pack(packer: Packer, layer: Layer) -> bool:
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    known = packer.shapes.get(layer.source._name)
    shape = getattr(known, "shape", ())
    if len(shape) < 2 or weight.device.type != "cpu" or not packer.is_plain(layer):
        return False
    if weight.dtype is not torch.float32 or known.dtype is not torch.float32:  # 16 bits are oneDNN's in torch, too
        return False
    rows, (outputs, inputs) = math.prod(shape[:-1]), weight.shape
    if rows * inputs * outputs < _LEAST_WORK:
        return False
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    if not _pays(rows, weight, bias, packed):
        return False
    chain = packer.chain(layer.node, both=False)
    with packer.graph.inserting_before(chain.nodes[-1]):
        where = packer.constant(f"{layer.node._name}_packed", packed)
        shift = None if bias is None else packer.constant(f"{layer.node._name}_bias", bias)
        if chain.other is None:
            new = packer.graph.call_function(_LINEAR, (layer.source, where, shift, *chain.activation))
        else:
            new = packer.graph.call_function(linear_and_sum, (layer.source, chain.other, where, shift, outputs))
    packer.replace(chain, new)
    return True


def _pays(rows: int, weight: torch.Tensor, bias: torch.Tensor | None, packed: torch.Tensor) -> bool:
    outputs, inputs = weight.shape
    key = (rows, inputs, outputs, torch.get_num_threads())
    if key not in _is_quicker:
        x = torch.full((rows, inputs), 0.5)
        plain, other = _in_turns(
            lambda: functional.linear(x, weight, bias), lambda: _LINEAR(x, packed, bias, *no_activation)
        )
        _is_quicker[key] = other < plain
    return _is_quicker[key]


def _in_turns(*calls: Callable[[], Any]) -> list[float]:
    """The least seconds of each call."""
    best = [float("inf")] * len(calls)
    end = time.perf_counter() + _SECONDS * len(calls)
    for number in range(_ROUNDS):
        for index, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            best[index] = min(best[index], time.perf_counter() - begin)
        if number and time.perf_counter() > end:
            break
    return best


def multiply_matrices(body: GraphModule, shapes: Any) -> None:
    """Linear layers of matrices are one call of torch less deep; that matters for small ones."""
    for node in list(body.graph.nodes):
        if node._op != "call_function" or node._target is not functional.linear or node._kwargs or len(node._args) != 3:
            continue
        layer = read_layer(node, body)
        known = shapes.get(node._args[0]._name) if isinstance(node._args[0], Node) else None
        if isinstance(layer, Layer) and layer.bias is not None and len(getattr(known, "shape", ())) == 2:
            with body.graph.inserting_before(node):
                path = References(body).free_name(f"{node._name}_columns")
                body.register_buffer(path, layer.weight.detach().t(), persistent=False)
                columns = body.graph.create_node("get_attr", path)
            node.target, node.args = torch.addmm, (node._args[2], node._args[0], columns)
