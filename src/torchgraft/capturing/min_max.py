"""`min` and `max` during a watched run: they keep symbolic numbers symbolic, which Python's own would force to be plain.
The numbers themselves are in `sizes.py`.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

from torchgraft.capturing.active import Patch, active
from torchgraft.capturing.sizes import combine, unwrapped, wrapped


def _symbolic_choice(original: Callable[..., Any]) -> Callable[..., Any]:
    """`min` or `max` that does not force its arguments to be plain numbers when two of them are given."""

    def choice(*args: Any, **kwargs: Any) -> Any:
        if active.tracer is not None and len(args) == 2 and not kwargs:
            numbers = [unwrapped(value) for value in args]
            known = numbers[0] or numbers[1]
            if known is not None and all(isinstance(value, (int, float)) for value in args):
                pair = [number or known.wrap_int(value) for number, value in zip(numbers, args, strict=True)]
                return wrapped(combine(original, original.__name__, *pair))
        return original(*args, **kwargs)

    return choice


BUILTIN_PATCHES = [
    Patch(builtins, "min", _symbolic_choice(min)),
    Patch(builtins, "max", _symbolic_choice(max)),
]
