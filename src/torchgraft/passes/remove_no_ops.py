"""Take out calls that hand on what they are given: identities, copies nobody can tell from the original, and the like.
Whether a copy can be told from the original is known to `analysis/aliases.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torchgraft.analysis.aliases import Aliases
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.modules import has_hooks
from torchgraft.ir.node import Node
from torchgraft.ir.printing import known_value
from torchgraft.ir.verify import find_attribute
from torchgraft.passes.definition import Pass

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DROPOUT_FUNCTIONS = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    torch.dropout,
)
# Doing it again changes nothing.
_SETTLING_METHODS = frozenset(
    {"contiguous", "detach", "abs", "relu", "float", "double", "half", "bfloat16", "long", "int"}
)
_SETTLING_FUNCTIONS = frozenset({torch.relu, torch.abs, torch.detach, operator.abs, functional.relu})
_SETTLING_MODULES = (nn.ReLU, nn.ReLU6, nn.Hardtanh)
_LIKE_ITSELF = frozenset({"view_as", "expand_as", "reshape_as", "type_as"})
_SWAPS = frozenset({"transpose", "swapaxes", "swapdims", "t"})
_EMPTY_REGIONS = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode, torch.autocast)
_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class RemoveNoOps(Pass):
    """Remove what changes nothing.

    With `inference` dropouts that are switched off go too, and the program no longer draws in training mode. With
    `trust_types` the types noted by `propagate-shapes` are taken to hold for every run, so that `x * 1` and `x.float()`
    can go where `x` is a float.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(nn.Sequential(nn.Identity(), nn.ReLU(), nn.ReLU()))
    >>> RemoveNoOps()(program).changes
    2
    """

    inference: bool = False
    trust_types: bool = False

    def run(self, module: GraphModule) -> int:
        """Remove, and return how many nodes went."""
        removed = total = 0
        while True:
            removed = _Remover(module, self).remove()
            total += removed
            if not removed:
                return total


class _Remover:
    def __init__(self, module: GraphModule, options: RemoveNoOps) -> None:
        self.module = module
        self.options = options
        self.memory = Aliases(module.graph)
        self._rules: dict[str, Callable[[Node], Any]] = {
            "call_module": self._module_call,
            "call_function": self._function_call,
            "call_method": self._method_call,
        }

    def remove(self) -> int:
        removed = 0
        for node in self.module.graph.nodes:
            rule = self._rules.get(node._op)
            if rule is None:
                continue
            if node._target is exit_context:
                removed += self._empty_region(node)
                continue
            value = rule(node)
            if isinstance(value, Node):
                node.replace_all_uses_with(value)
                self.module.graph.erase_node(node)
                removed += 1
        return removed

    # ---- what a call hands on: a node, or None ----

    def _module_call(self, node: Node) -> Node | None:
        module: Any = find_attribute(self.module, node._target)[0]
        source = node._args[0] if node._args else None
        if not isinstance(source, Node) or len(node._args) + len(node._kwargs) != 1 or has_hooks(module):
            return None
        kind = type(module)
        if kind is nn.Identity:
            return source
        if kind in _DROPOUTS and (module.p == 0 or (self.options.inference and not module.training)):
            return source  # a dropout that is off returns its very input
        if kind in _SETTLING_MODULES and source._op == "call_module":
            before = find_attribute(self.module, source._target)[0]
            if type(before) is kind and not has_hooks(before) and _same_options(before, module):
                return source if module.inplace else self._copy(node, source)
        return None

    def _function_call(self, node: Node) -> Node | None:
        target = node._target
        args = node._args
        source = args[0] if args else node._kwargs.get("input")
        if not isinstance(source, Node):
            return None
        if target in _DROPOUT_FUNCTIONS:
            return self._dropout(node, source)
        if target is torch.clone:
            return self._copy(node, source) if _is_plain_clone(node) else None
        if target in _SETTLING_FUNCTIONS and source._op == "call_function" and source._target is target:
            if node._inputs == (source,) and not node._kwargs.get("inplace") and len(args) < 2:
                return self._copy(node, source)
        if target in (torch.transpose, torch.t, torch.swapaxes, torch.swapdims):
            return self._swap(node, source)
        if self.options.trust_types and target in (operator.mul, torch.mul, operator.truediv, torch.div, operator.sub):
            return self._arithmetic(node, source, target)
        return None

    def _method_call(self, node: Node) -> Node | None:
        target = node._target
        source = node._args[0]
        if not isinstance(source, Node):
            return None
        if target in _LIKE_ITSELF and node._args == (source, source):
            return self._view(node, source)
        if target == "clone":
            return self._copy(node, source) if _is_plain_clone(node) else None
        repeated = source._op == "call_method" and source._target == target
        if target in _SETTLING_METHODS and repeated and source._args[1:] == node._args[1:] == ():
            if not node._kwargs and not source._kwargs:
                return self._copy(node, source)
        if target in _SWAPS:
            return self._swap(node, source)
        if self.options.trust_types and target in _CASTS and len(node._args) == 1 and not node._kwargs:
            return source if _dtype(source) == _CASTS[target] else None
        return None

    def _dropout(self, node: Node, source: Node) -> Node | None:
        names = ("input", "p", "training", "inplace")
        given = {**dict(zip(names, node._args, strict=False)), **node._kwargs}
        training = given.get("training", given.get("train", True))
        is_off = training is False or (type(given.get("p")) in (int, float) and given["p"] == 0)
        if not is_off and self.options.inference and isinstance(training, Node) and training._op == "get_attr":
            is_off = find_attribute(self.module, training._target)[0] is False
        return source if is_off else None

    def _swap(self, node: Node, source: Node) -> Node | None:
        """Two swaps of the same dimensions."""
        is_same = source._op == node._op and source._target == node._target and not node._kwargs and not source._kwargs
        if not is_same or not isinstance(source._args[0], Node):
            return None
        if set(source._args[1:]) != set(node._args[1:]) or any(isinstance(a, Node) for a in node._args[1:]):
            return None
        return self._view(node, source._args[0])

    def _arithmetic(self, node: Node, source: Node, target: Any) -> Node | None:
        """`x * 1`, `x / 1` and `x - 0` of floats, which keep every bit; `x + 0` does not, as it turns -0.0 into 0.0."""
        dtype = _dtype(source)
        if len(node._args) != 2 or node._kwargs or dtype is None or not dtype.is_floating_point:
            return None
        neutral = 0 if target is operator.sub else 1
        number = node._args[1]
        return self._copy(node, source) if type(number) in (int, float) and number == neutral else None

    # ---- whether somebody could tell ----

    def _view(self, node: Node, source: Node) -> Node | None:
        """Another tensor over the same memory: the difference shows when it is written or returned."""
        memory = self.memory
        if memory.outlives(node) or (memory.has_writes and memory.is_written(node)):
            return None
        return source if memory.region[node] is None else None

    def _copy(self, node: Node, source: Node) -> Node | None:
        """A copy is as good as the original if neither is written, the caller does not get both, and both have the same
        history of gradients.
        """
        memory = self.memory
        if memory.has_writes and (memory.is_written(node) or memory.is_written(source)):
            return None
        if memory.outlives(node) and (memory.outlives(source) or memory.is_input_or_state(source)):
            return None
        return source if memory.region[node] is None else None

    def _empty_region(self, node: Node) -> int:
        """A region with nothing in it."""
        opening = node._prev
        is_empty = opening._target is enter_context and node._args[0] is opening and len(opening._users) == 1
        if not is_empty or opening._args[0] not in _EMPTY_REGIONS:
            return 0
        self.module.graph.erase_node(node)
        self.module.graph.erase_node(opening)
        return 2


def _is_plain_clone(node: Node) -> bool:
    return len(node._args) <= 1 and not (set(node._kwargs) - {"input"})


def _same_options(first: nn.Module, second: nn.Module) -> bool:
    names = ("min_val", "max_val", "inplace")
    return all(getattr(first, name, None) == getattr(second, name, None) for name in names)


def _dtype(node: Node) -> torch.dtype | None:
    dtype = getattr(known_value(node), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None
