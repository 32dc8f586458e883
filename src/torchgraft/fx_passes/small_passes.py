"""Small passes with torch.fx's interface that have no engine of their own: `graph_manipulation`, `annotate_getitem_nodes`,
`param_fetch`, `schema_type_annotation`, `annotate`, `debug`. Each import path that leads here is in `paths.py`.
"""

from __future__ import annotations

import inspect
import operator
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchgraft.analysis.signatures import get_signature_for_torch_op
from torchgraft.capturing.symbolic.proxy import Proxy
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraphError
from torchgraft.interpreter import Transformer
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node
from torchgraft.passes.shape_prop import ShapeProp

# ---- torch.fx.annotate, torch.fx.experimental.debug ----


def annotate(val: Any, type: Any) -> Any:
    """The value; where it is a traced one, its node gets the type.

    >>> import torchgraft
    >>> print(torchgraft.symbolic_trace(lambda x: annotate(x + 1, torch.Tensor)).code.strip().splitlines()[1])
        add : torch.Tensor = x + 1;  x = None
    """
    if isinstance(val, Proxy):
        if val.node.type:
            raise GraphError(
                f"Tried to annotate a value that already had a type on it! Existing type is {val.node.type} and new type is "
                f"{type}; annotate a parameter in the signature, and other values once"
            )
        val.node.type = type
    return val


def set_trace(gm: GraphModule) -> GraphModule:
    """The module, with a breakpoint in front of its code."""
    gm.graph.on_generate_code(
        lambda current: lambda body: ["import pdb; pdb.set_trace()\n", *(current(body) if current else body)]
    )
    return gm


# ---- torch.fx.passes.graph_manipulation ----


def replace_target_nodes_with(
    fx_module: GraphModule, old_op: str, old_target: Any, new_op: str, new_target: Any
) -> None:
    """Let every node with the old opcode and target have the new ones.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: torch.relu(x))
    >>> replace_target_nodes_with(program, "call_function", torch.relu, "call_function", torch.neg)
    >>> program(torch.ones(2))
    tensor([-1., -1.])
    """
    for node in fx_module.graph.nodes:
        if node.op == old_op and node.target == old_target:
            node.op, node.target = new_op, new_target


class size_bytes(NamedTuple):  # noqa: N801 (torch.fx's name)
    """How many bytes the result of a node takes, and the result together with the node's parameters."""

    output_size: int
    total_size: int


def get_tensor_meta(node: Node) -> Any:
    """What shape propagation noted about a node."""
    meta = node.meta.get("tensor_meta")
    if not meta:
        raise GraphError(
            f"Node {node} has no tensor metadata associated with it\n  run ShapeProp(program).propagate(...) first"
        )
    return meta


def get_size_of_node(fx_module: GraphModule, node: Node) -> size_bytes:
    """The sizes of a node in bytes; everything is taken to have the element type of the result."""
    meta = get_tensor_meta(node)
    width = torch.empty((), dtype=meta.dtype, device="meta").element_size()
    own = fx_module.get_submodule(node.target).parameters() if node.op == "call_module" else ()
    output = meta.shape.numel()
    return size_bytes(width * output, width * (output + sum(parameter.numel() for parameter in own)))


def get_size_of_all_nodes(fx_module: GraphModule, args: list[torch.Tensor] | None = None) -> None:
    """Note the sizes of every node as `node.size_bytes`, after shape propagation on `args` where they are given."""
    if args is not None:
        ShapeProp(fx_module).propagate(*args)
    for node in fx_module.graph.nodes:
        if node.op != "output":
            node.size_bytes = get_size_of_node(fx_module, node)  # type: ignore[attr-defined]


# ---- torch.fx.passes.annotate_getitem_nodes ----


def annotate_getitem_nodes(graph: Graph) -> None:
    """Give items of values that are annotated as tuples, lists or named tuples their type."""
    for node in graph.nodes:
        if node.target is operator.getitem and isinstance(node.args[0], Node) and node.args[0].type:
            known = _item_type(node.args[0].type, node.args[1])
            if known is not None:
                node.type = known


def _item_type(container: Any, index: Any) -> Any:
    parts = typing.get_args(container)
    if typing.get_origin(container) is list:
        return parts[0]
    if typing.get_origin(container) is tuple:
        return parts[0] if parts[1:] == (...,) else parts[index]
    if isinstance(container, type) and hasattr(container, "_fields"):
        return typing.get_type_hints(container).get(container._fields[index])
    return None


# ---- torch.fx.passes.param_fetch ----


def default_matching(name: str, target_version: int) -> str:
    """Attributes have the names they had."""
    return name


_POOL = ["kernel_size", "stride", "padding", "dilation", "return_indices", "ceil_mode"]
_CONV = ["weight", "bias", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"]
module_fetch_book: dict[type, tuple[int, list[str], Callable[[str, int], str]]] = {
    torch.nn.Linear: (1, ["weight", "bias"], default_matching),
    torch.nn.Conv2d: (1, _CONV, default_matching),
    torch.nn.BatchNorm2d: (2, ["weight", "bias", "running_mean", "running_var", "eps"], default_matching),
    torch.nn.AdaptiveAvgPool2d: (1, [], default_matching),
    torch.nn.MaxPool2d: (1, _POOL, default_matching),
    torch.nn.ReLU: (1, ["inplace"], default_matching),
}


def extract_attrs_for_lowering(mod: torch.nn.Module) -> dict[str, Any]:
    """The attributes of a layer that `module_fetch_book` names, and the name of its class."""
    if type(mod) not in module_fetch_book:
        raise GraphError(f"{torch.typename(mod)} is not in the module_fetch_book yet\n  add it there")
    version, names, matching = module_fetch_book[type(mod)]
    if version < mod._version:
        raise GraphError(f"{torch.typename(mod)} has version {mod._version}, and module_fetch_book has {version}")
    return {"name": torch.typename(mod), **{name: getattr(mod, matching(name, mod._version)) for name in names}}


def lift_lowering_attrs_to_nodes(fx_module: GraphModule) -> None:
    """Note the attributes of every layer as `node.attrs_for_lowering`, in programs inside too."""
    for node in fx_module.graph.find_nodes(op="call_module"):
        layer = fx_module.get_submodule(node.target)
        if isinstance(layer, GraphModule):
            lift_lowering_attrs_to_nodes(layer)
        else:
            node.attrs_for_lowering = extract_attrs_for_lowering(layer)  # type: ignore[attr-defined]


# ---- torch.fx.experimental.schema_type_annotation ----


class AnnotateTypesWithSchema(Transformer):
    """Gives nodes the types that schemas of operators, forwards of layers and the tensors themselves say."""

    def __init__(
        self,
        module: GraphModule,
        annotate_functionals: bool = True,
        annotate_modules: bool = True,
        annotate_get_attrs: bool = True,
    ) -> None:
        super().__init__(module)
        self.annotate_functionals = annotate_functionals
        self.annotate_modules = annotate_modules
        self.annotate_get_attrs = annotate_get_attrs

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A call of an operator, typed where all its overloads return the same."""
        result = super().call_function(target, args, kwargs)
        if self.annotate_functionals:
            signatures = get_signature_for_torch_op(target) or []
            self._annotate(result, {signature.return_annotation for signature in signatures})
            if target.__module__ == "torch.nn.functional":
                self._annotate(result, {inspect.signature(target).return_annotation})
        return result

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A call of a layer of torch.nn, typed as its forward is."""
        result = super().call_module(target, args, kwargs)
        layer = self.fetch_attr(target)
        if self.annotate_modules and getattr(torch.nn, type(layer).__name__, None) is type(layer):
            self._annotate(result, {inspect.signature(type(layer).forward).return_annotation})
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A fetch, typed by what is there."""
        result = super().get_attr(target, args, kwargs)
        if self.annotate_get_attrs:
            value = self.fetch_attr(target)
            self._annotate(result, {torch.Tensor if isinstance(value, torch.Tensor) else type(value)})
        return result

    def _annotate(self, result: Any, types: set[Any]) -> None:
        if len(types) == 1 and (known := next(iter(types))) is not inspect.Signature.empty:
            result.node.type = result.node.type or known
