"""Pictures of single objects: what was in a list, an array or a variable that a function closes over, how far a generator of
random numbers had come. Which objects are pictured, and what it means that one has changed, is said in `model_state.py` and
`outside_state.py`.
"""

from __future__ import annotations

import argparse
import array
import functools
import os
import queue
import random
import sys
import threading
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar, copy_context
from operator import eq, is_
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch

from torchgraft.errors import TraceError
from torchgraft.ir.graph import Graph
from torchgraft.ir.origin import is_user_code
from torchgraft.ir.structures import slots_of

# How far into what a model holds is looked: a trainer, and all that it knows, may be among it.
DEEPEST = 8
# Exactly these: a class of somebody's own may do anything when it is asked for an item.
CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})
_BY_VALUE = (int, float, str, bool, bytes)
_MISSING = object()
# Objects that change in ways of their own, or that somebody else looks after.
_NOT_LOOKED_INTO = (torch.Tensor, torch.nn.Module, type, ModuleType, random.Random, Graph)
_OPEN = (SimpleNamespace, argparse.Namespace, threading.local, UserDict, UserList, ChainMap, queue.Queue)
_LIBRARIES = frozenset({"torch", "torchgraft", *sys.stdlib_module_names}) - {"__main__"}


# Puts an object back into the state in which it was pictured, and says whether it had been changed.
Picture = Callable[[], bool]


def picture_of(value: Any) -> Picture | None:
    """A picture of something whose state is in no attribute: a generator of random numbers, or an array."""
    if isinstance(value, random.Random):
        return _picture(value.getstate, value.setstate)
    if isinstance(value, torch.Generator):
        return _picture(value.get_state, value.set_state, torch.equal)
    if isinstance(value, (bytearray, array.array)):
        return _picture(lambda: value[:], functools.partial(value.__setitem__, slice(None)))
    if value is os.environ:
        return _picture(value.copy, _set_environment)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.ndarray):
        same = lambda now, before: now.tobytes() == before.tobytes()  # noqa: E731 (NaN is the same as itself here)
        return _picture(value.copy, functools.partial(numpy.copyto, value), same)
    if isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
        source = value.bit_generator if isinstance(value, numpy.random.Generator) else value._bit_generator
        same = lambda now, before: repr(now) == repr(before)  # noqa: E731 (a state has arrays in it)
        return _picture(lambda: source.state, functools.partial(setattr, source, "state"), same)
    return None


def holdings(value: Any) -> tuple[Any, list[Picture], Iterable[Any]]:
    """What an object keeps: the container, or the dict of its attributes, that can be compared and put back, if there is one;
    pictures of what it keeps anywhere else; and what it holds there, which may have something to keep in turn."""
    kind: Any = type(value)
    if kind in CONTAINERS:
        return value, [], ()
    if isinstance(value, tuple):
        return (
            None,
            [],
            list(tuple.__iter__(value)),
        )  # a class of somebody's own may not like to be asked for its length
    if kind is FunctionType:
        return _held_by_function(value) if is_user_code(value.__code__) else (None, [], ())
    if kind is MethodType:
        return None, [], (value.__self__, value.__func__)
    if kind is functools.partial:
        return None, [], (value.func, *value.args, *value.keywords.values())
    if isinstance(value, _NOT_LOOKED_INTO) or (callable(value) and not is_users_class(kind)):
        return None, [], ()
    slots, attributes = slots_of(value), getattr(value, "__dict__", None)
    if not slots:
        return attributes, [], ()
    in_slots = [getattr(value, name) for name in slots if hasattr(value, name)]
    return attributes, [_picture_of_slots(value, slots)], in_slots


def picture_of_variable(variable: ContextVar[Any]) -> Picture:
    """A picture of one context variable; one that had no value cannot be made to have none again."""
    return _picture(
        lambda: variable.get(_MISSING), lambda before: None if before is _MISSING else variable.set(before), is_
    )


def picture_of_context() -> Picture:
    """A picture of all context variables."""
    before = copy_context()

    def restore() -> bool:
        now = copy_context()
        if now == before:
            return False
        changed = [variable for variable in now if before.get(variable, _MISSING) is not now[variable]]
        for variable in changed:
            if variable in before:
                variable.set(before[variable])
        return any(variable.name not in _MEMOS_OF_PYTHON for variable in changed)

    return restore


# Context variables that Python sets when they are first asked for.
_MEMOS_OF_PYTHON = frozenset({"decimal_context"})


def _set_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@functools.cache
def is_users_class(cls: Any) -> bool:
    """Whether a class belongs neither to torch nor to Python, or is there to be written into."""
    return issubclass(cls, _OPEN) or cls.__module__.split(".")[0] not in _LIBRARIES


def _held_by_function(function: FunctionType) -> tuple[Any, list[Picture], Iterable[Any]]:
    # Writing to the defaults themselves, or to the attributes of a function that has none yet, is not looked for.
    held: list[Any] = [*(function.__defaults__ or ()), function.__kwdefaults__]
    pictures: list[Picture] = []
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # a variable that has no value yet
            continue
        pictures.append(_picture_of_cell(cell))
    return function.__dict__ or None, pictures, held


def _picture_of_cell(cell: CellType) -> Picture:
    put = functools.partial(setattr, cell, "cell_contents")
    value = cell.cell_contents
    if not is_iterator(value):
        return _picture(lambda: cell.cell_contents, put, is_)
    picture = picture_of_iterator(value, put)
    if picture is None:
        raise TraceError(
            f"cannot capture a function that closes over a {type(value).__name__}: running it would take from it, and that "
            "cannot be undone; close over a list or a number instead"
        )
    return picture


def _picture_of_slots(value: Any, names: tuple[str, ...]) -> Picture:
    def read() -> list[Any]:
        return [getattr(value, name, _MISSING) for name in names]

    def write(items: list[Any]) -> None:
        for name, item in zip(names, items, strict=True):
            object.__delattr__(value, name) if item is _MISSING else object.__setattr__(value, name, item)

    return _picture(read, write, lambda now, before: all(map(is_, now, before)))


def picture_of_iterator(iterator: Any, put: Callable[[Any], None]) -> Picture | None:
    """A picture of an iterator; one that moved is replaced, by `put`, with a copy that did not."""
    try:
        before, state = _copied_iterator(iterator), repr(_position(iterator))
    except TypeError:  # a generator, which cannot be copied
        return None

    def restore() -> bool:
        if repr(_position(iterator)) == state:
            return False
        put(before)
        return True

    return restore


def _copied_iterator(value: Any) -> Any:
    """A copy that goes on from the same place, and so do those that it takes from; of what they are in, a new one."""
    if type(value) in (tuple, list):
        return type(value)(map(_copied_iterator, value))
    if not is_iterator(value):
        return value
    make, args, *states = value.__reduce__()
    result = make(*_copied_iterator(args))
    for state in states:
        if state is not None:
            result.__setstate__(_copied_iterator(state))
    return result


def _position(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_position, value))
    return _position(value.__reduce__()) if is_iterator(value) else value


def is_iterator(value: Any) -> bool:
    """Whether a value is read by taking from it."""
    # A file is one too, but reading it is nobody's way to compute something.
    return hasattr(type(value), "__next__") and type(value).__module__ in ("builtins", "itertools")


def _picture(read: Callable[[], Any], write: Callable[[Any], Any], same: Callable[..., bool] = eq) -> Picture:
    before = read()

    def restore() -> bool:
        if same(read(), before):
            return False
        write(before)
        return True

    return restore


def picture_of_container(container: Any, is_memo: Callable[[Any], bool] = lambda value: False) -> Picture:
    """A picture of what a container holds; adding memos to a dict counts as no change."""
    content = container.copy()

    def restore() -> bool:
        if same_content(container, content):
            return False
        is_changed = not only_memos_added(container, content, is_memo)
        put_content_back(container, content)
        return is_changed

    return restore


def same_content(container: Any, content: Any) -> bool:
    """Whether a container holds what its copy holds, the same objects in the same order."""
    if len(container) != len(content):
        return False
    if not isinstance(container, dict):
        return container == content if isinstance(container, set) else all(map(is_, container, content))
    return all(map(is_, container.values(), content.values())) and all(map(is_, container, content))


def only_memos_added(container: Any, content: Any, is_memo: Callable[[Any], bool]) -> bool:
    """Whether a dict holds what its copy holds and some memos: values that every run may compute anew."""
    if not isinstance(container, dict) or any(container.get(key) is not value for key, value in content.items()):
        return False
    return all(is_memo(value) for key, value in container.items() if key not in content)


def put_content_back(container: Any, content: Any) -> None:
    """Make a container hold what its copy holds."""
    container.clear()
    container.extend(content) if isinstance(container, (list, deque)) else container.update(content)


def is_equal(now: Any, before: Any) -> bool:
    """Only plain values are compared by value."""
    return now is before or (type(now) is type(before) and isinstance(now, _BY_VALUE) and now == before)
