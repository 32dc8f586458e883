"""What people say about their functions and modules: that calls must stay (`has_side_effect`), or only compute (`pure`).
What is found out about a call is said in the other files of this folder.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import torch

from torchgraft.ir.leaf_functions import chooses_when_compiled
from torchgraft.ir.node import _side_effectful_functions

Marked = TypeVar("Marked")
PURE, _EFFECT = "__torchgraft_pure__", "__torchgraft_effect__"


def pure(function_or_class: Marked) -> Marked:
    """Declare that a function, a module or a class of modules does nothing but compute its result from its arguments and state.

    Calls of Python code that is not torch's may do anything, and passes keep them and their order. What is marked may be
    removed, merged and moved like an operator of torch; its result may still be a view of its arguments.

    >>> @pure
    ... def double(x):
    ...     return x * 2
    >>> double(3)
    6
    """
    setattr(function_or_class, PURE, True)
    return function_or_class


def is_declared_pure(target: Any) -> bool:
    """Whether someone said that calls of `target` only compute."""
    if isinstance(target, torch.nn.Module):  # of a subclass of a class that is marked nothing was said
        return PURE in vars(target) or PURE in vars(type(target))
    return getattr(target, PURE, False) is True or chooses_when_compiled(target)


def is_declared_effect(target: Any) -> bool:
    """Whether someone said that calls of `target` must stay: by `has_side_effect` (torch.fx's too) or by attribute."""
    try:
        if target in _side_effectful_functions or target in _declared_to_torch():
            return True
    except TypeError:
        pass
    return getattr(target, _EFFECT, False) is True


def declared_effects() -> int:
    """How many functions were declared so far; grows with every declaration."""
    return len(_side_effectful_functions) + len(_declared_to_torch())


def _declared_to_torch() -> Any:
    # Libraries declare effects to torch.fx (the collectives of torch.distributed do); read where it is loaded anyway.
    module = sys.modules.get("torch.fx.node")
    return () if module is None else module._side_effectful_functions
