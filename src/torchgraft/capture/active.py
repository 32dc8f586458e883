"""The tracer at work in this thread, and the process-wide patches that consult it.
A patched function asks for its own thread's tracer and, where there is none, does exactly what the original does; so other
threads may trace or run eager models meanwhile. What the patches record is decided by the tracer.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable
from typing import Any

_MISSING = object()
_lock = threading.RLock()


class _Active(threading.local):
    tracer: Any = None


active = _Active()


class Patch:
    """One replaced attribute or dictionary entry, in place while at least one tracer needs it."""

    __slots__ = ("holder", "name", "original", "replacement", "users")

    def __init__(self, holder: Any, name: str, replacement: Callable[..., Any]) -> None:
        self.holder = holder
        self.name = name
        self.replacement = replacement
        self.original: Any = _MISSING
        self.users = 0

    def acquire(self) -> None:
        """Put the replacement in place if it is not."""
        with _lock:
            self.users += 1
            if self.users == 1:
                entries = self.holder if isinstance(self.holder, dict) else vars(self.holder)
                self.original = entries.get(self.name, _MISSING)
                self._set(self.replacement)

    def release(self) -> None:
        """Put the original back once nobody needs the replacement."""
        with _lock:
            self.users -= 1
            if self.users > 0:
                return
            entries = self.holder if isinstance(self.holder, dict) else vars(self.holder)
            # Somebody else (torch.fx, say) may have patched on top of us and will put our harmless replacement back.
            if entries.get(self.name) is self.replacement:
                self._set(self.original)

    def _set(self, value: Any) -> None:
        if isinstance(self.holder, dict):
            if value is _MISSING:
                self.holder.pop(self.name, None)
            else:
                self.holder[self.name] = value
        elif value is _MISSING:
            delattr(self.holder, self.name)
        else:
            setattr(self.holder, self.name, value)


# Patches of dictionary entries by (id of dictionary, name): two tracers that need the same one share it.
_shared: dict[tuple[int, str], Patch] = {}


def shared_patch(holder: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> Patch | None:
    """The patch of `holder[name]`; `make` turns the original into the replacement. None where there is no such name."""
    key = (id(holder), name)
    with _lock:
        patch = _shared.get(key)
        if patch is not None and patch.holder is holder and patch.users > 0:
            return patch
        entries = holder if isinstance(holder, dict) else vars(holder)
        original = entries.get(name, _MISSING)
        if original is _MISSING:
            original = getattr(builtins, name, _MISSING)
        if original is _MISSING:
            return None
        patch = _shared[key] = Patch(holder, name, make(original))
        return patch
