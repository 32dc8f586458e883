"""Turn writes in place into plain computations, where it can be shown that nobody can tell the difference.
Who shares memory with whom is known to `analysis/aliases.py`.

A write `y.add_(1)` may become `y.add(1)` if the memory of `y` was made by the program itself, no other value that may
share it is looked at afterwards, and `y` was made in the same region. Later uses of `y` then mean the result.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torchgraft.analysis.aliases import Aliases
from torchgraft.analysis.effects import is_impure
from torchgraft.analysis.schemas import overloads_of
from torchgraft.capturing.symbolic.inplace import PLAIN_FORM
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.copying import inherit_origin
from torchgraft.ir.modules import has_hooks
from torchgraft.ir.node import Node
from torchgraft.ir.verify import find_attribute
from torchgraft.passes.definition import Pass

# The functions behind modules that write their input, where the module has no options of its own but these.
_MODULES: dict[type, tuple[Any, tuple[str, ...]]] = {
    nn.ReLU: (functional.relu, ()),
    nn.ReLU6: (functional.relu6, ()),
    nn.LeakyReLU: (functional.leaky_relu, ("negative_slope",)),
    nn.ELU: (functional.elu, ("alpha",)),
    nn.CELU: (functional.celu, ("alpha",)),
    nn.SELU: (functional.selu, ()),
    nn.SiLU: (functional.silu, ()),
    nn.Mish: (functional.mish, ()),
    nn.Hardtanh: (functional.hardtanh, ("min_val", "max_val")),
    nn.Hardswish: (functional.hardswish, ()),
    nn.Hardsigmoid: (functional.hardsigmoid, ()),
    nn.Threshold: (functional.threshold, ("threshold", "value")),
}

_Form = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Functionalize(Pass):
    """Turn writes into plain computations where nobody can tell the difference; inputs and state are written as before.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: torch.relu_(x + 1).mul_(2))
    >>> Functionalize()(program).changes, [node.target for node in program.graph.nodes][2:4]
    (2, [<built-in method relu of type object at 0x...>, 'mul'])
    """

    def run(self, module: GraphModule) -> int:
        """Convert, and return the number of writes that went."""
        changed = 0
        # What one conversion sets apart may be what stood in the way of another.
        while converted := _convert_all(module):
            changed += converted
        return changed

    def notes(self, module: GraphModule) -> list[str]:
        """Which writes stay: those of inputs and state must, others could not be shown to be the program's own affair."""
        memory = Aliases(module.graph)
        result = []
        for node in module.graph.nodes:
            effects = memory.effects.get(node) if _may_write(module, node) else None
            written = [place for place in effects.writes if isinstance(place, Node)] if effects else []
            if written:
                what = ", ".join(f"'{place._name}'" for place in written)
                why = (
                    "an input or state"
                    if any(map(memory.is_input_or_state, written))
                    else "something others may look at"
                )
                result.append(f"'{node._name}' stays: it writes {what}, which may be {why}")
        return result


def _convert_all(module: GraphModule) -> int:
    memory = Aliases(module.graph)
    if not any(_may_write(module, node) for node in module.graph.nodes) or not memory.has_writes:
        return 0
    changed = 0
    # Walking backwards: the values of each class that are looked at further on and exist already here.
    looked_at: dict[Any, dict[Node, None]] = {}
    # The users of each value that stand further on; a value may be written many times, and has as many users before that.
    later: dict[Node, list[Node]] = {}
    for node in list(reversed(module.graph.nodes)):
        looked_at.get(memory.class_of(node), {}).pop(node, None)
        form = _pure_form(memory, node, looked_at)
        if form is not None and _convert(node, form, later):
            changed += 1
        for source in node._inputs:
            looked_at.setdefault(memory.class_of(source), {})[source] = None
            later.setdefault(source, []).append(node)
    return changed


def _may_write(module: GraphModule, node: Node) -> bool:
    """The quick answer: whether a node is of a kind that is ever converted."""
    if node._op == "call_method":
        return node._target.endswith("_")
    if node._op == "call_module":
        return bool(getattr(find_attribute(module, node._target)[0], "inplace", False))
    return node._op == "call_function"


def _pure_form(memory: Aliases, node: Node, looked_at: dict[Any, dict[Node, None]]) -> _Form | None:
    effects = memory.effects.get(node)
    if effects is None or effects.unknown or effects.random or len(effects.writes) != 1:
        return None
    written = next(iter(effects.writes))
    if not isinstance(written, Node) or memory.is_input_or_state(written):
        return None
    others = [value for value in looked_at.get(memory.class_of(written), ()) if value is not written]
    if others or memory.region[written] is not memory.region[node] or memory.is_in(node, torch.autocast):
        return None
    form = _form(node, written, memory)
    return form if form is not None and form[2] and form[2][0] is written else None


def _form(node: Node, written: Node, memory: Aliases) -> _Form | None:
    """The same computation without the write."""
    if node._op == "call_method":
        name = node._target[:-1]
        is_pair = node._target.endswith("_") and not node._target.endswith("__") and hasattr(torch.Tensor, name)
        return ("call_method", name, node._args, node._kwargs) if is_pair and _has_counterpart(node._target) else None
    if node._op == "call_module":
        module: Any = find_attribute(memory.root, node._target)[0]
        entry = _MODULES.get(type(module))
        if entry is None or has_hooks(module) or not node._args:
            return None
        return "call_function", entry[0], node._args[:1], {name: getattr(module, name) for name in entry[1]}
    target = node._target
    if target in PLAIN_FORM:
        # `+=` also means lists and numbers.
        return ("call_function", PLAIN_FORM[target], node._args, node._kwargs) if memory.is_tensor(written) else None
    if isinstance(target, torch._ops.OpOverload):
        return _without_underscore(node)
    if getattr(target, "__module__", None) == "torch.nn.functional":
        return _without_inplace(node)
    name = getattr(target, "__name__", "")
    if not name.endswith("_") or name.endswith("__") or not _has_counterpart(name):
        return None
    for home in (torch, torch._C._nn):
        if getattr(home, name, None) is target and hasattr(home, name[:-1]):
            return "call_function", getattr(home, name[:-1]), node._args, node._kwargs
    return None


def _without_inplace(node: Node) -> _Form | None:
    try:
        names = list(inspect.signature(node._target).parameters)
    except (TypeError, ValueError):
        return None
    if "inplace" not in names:
        return None
    place = names.index("inplace")
    args = (*node._args[:place], False, *node._args[place + 1 :]) if place < len(node._args) else node._args
    return (
        "call_function",
        node._target,
        args,
        {**node._kwargs, "inplace": False} if place >= len(args) else node._kwargs,
    )


def _without_underscore(node: Node) -> _Form | None:
    """The ATen operator that computes what one in place writes."""
    home, _, name = node._target._schema.name.partition("::")
    if home != "aten" or not name.endswith("_") or name.endswith("__") or not _has_counterpart(name):
        return None
    if name == "copy_":
        return None  # `copy` has no derivative
    pure = getattr(getattr(torch.ops.aten, name[:-1]), node._target._overloadname)
    return "call_function", pure, node._args, node._kwargs


def _has_counterpart(name: str) -> bool:
    """Whether an operator in place changes nothing but numbers, and has a pure one of the same arguments."""
    packet, pure = getattr(torch.ops.aten, name, None), getattr(torch.ops.aten, name[:-1], None)
    if packet is None or pure is None:
        return False
    return not any(
        torch.Tag.inplace_view in overload.tags or overload._overloadname not in pure.overloads()
        for overload in overloads_of(packet)
    )


def _convert(node: Node, form: _Form, later: dict[Node, list[Node]]) -> bool:
    """Rewrite the node where it stands, and let everything after it that used the written value use the result."""
    graph = node.graph
    written = form[2][0]
    old = node._op, node._target, node._args, node._kwargs
    _set(node, *form)
    if is_impure(node):
        _set(node, *old)
        return False
    result = node
    if any(isinstance(source, Node) and source is not written for source in node._inputs):
        # A write keeps the type of what it writes; a computation takes the wider one.
        with graph.inserting_after(node):
            if isinstance(node._target, torch._ops.OpOverload):
                result = graph.call_function(torch.ops.aten.type_as.default, (node, written))
            else:
                result = graph.call_method("type_as", (node, written))
        inherit_origin(result, node)
        for user in list(node._users):
            if user is not result:
                user.replace_input_with(node, result)
    for user in reversed(later.pop(written, [])):
        if written in user._inputs:
            user.replace_input_with(written, result)
    if result is not node:
        later[written] = [result]
    return True


def _set(node: Node, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    node.op, node.target = op, target
    node._set_arguments(tuple(args), kwargs)
