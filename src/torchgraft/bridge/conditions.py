"""Conditions on the inputs of a program: Python expressions over their names, which one function checks on every call.
Which conditions an exported program has is found in `input_guards.py`; what is said where one does not hold is the
business of who checks.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

from torchgraft.ir.guards import misfit_of_tensor

# Given a condition that does not hold, the expression on its left side, and what that is; raises.
Refuse = Callable[[str, str, Any], None]


def compiled(names: Iterable[str], conditions: Iterable[str], refuse: Refuse) -> Callable[..., None]:
    """A function of the inputs, in the order of `names`, that calls `refuse` where a condition does not hold.

    One function for all conditions: it runs on every call, and torch.compile can look into it.

    >>> compiled(["x"], ["x.dim() == 2"], lambda condition, left, found: print(condition, left, found))(torch.ones(3))
    x.dim() == 2 x.dim() 1
    """

    def require(holds: Any, condition: str, left: str, found: Callable[[], Any]) -> None:
        if not isinstance(holds, bool):  # a traced value: the condition becomes part of the traced program
            torch._assert(holds, f"{condition} does not hold")
        elif not holds:
            refuse(condition, left, found())

    lines = [f"def check({', '.join(names)}):", "    pass"]
    for condition in conditions:
        expression = ast.parse(condition, mode="eval").body
        left = ast.unparse(expression.left) if isinstance(expression, ast.Compare) else condition
        lines.append(f"    _torchgraft_require({condition}, {condition!r}, {left!r}, lambda: {left})")
    scope: dict[str, Any] = {**SYMPY_INTERP, "math": math, "inf": math.inf, "torch": torch}
    scope |= {"is_plain_tensor": is_plain_tensor, "is_exactly": is_exactly, "_torchgraft_require": require}
    exec(compile("\n".join(lines), "<conditions of a program>", "exec"), scope)
    return scope["check"]


# ---- what conditions may call ----


def is_plain_tensor(value: Any) -> bool:
    """Whether a value is a tensor of no class of its own, which a model may ask for, and without attributes."""
    return _is_traced(value) or misfit_of_tensor(value, "") is None


def is_exactly(kind: type, value: Any) -> bool:
    """Whether a value is of a type, and of none that is derived from it."""
    return type(value) is kind or _is_traced(value)


def _is_traced(value: Any) -> bool:
    return hasattr(type(value), "__torch_function__") and not issubclass(type(value), torch.Tensor)
