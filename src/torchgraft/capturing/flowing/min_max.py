"""`min`, `max` and the functions of `math` during a watched run: they keep symbolic numbers symbolic, which Python's own would
force to be plain. The numbers themselves are in `sizes.py`.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

from torchgraft.capturing.flowing.sizes import combine, unwrapped, wrapped
from torchgraft.capturing.patching.active import NamespacePatch, Patch, active


def _symbolic(original: Callable[..., Any], count: int | None = None) -> Callable[..., Any]:
    """A function that does not force its arguments, if that many numbers are given, to be plain; what it says yes or no to
    decides something."""

    def function(*args: Any, **kwargs: Any) -> Any:
        if active.tracer is not None and not kwargs and (count is None or len(args) == count):
            numbers = [unwrapped(value) for value in args]
            known = next((number for number in numbers if number is not None), None)
            if known is not None and all(isinstance(value, (int, float)) for value in args):
                operands = [number or known.wrap_int(value) for number, value in zip(numbers, args, strict=True)]
                result = combine(original, original.__name__, *operands)
                return result._decide() if type(result.value) is bool else wrapped(result)
        return original(*args, **kwargs)

    function.__torchgraft_fallback__ = [original]  # type: ignore[attr-defined]
    return function


# Those left out keep numbers symbolic by themselves, or take many numbers at once.
_MATHEMATICS = [
    name
    for name, function in vars(math).items()
    if callable(function)
    and name[0] != "_"
    and name not in ("ceil", "floor", "trunc", "prod", "fsum", "dist", "sumprod")
]
BUILTIN_PATCHES = [
    NamespacePatch(vars(math), {name: _symbolic(getattr(math, name)) for name in _MATHEMATICS}),
    Patch(builtins, "min", _symbolic(min, 2)),
    Patch(builtins, "max", _symbolic(max, 2)),
]
