"""Built-in functions that a symbolic number would answer otherwise than a plain one, made to answer alike during a watched run.
The numbers themselves are in `sizes.py`.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from typing import Any

import torch

from torchgraft.capturing.active import Patch, active
from torchgraft.capturing.module_patches import TrainingFlag
from torchgraft.capturing.sizes import combine, unwrapped, wrapped
from torchgraft.ir.origin import is_user_code

_is_instance = builtins.isinstance
_STAND_INS = frozenset({torch.SymInt, torch.SymFloat, torch.SymBool, TrainingFlag})


def _asked_for_plain_value(value: Any, kind: Any) -> bool:
    if _is_instance(value, kind):
        return True
    # torch itself asks in order to tell its symbolic numbers from plain ones.
    if type(value) not in _STAND_INS or active.tracer is None or not is_user_code(sys._getframe(1).f_code):
        return False
    if type(value) is TrainingFlag:
        return _is_instance(True, kind)
    number = unwrapped(value)
    return number is not None and _is_instance(number.value, kind)


def _symbolic_choice(original: Callable[..., Any]) -> Callable[..., Any]:
    """`min` or `max` that does not force its arguments to be plain numbers when two of them are given."""

    def choice(*args: Any, **kwargs: Any) -> Any:
        if active.tracer is not None and len(args) == 2 and not kwargs:
            numbers = [unwrapped(value) for value in args]
            known = numbers[0] or numbers[1]
            if known is not None and all(type(v) in (int, float, torch.SymInt, torch.SymFloat) for v in args):
                pair = [number or known.wrap_int(value) for number, value in zip(numbers, args, strict=True)]
                return wrapped(combine(original, original.__name__, *pair))
        return original(*args, **kwargs)

    return choice


BUILTIN_PATCHES = [
    Patch(builtins, "min", _symbolic_choice(min)),
    Patch(builtins, "max", _symbolic_choice(max)),
    Patch(builtins, "isinstance", _asked_for_plain_value),
]
