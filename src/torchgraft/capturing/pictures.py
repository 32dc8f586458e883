"""Pictures of single objects: what was in a list or an array, how far a generator of random numbers had come.
Which objects are pictured, and what it means that one has changed, is said in `model_state.py` and `outside_state.py`.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple

import torch

# Exactly these: a class of somebody's own may do anything when it is asked for an item.
CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})
_BY_VALUE = (int, float, str, bool, bytes)
_MISSING = object()


class Picture(NamedTuple):
    """The state that one object had: whether it still has it, and how to put it back."""

    is_same: Callable[[], bool]
    put_back: Callable[[], Any]


def picture_of(value: Any) -> Picture | None:
    """A picture of something whose state is in no attribute: a generator of random numbers, or an array."""
    if isinstance(value, random.Random):
        state = value.getstate()
        return Picture(lambda: value.getstate() == state, lambda: value.setstate(state))
    if isinstance(value, torch.Generator):
        before = value.get_state()
        return Picture(lambda: torch.equal(value.get_state(), before), lambda: value.set_state(before))
    numpy = sys.modules.get("numpy")
    return None if numpy is None else _picture_of_numpy(numpy, value)


def _picture_of_numpy(numpy: Any, value: Any) -> Picture | None:
    if isinstance(value, numpy.ndarray):
        content = value.copy()
        same = lambda: value.tobytes() == content.tobytes()  # noqa: E731 (NaN is the same as itself here)
        return Picture(same, lambda: numpy.copyto(value, content))
    if isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
        source = value.bit_generator if isinstance(value, numpy.random.Generator) else value._bit_generator
        state = source.state
        return Picture(lambda: repr(source.state) == repr(state), lambda: setattr(source, "state", state))
    return None


def picture_of_container(container: Any, is_memo: Callable[[Any], bool] = lambda value: False) -> Picture:
    """A picture of what a container holds; a dict to which only memos were added counts as the same."""
    content = container.copy()

    def is_the_same() -> bool:
        return same_content(container, content) or only_memos_added(container, content, is_memo)

    return Picture(is_the_same, lambda: put_content_back(container, content))


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
