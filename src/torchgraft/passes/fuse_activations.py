"""Let an activation write into the result of the layer before it instead of allocating one of its own.
That saves the memory and the time to fetch it, which for large tensors on a CPU is most of an activation's cost; every bit
of the result, and of the gradients, stays what it was. Writes become plain computations again in `functionalize.py`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torchgraft.analysis.aliases import Aliases
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.modules import has_hooks
from torchgraft.ir.node import Node
from torchgraft.ir.verify import find_attribute
from torchgraft.passes.attributes import References
from torchgraft.passes.definition import Pass
from torchgraft.passes.layer_calls import LAYERS, uses_of_values

# Layers whose gradient needs their input and never their result, so that the result may be written.
_LAYER_MODULES = (
    *(*LAYERS, nn.Bilinear),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm),
)
_LAYER_FUNCTIONS = frozenset(
    {functional.conv1d, functional.conv2d, functional.conv3d, functional.linear, functional.bilinear}
    | {functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d}
    | {functional.batch_norm, functional.group_norm, functional.layer_norm, torch.batch_norm, torch.group_norm}
    | {torch.layer_norm, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm}
)
# Sums may be of whole numbers, which only some activations keep as they are.
_SUMS = frozenset({operator.add, operator.sub, torch.add, torch.sub})

# Activations whose gradient is reckoned from their result to the last bit as from their input, by every spelling.
_MODULES: dict[type, tuple[Any, tuple[str, ...]]] = {
    nn.ReLU: (functional.relu, ()),
    nn.ReLU6: (functional.hardtanh, ("min_val", "max_val")),
    nn.Hardtanh: (functional.hardtanh, ("min_val", "max_val")),
    nn.LeakyReLU: (functional.leaky_relu, ("negative_slope",)),
    nn.Sigmoid: (torch.sigmoid_, ()),
    nn.Tanh: (torch.tanh_, ()),
}
_FUNCTIONS: dict[Any, Any] = {
    torch.relu: torch.relu_,
    torch.sigmoid: torch.sigmoid_,
    torch.tanh: torch.tanh_,
    functional.relu: None,
    functional.relu6: None,
    functional.hardtanh: None,
    functional.leaky_relu: None,
    functional.sigmoid: torch.sigmoid_,
    functional.tanh: torch.tanh_,
}
_METHODS = {"relu": "relu_", "sigmoid": "sigmoid_", "tanh": "tanh_"}
_FOR_SUMS = frozenset({functional.relu, torch.relu_, "relu_"})

_Form = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class FuseActivations(Pass):
    """Let ReLU, ReLU6, LeakyReLU, Hardtanh, Sigmoid and Tanh write into the result of the layer or sum before them.

    Only where nothing else looks at that result: not another node, not a hook, not the caller.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> FuseActivations()(program).changes
    1
    """

    def run(self, module: GraphModule) -> int:
        """Fuse, and return how many activations write now."""
        memory = Aliases(module.graph)
        references = References(module)
        fused = 0
        for node in module.graph.nodes:
            form = _form(module, node)
            if form is None or not _may_write(memory, module, node, form):
                continue
            path = node._target if node._op == "call_module" else None
            node.op, node.target = form[0], form[1]
            node._set_arguments(form[2], form[3])
            if path is not None:
                references.change(path, -1)
                references.drop_unused(path)
            fused += 1
        return fused


def _form(module: GraphModule, node: Node) -> _Form | None:
    """The call that writes its input, for an activation that does not; None for anything else."""
    if node._op == "call_module":
        found: Any = find_attribute(module, node._target)[0]
        entry = _MODULES.get(type(found))
        if entry is None or has_hooks(found) or getattr(found, "inplace", False) or len(node._args) != 1:
            return None
        options = {name: getattr(found, name) for name in entry[1]}
        if options.get("negative_slope", 1) <= 0 or "forward" in found.__dict__:
            return None
        inplace = {} if entry[0] in (torch.sigmoid_, torch.tanh_) else {"inplace": True}
        return "call_function", entry[0], node._args, {**options, **inplace}
    if node._op == "call_method":
        name = _METHODS.get(node._target)
        return None if name is None or len(node._args) != 1 else ("call_method", name, node._args, node._kwargs)
    if node._op != "call_function":
        return None
    try:
        if node._target not in _FUNCTIONS:
            return None
    except TypeError:  # a callable object that cannot be a key
        return None
    return _function_form(node)


def _function_form(node: Node) -> _Form | None:
    counterpart = _FUNCTIONS[node._target]
    args = node._args or (node._kwargs.get("input"),)
    kwargs = {name: value for name, value in node._kwargs.items() if name != "input"}
    if counterpart is not None:
        return "call_function", counterpart, args, kwargs
    if node._target is functional.leaky_relu:
        slope = args[1] if len(args) > 1 else kwargs.get("negative_slope", 0.01)
        if type(slope) not in (int, float) or slope <= 0:
            return None
    place = {functional.relu: 1, functional.relu6: 1, functional.leaky_relu: 2, functional.hardtanh: 3}[node._target]
    if (args[place] if len(args) > place else kwargs.get("inplace", False)) is not False:
        return None
    return "call_function", node._target, args[:place], {**kwargs, "inplace": True}


def _may_write(memory: Aliases, module: GraphModule, node: Node, form: _Form) -> bool:
    source = form[2][0]
    if not isinstance(source, Node) or node._inputs != (source,) or uses_of_values(source) != [node]:
        return False
    if memory.region[source] is not memory.region[node] or not memory.is_fresh(source):
        return False
    if memory.is_in(node, torch.autocast):
        return False
    if source._op == "call_module":
        layer = find_attribute(module, source._target)[0]
        return type(layer) in _LAYER_MODULES and not has_hooks(layer)
    if source._op != "call_function":
        return False
    if source._target in _SUMS:
        return memory.is_tensor(source) and form[1] in _FOR_SUMS
    return source._target in _LAYER_FUNCTIONS and "out" not in source._kwargs
