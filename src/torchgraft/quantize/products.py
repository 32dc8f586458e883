"""Layers that go by other names: products with a constant matrix (`torch.addmm(bias, x, weight)`, `x @ weight.T`) made linear
layers, and core ATen's one operator for all convolutions and its batch norm made those of torch.nn.functional, so that they are
quantized like others. Products of two computed values stay what they are.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from torchgraft.analysis.aliases import Aliases
from torchgraft.ir.copying import inherit_origin
from torchgraft.ir.node import Node
from torchgraft.passes.attributes import References
from torchgraft.passes.definition import Pass
from torchgraft.passes.layer_calls import parameter_of
from torchgraft.quantize.operations import operation

if TYPE_CHECKING:
    from torchgraft.codegen.graph_module import GraphModule


_aten = torch.ops.aten
_CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)
_TRANSPOSED = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)


@dataclass(frozen=True)
class NameLayers(Pass):
    """Make products with constant matrices calls of `torch.nn.functional.linear`, and layers of core ATen calls of what they are.

    >>> import torchgraft
    >>> class Product(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.weight = torch.nn.Parameter(torch.randn(3, 2))
    ...     def forward(self, x):
    ...         return x @ self.weight.T
    >>> program = torchgraft.symbolic_trace(Product())
    >>> NameLayers()(program).changes
    1
    """

    def run(self, module: GraphModule) -> int:
        """Replace, and return how many."""
        return _name_core_layers(module) + self._name_products(module)

    def _name_products(self, module: GraphModule) -> int:
        found = [(node, parts) for node in module.graph.nodes if (parts := _parts(node, module)) is not None]
        if not found:
            return 0
        memory = Aliases(module.graph)
        references = References(module)
        changed = 0
        for node, (source, weight, is_transposed, bias) in found:
            tensor = parameter_of(weight, module)
            if tensor is None or memory.is_known_to_be_written(tensor):
                continue
            if not is_transposed:
                weight = _transposed(module, references, node, weight, tensor)
            node.op, node.target = "call_function", functional.linear
            node._set_arguments((source, weight, bias), {})
            changed += 1
        return changed


def _name_core_layers(program: GraphModule) -> int:
    changed = 0
    for node in list(program.graph.nodes):
        if node.target is _aten.convolution.default:
            source, weight, bias, stride, padding, dilation, transposed, output_padding, groups = node.args
            tensor = parameter_of(weight, program)
            if tensor is None or not 3 <= tensor.dim() <= 5:
                continue
            options = (
                (stride, padding, output_padding, groups, dilation)
                if transposed
                else (stride, padding, dilation, groups)
            )
            node.target = (_TRANSPOSED if transposed else _CONVOLUTIONS)[tensor.dim() - 3]
            node.args = (source, weight, bias, *options)
            changed += 1
        elif node.target is _aten._native_batch_norm_legit_no_training.default:
            results = list(node._users)
            if not all(user.target is operator.getitem and user.args[1] == 0 for user in results):
                continue
            source, weight, bias, mean, variance, momentum, eps = node.args
            node.target, node.args = functional.batch_norm, (source, mean, variance, weight, bias, False, momentum, eps)
            for user in results:
                user.replace_all_uses_with(node)
                program.graph.erase_node(user)
            changed += 1
    return changed


def _parts(node: Node, program: GraphModule) -> tuple[Node, Node, bool, Node | None] | None:
    """The input, the weight, whether it is taken transposed, and the bias of a product with a constant matrix."""
    name = operation(node, program) if node.op in ("call_function", "call_method") else ""
    if node.kwargs or name not in ("addmm", "matmul", "mm"):
        return None
    values: Any = node.args
    if len(values) != (3 if name == "addmm" else 2) or not all(isinstance(value, Node) for value in values):
        return None
    source, right = values[-2:]
    bias = values[0] if name == "addmm" else None
    if bias is not None and (getattr(parameter_of(bias, program), "ndim", 0) != 1):
        return None
    weight, is_transposed = _matrix(right, program)
    tensor = parameter_of(weight, program)
    if tensor is None or tensor.dim() != 2 or not tensor.is_floating_point() or source.op == "get_attr":
        return None
    return source, weight, is_transposed, bias


def _matrix(node: Node, program: GraphModule) -> tuple[Node, bool]:
    """What is fetched, and whether it is transposed."""
    if node.target is getattr and node.args[1] in ("T", "mT"):
        return node.args[0], True
    name = operation(node, program)
    if name in ("t", "numpy_T"):
        return node.args[0], True
    if name == "transpose" and set(node.args[1:]) in ({0, 1}, {-1, -2}):
        return node.args[0], True
    if name == "permute":
        order = node.args[1] if isinstance(node.args[1], (list, tuple)) else node.args[1:]
        if (
            len(order) == 2
            and all(isinstance(number, int) for number in order)
            and order[0] % 2 == 1
            and order[1] % 2 == 0
        ):
            return node.args[0], True
    return node, False


def _transposed(program: GraphModule, references: References, node: Node, weight: Node, tensor: torch.Tensor) -> Node:
    value = torch.nn.Parameter(tensor.detach().t().contiguous(), requires_grad=False)
    path = references.put_new(f"{weight.target}_transposed", value)
    with program.graph.inserting_before(node):
        fetched = program.graph.get_attr(path)
    inherit_origin(fetched, node)
    references.change(path, 1)
    return fetched
