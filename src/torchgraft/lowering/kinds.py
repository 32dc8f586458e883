"""The kinds of calls in a program that is lowered: one table that says which are recorded as operators, and which stay calls.
What is done about each kind is said in `lower.py`, and for forward and backward as one program in `joint.py`.
"""

from __future__ import annotations

import enum
import math
import operator
import types
from typing import Any

import torch

from torchgraft.capturing.flowing.sizes import unwrapped
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.guards import are_different, is_guard
from torchgraft.ir.node import Node
from torchgraft.ir.structures import put_together, put_together_record
from torchgraft.lowering.tensors import TracedTensor
from torchgraft.lowering.values import concrete, flows_in, has_nodes, traced_in


class Kind(enum.Enum):
    """What a call is. All but guards, numbers and operators are run on the real tensors and stay the calls they are."""

    GUARD = "checks something"
    NUMBER = "arithmetic on sizes and other numbers"
    OPERATORS = "a call of torch on tensors, in the place of which go the operators that it runs"
    MODULE = "a module that was kept whole"
    REGION = "begins or ends a region"
    RESULT = "puts a result together"
    QUESTION = "asks what an input is"
    GRADIENT = "asks about gradients of a tensor"
    WRITE = "sets an attribute of a tensor"
    READ = "takes a part or a fact out of a value, or numbers out of torch"
    PLAIN = "a call without tensors"
    FOREIGN = "a call on tensors that torch's operators do not show: a user's function, or one that is about gradients"


SIGNS = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "truediv": "/", "mod": "%", "pow": "**"}
SIGNS |= {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_ARITHMETIC = frozenset(
    {*[getattr(operator, name) for name in SIGNS], operator.neg, min, max, int, math.ceil, math.floor}
)
_BY_TARGET: dict[Any, Kind] = {
    **dict.fromkeys((enter_context, exit_context), Kind.REGION),
    **dict.fromkeys((put_together, put_together_record), Kind.RESULT),
    **dict.fromkeys((isinstance, operator.is_, are_different, type, hasattr), Kind.QUESTION),
}
# Methods that take memory out of torch, or speak to autograd, which traced tensors know nothing of.
_METHODS: dict[str, Kind] = {
    **dict.fromkeys(("tolist", "numpy", "data_ptr"), Kind.READ),
    **dict.fromkeys(("requires_grad_", "backward", "register_hook", "retain_grad", "set_"), Kind.FOREIGN),
}
# Attributes of a tensor that are tensors computed from it, or its sizes; all others are asked of the real tensor.
_COMPUTED = frozenset({"shape", "T", "mT", "H", "mH", "real", "imag"})
_ABOUT_GRADIENTS = frozenset({"requires_grad", "is_leaf", "grad_fn", "retains_grad", "grad"})
_PLAIN_MODULES = frozenset({"builtins", "_operator", "operator", "math"})
# Torch's own functions that are no calculations.
_NO_OPERATORS = ("torch.autograd", "torch.func", "torch._functorch", "torch.utils")


def kind_of(node: Node, args: Any, kwargs: Any) -> Kind:
    """The kind of a call with these values."""
    if node.op == "call_module":
        return Kind.MODULE
    target: Any = node.target
    if node.op == "call_method":
        is_kept = target in _METHODS or not traced_in((args, kwargs)) or _has_other_tensors(args, kwargs)
        is_kept |= target == "new_tensor" and not is_constant_like(args, kwargs)
        return kind_of_kept(node, args, kwargs) if is_kept else Kind.OPERATORS
    if is_guard(target):
        return Kind.GUARD
    if target in _BY_TARGET:
        return _BY_TARGET[target]
    if _home(target) == "torchgraft.ir.input_kinds":
        return Kind.QUESTION
    if target in _ARITHMETIC and not kwargs and all(map(_is_number, args)):
        return Kind.NUMBER
    return kind_of_kept(node, args, kwargs) if _is_kept(target, args, kwargs) else Kind.OPERATORS


def kind_of_kept(node: Node, args: Any, kwargs: Any) -> Kind:
    """The kind of a call that is not taken apart into operators, or cannot be."""
    if node.target is getattr:
        return Kind.GRADIENT if args[1] in _ABOUT_GRADIENTS else Kind.READ
    if node.target is operator.getitem:
        return Kind.READ
    if not traced_in((args, kwargs)):
        return Kind.PLAIN
    if node.target is setattr and type(args[0]) is TracedTensor:
        return Kind.WRITE
    return _METHODS.get(str(node.target), Kind.FOREIGN)


def _is_kept(target: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function is not torch's, computes no tensors, or does what only real tensors can."""
    if target is torch.tensor and has_nodes(args[0]) and not isinstance(concrete(args[0]), (int, float)):
        return True
    if _has_other_tensors(args, kwargs):
        return True
    if target is getattr or target is setattr:
        return target is setattr or args[1] not in _COMPUTED or not traced_in(args)
    home = _home(target)
    if home in _PLAIN_MODULES and isinstance(target, (types.BuiltinFunctionType, type)):
        return not traced_in((args, kwargs))
    if isinstance(target, type) or isinstance(getattr(target, "__self__", None), type):
        return True  # a class, or a method of one: Parameter(...), Function.apply
    return not (home == "torch" or home.startswith("torch.") or not home) or home.startswith(_NO_OPERATORS)


def _has_other_tensors(args: Any, kwargs: Any) -> bool:
    """Whether there are tensors of kinds that are not traced."""
    return any(isinstance(flow.value, torch.Tensor) for flow in flows_in((args, kwargs)))


def is_constant_like(args: Any, kwargs: Any) -> bool:
    """Whether `x.new_tensor(...)` is given nothing but numbers that are the same in every run."""
    return len(args) == 2 and not kwargs and not has_nodes(args[1])


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or unwrapped(value) is not None


def _home(target: Any) -> str:
    return getattr(target, "__module__", None) or ""
