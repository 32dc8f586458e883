"""The tracer at work in this thread, and the process-wide patches that consult it.
A patched function asks for its own thread's tracer and, where there is none, does exactly what the original does; so other
threads may trace or run eager models meanwhile. What the patches record is decided by the tracer.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable
from types import FunctionType
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


class CodePatch:
    """A Python function made to do something else while at least one tracer needs it.

    Replacing a method on `torch.nn.Module` makes Python visit every subclass (0.4 ms for `__getattr__`, a third of the time
    it takes to trace a ResNet-50); replacing the code inside the method costs nothing. `original` does what the function
    did before.
    """

    __slots__ = ("_code", "_lent", "function", "original", "users")

    def __init__(self, function: FunctionType, parameters: str, replacement: Callable[..., Any]) -> None:
        code = function.__code__
        self.function = function
        self.original = FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        name = f"_torchgraft_{function.__name__}"
        # The new code sees the function's own globals. The name stays there: another thread may be inside the new code
        # when the old one is put back.
        function.__globals__[name] = replacement
        scope: dict[str, Any] = {}
        source = f"def {function.__name__}({parameters}): return {name}({parameters})"
        exec(compile(source, __file__, "exec"), scope)
        self._code = code
        self._lent = scope[function.__name__].__code__
        self.users = 0

    def acquire(self) -> None:
        """Put the new code in place if it is not."""
        with _lock:
            self.users += 1
            if self.users == 1:
                self.function.__code__ = self._lent

    def release(self) -> None:
        """Put the old code back once nobody needs the new one."""
        with _lock:
            self.users -= 1
            if self.users == 0:
                self.function.__code__ = self._code


class NamespacePatch:
    """Many replaced entries of one dictionary, put in place and back together."""

    __slots__ = ("holder", "originals", "replacements", "users")

    def __init__(self, holder: dict[str, Any], replacements: dict[str, Callable[..., Any]]) -> None:
        self.holder = holder
        self.replacements = replacements
        self.originals = {name: holder[name] for name in replacements}
        self.users = 0

    def acquire(self) -> None:
        """Put the replacements in place if they are not."""
        with _lock:
            self.users += 1
            if self.users == 1:
                self.holder.update(self.replacements)

    def release(self) -> None:
        """Put the originals back once nobody needs the replacements."""
        with _lock:
            self.users -= 1
            if self.users == 0:
                self.holder.update(self.originals)


# Patches by (id of holder, name), kept for good: two tracers that need the same one share it.
_shared: dict[tuple[int, str], Patch] = {}


def shared_patch(holder: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> Patch | None:
    """The patch of `holder[name]`; `make` turns the original into the replacement. None where there is no such name."""
    key = (id(holder), name)
    entries = holder if isinstance(holder, dict) else vars(holder)
    with _lock:
        patch = _shared.get(key)
        current = entries.get(name, _MISSING)
        if patch is not None and patch.holder is holder and (patch.users > 0 or patch.original is current):
            return patch
        original = getattr(builtins, name, _MISSING) if current is _MISSING else current
        if original is _MISSING:
            return None
        patch = _shared[key] = Patch(holder, name, make(original))
        patch.original = current
        return patch
