"""Functions that remember results (`functools.lru_cache`) during a watched run: they answer anew about symbolic numbers and
dtypes, so that sizes stay free; what they are asked about is a key that no table has. Other tables are given plain keys.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torchgraft.capturing.symbolic.questions import called_function
from torchgraft.ir.origin import user_frame


def is_remembered(remembering: dict[int, Any]) -> bool:
    """Whether what is about to be hashed is an argument of a function that remembers its results; that is noted by identity."""
    frame = user_frame()
    called = None if frame is None else called_function(frame)
    function = called.__func__ if isinstance(called, MethodType) else called
    if not hasattr(function, "cache_clear") or not hasattr(function, "__wrapped__"):
        return False
    remembering[id(function)] = function
    return True


def forget(remembering: dict[int, Any]) -> None:
    """Have functions forget what they remember: a run has put results of its own there, and the next would find them."""
    for function in remembering.values():
        function.cache_clear()
