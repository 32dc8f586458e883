"""Checks of the number of dimensions that a native program need not repeat: its layers keep it, so that the first one speaks
for all that come after. What is checked at all is decided when a program is captured.
"""

from __future__ import annotations

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.guards import check_value
from torchgraft.ir.node import Node
from torchgraft.ir.verify import find_attribute
from torchgraft.quantize.native.functions import max_pool_bytes, quantize_fast
from torchgraft.quantize.native.layers import IntegerLayer, IntegerLayerWithSum


def drop_repeated_checks(program: GraphModule) -> None:
    """Take out checks of `ndim` that cannot fail, because they held before where the value comes from.

    >>> import torch, torchgraft
    >>> layers = [torch.nn.Conv2d(2, 2, 1), torch.nn.BatchNorm2d(2), torch.nn.ReLU()]
    >>> model = torch.nn.Sequential(*layers, torch.nn.Conv2d(2, 2, 1), torch.nn.BatchNorm2d(2)).eval()
    >>> program = torchgraft.quantize.quantize(model, [torch.randn(1, 2, 4, 4)])  # which does this
    >>> sum(node.target is check_value for node in program.graph.nodes)
    1
    """
    known: dict[Node, int] = {}
    for node in list(program.graph.nodes):
        sources = _of_as_many_dimensions(node, program)
        counts = {known.get(source) for source in sources}
        if sources and len(counts) == 1 and None not in counts:
            known[node] = known[sources[0]]
        read = node.args[0] if node.target is check_value else None
        if not isinstance(read, Node) or read.target is not getattr or read.args[1:] != ("ndim",):
            continue
        value, expected = read.args[0], node.args[1]
        if known.get(value) != expected:
            # What holds for a result holds for what it was computed from, and is asked of that: nobody is to look between layers.
            first = read
            while known.get(value) != expected:
                known[value] = expected
                sources = _of_as_many_dimensions(value, program)
                first, value = (value, sources[0]) if len(sources) == 1 else (first, value)
            if first is not read:
                read.replace_input_with(read.args[0], value)
                first.prepend(read)
                first.prepend(node)
            continue
        program.graph.erase_node(node)
        if not read._users:
            program.graph.erase_node(read)


def _of_as_many_dimensions(node: Node, program: GraphModule) -> list[Node]:
    """The inputs of a call that have as many dimensions as its result; none where that is not known."""
    if node.op == "call_module":
        layer = find_attribute(program, node.target)[0]
        if type(layer) in (IntegerLayer, IntegerLayerWithSum) and layer.convolution is not None:
            return node.all_input_nodes
    elif node.target in (quantize_fast, max_pool_bytes) and isinstance(node.args[0], Node):
        return [node.args[0]]
    return []
