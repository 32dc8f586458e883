"""Pictures of single objects: what was in a list or an array, how far a generator of random numbers had come.
Which objects are pictured, and what it means that one has changed, is said in `model_state.py` and `outside_state.py`.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from operator import eq, is_
from typing import Any

import torch

# Exactly these: a class of somebody's own may do anything when it is asked for an item.
CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})
_BY_VALUE = (int, float, str, bool, bytes)
_MISSING = object()


# Puts an object back into the state in which it was pictured, and says whether it had been changed.
Picture = Callable[[], bool]


def picture_of(value: Any) -> Picture | None:
    """A picture of something whose state is in no attribute: a generator of random numbers, or an array."""
    if isinstance(value, random.Random):
        return _picture(value.getstate, value.setstate)
    if isinstance(value, torch.Generator):
        return _picture(value.get_state, value.set_state, torch.equal)
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


def picture_of_iterator(holder: Any, name: Any, iterator: Any) -> Picture | None:
    """A picture of an iterator in a dict or a list; one that moved is replaced by a copy that did not."""
    try:
        before, state = copy.copy(iterator), repr(iterator.__reduce__())
    except TypeError:  # a generator, which cannot be copied
        return None

    def restore() -> bool:
        if repr(iterator.__reduce__()) == state:
            return False
        holder[name] = before
        return True

    return restore


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
