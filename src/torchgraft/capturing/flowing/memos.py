"""What remembers symbolic numbers and dtypes beyond a watched run. A function that does (`functools.lru_cache`) answers anew, so
that sizes stay free: what it is asked about is a key that no table has. Other tables lose such keys when the run is over.
"""

from __future__ import annotations

import gc
import sys
from types import FrameType, MethodType
from typing import Any

from torchgraft.capturing.symbolic.questions import called_function
from torchgraft.ir.origin import is_user_code


def is_remembered(remembering: dict[int, Any]) -> bool:
    """Whether what is about to be hashed is an argument of a function that remembers its results; that is noted by identity."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_user_code(frame.f_code):
        frame = frame.f_back
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


def take_out(keys: list[Any]) -> bool:
    """Take numbers of a run that is over out of the tables that still have them as keys; whether there were any."""
    # Most are held by nobody but this list and the loop; looking through all objects for the others takes its time.
    held = [key for key in keys if sys.getrefcount(key) > 3]
    found = False
    for _ in range(4):  # a key may be part of a tuple that is the key
        if not held:
            break
        identities, outer = {id(key) for key in held}, []
        for holder in gc.get_referrers(*held):
            if isinstance(holder, (dict, set)):
                for key in [item for item in holder if id(item) in identities]:
                    found = True
                    holder.pop(key) if isinstance(holder, dict) else holder.discard(key)
            elif isinstance(holder, tuple):
                outer.append(holder)
        held = outer
    return found
