"""How far the shared random numbers of Python and numpy have come. Their states are 2,500 bytes each, and asking for them makes a
thousand objects; whether one has changed at all is seen by a look at those bytes.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

# The methods themselves: the functions of the module are patched during a run.
_read_python, write_python = random._inst.getstate, random._inst.setstate
_WORDS = 624


class SharedState:
    """The state of a generator that everybody shares, asked for only if its bytes have changed since it was last known."""

    def __init__(self, read: Callable[[], Any], look: Callable[[], bytes | None]) -> None:
        self._read, self._look = read, look
        self._bytes: bytes | None = None
        self._state: Any = None

    def now(self) -> Any:
        """The state; as long as nothing was drawn, the very same object."""
        seen = self._look()
        if seen is None or seen != self._bytes:
            self._state, self._bytes = self._read(), seen
        return self._state


# ---- Python's ----


def _find_python_bytes() -> Callable[[], bytes | None]:
    """Where CPython keeps them: behind the header of the object, first the place among the words and then the words."""
    start, size = id(random._inst) + object.__basicsize__, 4 * (_WORDS + 1)
    internal = _read_python()[1]
    expected = struct.pack(f"={_WORDS + 1}I", internal[-1], *internal[:-1])
    if (
        sys.implementation.name != "cpython"
        or random._inst.__sizeof__() < size
        or ctypes.string_at(start, size) != expected
    ):
        return lambda: None
    # The number that gauss() keeps for its next call is no part of the words.
    return lambda: None if random._inst.gauss_next is not None else ctypes.string_at(start, size)  # type: ignore[attr-defined]


python_numbers = SharedState(_read_python, _find_python_bytes())


# ---- numpy's ----


def _generator() -> Any:
    numpy = sys.modules.get("numpy")
    return getattr(getattr(numpy, "random", None), "mtrand", None)


def _read_numpy() -> Any:
    generator = _generator()
    return None if generator is None else generator._rand.get_state(legacy=False)


def _numpy_bytes() -> bytes | None:
    generator = _generator()
    if generator is None:
        return None
    source = generator._rand._bit_generator
    # A normal number that is kept for the next call is no part of the bytes.
    if type(source).__name__ != "MT19937" or numpy_numbers._state is None or numpy_numbers._state["has_gauss"]:
        return None
    return bytes(ctypes.string_at(source.ctypes.state_address, 4 * (_WORDS + 1)))


numpy_numbers = SharedState(_read_numpy, _numpy_bytes)


def write_numpy(state: Any) -> None:
    """Set it back to a state."""
    _generator()._rand.set_state(state)


def same_numpy(before: Any, now: Any) -> bool:
    """Whether two states are the same."""
    return before is now or (
        before["state"]["pos"] == now["state"]["pos"]
        and before["has_gauss"] == now["has_gauss"]
        and bool((before["state"]["key"] == now["state"]["key"]).all())
    )
