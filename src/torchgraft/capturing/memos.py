"""What remembers numbers beyond a watched run: a function that remembers its results (`functools.lru_cache`) answers anew when
it is asked about a symbolic number, and tables that have one as a key when the run is over lose it again.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from types import CellType, FrameType, MethodType
from typing import Any

import torch

from torchgraft.capturing.active import Patch, active
from torchgraft.capturing.dtypes import FlowingDtype
from torchgraft.capturing.reads import KeepWhole, RunAgain, at_line
from torchgraft.capturing.sizes import unwrapped
from torchgraft.capturing.symbolic.questions import called_function
from torchgraft.ir.origin import is_user_code

# By identity: the function that remembers, and what puts another in its place wherever it is known by a name.
_known: dict[int, tuple[Any, list[Any]]] = {}


def memo_patches() -> list[Any]:
    """Patches of the functions that are known to be asked about symbolic numbers."""
    return [patch for _, patches in _known.values() for patch in patches]


def before_remembering() -> None:
    """Called where a symbolic number is to be a key: raises if it would be one of a function that remembers its results."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_user_code(frame.f_code):
        frame = frame.f_back
    called = None if frame is None else called_function(frame)
    function = called.__func__ if isinstance(called, MethodType) else called
    if not hasattr(function, "cache_info") or not hasattr(function, "__wrapped__"):
        return
    if id(function) in _known:  # it is also known in a way that is not seen from here
        raise TypeError("a symbolic number cannot be remembered")
    classes = type(called.__self__).__mro__ if isinstance(called, MethodType) else ()
    holders = [frame.f_globals, *classes] if frame is not None else []
    raise RunAgain(lambda: _answer_anew(function, holders))


def _answer_anew(function: Any, holders: list[Any]) -> None:
    """Have a function that remembers answer anew, in the runs to come, where it is asked about symbolic numbers."""
    # Asked of the collector too, which does not know all (gc.freeze).
    known = {id(holder): holder for holder in (*holders, *gc.get_referrers(function))}
    _known[id(function)] = function, list(_replaced(function, _forgetful(function), list(known.values())))


def _forgetful(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def answer(*args: Any, **kwargs: Any) -> Any:
        tracer = active.tracer
        if tracer is None or tracer._switching or not _has_symbol((args, kwargs)):
            return function(*args, **kwargs)
        before = tracer.unwatched(torch.get_rng_state)
        result = function.__wrapped__(*args, **kwargs)
        if not tracer.unwatched(torch.equal, before, tracer.unwatched(torch.get_rng_state)):
            raise KeepWhole(tracer._modules[-1], f"it remembers what it has drawn at random{at_line()}")
        return result

    answer.cache_info, answer.cache_clear = function.cache_info, function.cache_clear  # type: ignore[attr-defined]
    return answer


def _has_symbol(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_symbol, value.values()))
    if isinstance(value, (tuple, list)):
        return any(map(_has_symbol, value))
    return unwrapped(value) is not None or type(value) is FlowingDtype


def _replaced(function: Any, replacement: Callable[..., Any], holders: list[Any]) -> Iterator[Any]:
    """Patches of every name that a function goes by: in files, classes, objects and closures."""
    own = {id(cell) for cell in replacement.__closure__ or ()}
    seen: set[tuple[int, str]] = set()
    for holder in holders:
        if isinstance(holder, CellType) and id(holder) not in own:
            yield _CellPatch(holder, function, replacement)
        elif isinstance(holder, (dict, type)) and holder is not replacement.__dict__:
            owner = _owner(holder, function) if isinstance(holder, dict) else holder
            table = owner if isinstance(owner, dict) else vars(owner)
            for name in [name for name, value in table.items() if value is function and isinstance(name, str)]:
                if (id(owner), name) not in seen:
                    seen.add((id(owner), name))
                    yield Patch(owner, name, replacement)


def _owner(names: dict[Any, Any], function: Any) -> Any:
    """What to write in to change a table of names: it, or the class whose attributes it has."""
    classes = [item for item in gc.get_referrers(names) if isinstance(item, type)]
    return next((cls for cls in classes if any(value is function for value in vars(cls).values())), names)


class _CellPatch:
    """Another function in the place of one that a closure holds, as long as somebody traces."""

    def __init__(self, cell: CellType, original: Any, replacement: Any) -> None:
        self.cell, self.original, self.replacement = cell, original, replacement
        self.users = 0

    def put_in_place(self) -> None:
        self.cell.cell_contents = self.replacement

    def take_away(self) -> None:
        self.cell.cell_contents = self.original


def forget(numbers: list[Any]) -> bool:
    """Take numbers of a run that is over out of the tables that still have them as keys; whether there were any."""
    found = False
    pending = [(number, 0) for number in numbers]
    while pending:
        key, depth = pending.pop()
        for holder in gc.get_referrers(key):
            if holder is numbers or holder is pending:
                continue
            if isinstance(holder, (dict, set)) and any(item is key for item in holder):
                found = True
                holder.pop(key) if isinstance(holder, dict) else holder.discard(key)
            elif isinstance(holder, tuple) and depth < 3:
                pending.append((holder, depth + 1))
    return found
