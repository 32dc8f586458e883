"""The tracer at work in this thread, and the process-wide patches that consult it.
A patched function asks for its own thread's tracer and, where there is none, does exactly what the original does; so other
threads may trace or run eager models meanwhile. What the patches record is decided by the tracer.
"""

from __future__ import annotations

import builtins
import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from operator import is_
from types import FunctionType
from typing import Any

_MISSING = object()
_lock = threading.RLock()


class _Active(threading.local):
    tracer: Any = None


active = _Active()


class _PausedCollection:
    """Keeps the garbage collector off while anybody traces: a trace makes only objects that stay, a hundred thousand of
    them for a large model, and looking through them again and again would take longer than making them."""

    def __init__(self) -> None:
        self._users = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with _lock:
            if self._users == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._users += 1

    def __exit__(self, *details: object) -> None:
        with _lock:
            self._users -= 1
            if self._users == 0 and self._was_enabled:
                gc.enable()


paused_collection = _PausedCollection()


class _Counted:
    """Something that is in place while at least one tracer needs it; `users` counts them."""

    __slots__ = ("users",)

    def acquire(self) -> None:
        """Put it in place if it is not."""
        acquire_all([self])

    def release(self) -> None:
        """Take it away once nobody needs it."""
        release_all([self])


class Patch(_Counted):
    """One replaced attribute or dictionary entry, in place while at least one tracer needs it."""

    __slots__ = ("_entries", "holder", "name", "original", "replacement")

    def __init__(self, holder: Any, name: str, replacement: Callable[..., Any]) -> None:
        self.holder = holder
        self.name = name
        self.replacement = replacement
        self.original: Any = _MISSING
        self.users = 0
        # What can be read and written like a dictionary; a class cannot be written so.
        self._entries: Any = holder if isinstance(holder, dict) else vars(holder)

    def put_in_place(self) -> None:
        """Put the replacement there, whoever needs it; the lock is held."""
        found = self._entries.get(self.name, _MISSING)
        if found is not self.replacement:  # which somebody may have put back late
            self.original = found
        if type(self._entries) is dict:
            self._entries[self.name] = self.replacement
        else:
            setattr(self.holder, self.name, self.replacement)

    def take_away(self) -> None:
        """Put the original back; the lock is held."""
        entries, original = self._entries, self.original
        # Somebody else (torch.fx, say) may have patched on top of us and will put our harmless replacement back.
        if entries.get(self.name) is not self.replacement:
            return
        if type(entries) is not dict:
            delattr(self.holder, self.name) if original is _MISSING else setattr(self.holder, self.name, original)
        elif original is _MISSING:
            del entries[self.name]
        else:
            entries[self.name] = original


class CodePatch(_Counted):
    """A Python function made to do something else while at least one tracer needs it.

    Replacing a method on `torch.nn.Module` makes Python visit every subclass (0.4 ms for `__getattr__`, a third of the time
    it takes to trace a ResNet-50); replacing the code inside the method costs nothing. `original` is a function that does
    what the patched one did before.
    """

    __slots__ = ("_code", "function", "lent", "original")

    def __init__(self, function: FunctionType) -> None:
        self.function = function
        self._code = function.__code__
        self.original = FunctionType(
            self._code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        self.users = 0

    def lend(self, replacement: FunctionType) -> None:
        """Say what the function does meanwhile.

        Its code will see the globals of the patched function, so the names it needs that start with `_torchgraft_` are
        copied there. They stay: another thread may be inside the lent code when the old code is put back.
        """
        self.lent = replacement.__code__
        if self.lent.co_freevars != self._code.co_freevars:
            raise TypeError(
                f"{replacement.__name__} closes over {self.lent.co_freevars}, but {self.function.__qualname__} over "
                f"{self._code.co_freevars}; Python swaps codes only where these agree"
            )
        for name in self.lent.co_names:
            if name.startswith("_torchgraft_"):
                self.function.__globals__[name] = replacement.__globals__[name]

    def put_in_place(self) -> None:
        """Put the lent code there; the lock is held."""
        self.function.__code__ = self.lent

    def take_away(self) -> None:
        """Put the old code back; the lock is held."""
        self.function.__code__ = self._code


# Patches of many entries that are in place, by the identity of the dictionary, in the order in which they came.
_in_place: dict[int, list[NamespacePatch]] = {}


class NamespacePatch(_Counted):
    """Many replaced entries of one dictionary, put in place and back together."""

    __slots__ = ("_expected", "holder", "originals", "previous", "replacements")

    def __init__(self, holder: dict[str, Any], replacements: dict[str, Callable[..., Any]]) -> None:
        self.holder = holder
        self.replacements = replacements
        self.originals = {name: holder[name] for name in replacements}
        self.previous = dict(self.originals)
        self.users = 0
        # What was there when the replacements were last told what to fall back to.
        self._expected: tuple[Any, ...] | None = None

    def put_in_place(self) -> None:
        """Put the replacements there; the lock is held."""
        # Usually the originals; but torch.fx may be tracing around us and have put its own there.
        now = tuple(map(self.holder.get, self.originals))
        if self._expected is None or not all(map(is_, now, self._expected)):
            self.previous = {name: self._found(name, value) for name, value in self.originals.items()}
            for name, value in self.previous.items():
                self.replacements[name].__torchgraft_fallback__[0] = value  # type: ignore[attr-defined]
            self._expected = now
        _in_place.setdefault(id(self.holder), []).append(self)
        self.holder.update(self.replacements)

    def _found(self, name: str, original: Any) -> Any:
        """What is in the place of a replacement. Somebody may have put the replacement itself back there, late."""
        found = self.holder.get(name, original)
        return original if found is self.replacements[name] else found

    def take_away(self) -> None:
        """Put back what was there before; the lock is held."""
        layers = _in_place[id(self.holder)]
        place = layers.index(self)
        layers.remove(self)
        found = self.previous
        if place < len(layers):  # another patch of the same names came later, and falls back to this one
            above = layers[place]
            found = {name: value for name, value in found.items() if name not in above.replacements}
            above._now_over(self.previous)
        self.holder.update(found)

    def _now_over(self, values: dict[str, Any]) -> None:
        """What this patch covers has been taken away; fall back to what was under that."""
        for name in values.keys() & self.replacements.keys():
            self.previous[name] = values[name]
            self.replacements[name].__torchgraft_fallback__[0] = values[name]  # type: ignore[attr-defined]
        self._expected = None


def acquire_all(patches: Iterable[Any]) -> None:
    """Put many patches in place; one lock for all of them."""
    with _lock:
        for patch in patches:
            patch.users += 1
            if patch.users == 1:
                patch.put_in_place()
                _needed[id(patch)] = patch


def release_all(patches: Iterable[Any]) -> None:
    """Take many patches away, the last one first."""
    with _lock:
        for patch in reversed(list(patches)):
            patch.users -= 1
            if patch.users == 0:
                patch.take_away()
                del _needed[id(patch)]


# The patches that are in place, in the order in which they came.
_needed: dict[int, Any] = {}


class _CompilerFinder(MetaPathFinder):
    """Has torch's compiler, which torch imports in the middle of some calls, imported as if nobody was tracing: it keeps tables
    of torch's functions, and with ours in them could not compile any more what calls those."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """The compiler, with a loader that knows of the patches; nothing else."""
        if fullname != "torch._dynamo":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_without_patches, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _without_patches(run: Callable[[Any], Any], module: Any) -> None:
    with _lock:
        patches, tracer = list(_needed.values()), active.tracer
        for patch in reversed(patches):
            patch.take_away()
        active.tracer = None
        try:
            run(module)
        finally:
            active.tracer = tracer
            for patch in patches:
                patch.put_in_place()


if "torch._dynamo" not in sys.modules:
    sys.meta_path.insert(0, _CompilerFinder())


# Patches by (id of holder, name), kept for good: two tracers that need the same one share it.
_shared: dict[tuple[int, str], Patch] = {}


def shared_patch(holder: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> Patch | None:
    """The patch of `holder[name]`; `make` turns the original into the replacement. None where there is no such name."""
    key = (id(holder), name)
    entries = holder if isinstance(holder, dict) else vars(holder)
    with _lock:
        patch = _shared.get(key)
        current = entries.get(name, _MISSING)
        if patch is not None and patch.holder is holder:
            # Its replacement may be there although nobody needs it: put back by somebody who had patched on top of it.
            if patch.users > 0 or patch.original is current or patch.replacement is current:
                return patch
        original = getattr(builtins, name, _MISSING) if current is _MISSING else current
        if original is _MISSING:
            return None
        patch = _shared[key] = Patch(holder, name, make(original))
        patch.original = current
        return patch
