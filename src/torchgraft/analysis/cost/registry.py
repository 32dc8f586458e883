"""The table of formulas: which function says how many FLOPs an operator does, and how to add to it.
The formulas themselves are in `formulas.py` and `elementwise.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from torchgraft.errors import GraftError

Function = TypeVar("Function", bound=Callable[..., int])


@dataclass(frozen=True)
class Formula:
    """How to count one operator; `multiply_adds` says that its FLOPs come in pairs, one multiplication and one addition."""

    function: Callable[..., int]
    multiply_adds: bool = False


# Operators by name (all overloads) or overload; functions and module classes that a node calls.
FORMULAS: dict[Any, Formula] = {}


def flop_formula(*targets: Any, multiply_adds: bool = False) -> Callable[[Function], Function]:
    """Say how many FLOPs an operator does; usable as a decorator, and the last registration wins.

    A target is an operator (`torch.ops.mylib.foo`, or one overload of it), counted wherever it runs, or a function or module
    class, counted where a node calls it. The formula gets the arguments of the call, tensors as fakes, and its result as
    `result`; `multiply_adds` says that the FLOPs are multiply-adds, two each, so that they count as MACs too.

    >>> @flop_formula(torch.ops.aten.linalg_cross, multiply_adds=False)
    ... def cross(first, second, *rest, result, **options):
    ...     return 9 * result.numel() // 3
    """
    if not targets or not all(callable(target) for target in targets):
        raise GraftError(
            f"flop_formula needs the operators, functions or module classes that it is for, not {targets!r}; "
            "write @flop_formula(torch.ops.mylib.foo)"
        )

    def register(function: Function) -> Function:
        for target in targets:
            FORMULAS[target] = Formula(function, multiply_adds)
        return function

    return register


def formula_of_operator(func: Any) -> Formula | None:
    """The formula of an operator: of its overload, of its name, or of the name without the underscore of in-place forms."""
    found = FORMULAS.get(func)
    if found is not None or not isinstance(func, torch._ops.OpOverload):
        return found
    packet = func.overloadpacket
    found = FORMULAS.get(packet)
    name = packet.__name__
    if found is None and name.endswith("_") and not name.endswith("__"):
        found = FORMULAS.get(getattr(getattr(torch.ops, func.namespace), name[:-1], None))
    return found


def formula_of_call(op: str, target: Any) -> Formula | None:
    """The formula registered for what a node calls, where it is a function or the class of a module."""
    if op not in ("call_function", "call_module"):
        return None
    try:
        found = FORMULAS.get(target)
    except TypeError:  # not every callable can be a key
        return None
    is_operator = isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
    return None if is_operator else found
