"""What a traced function may change outside of its model: class attributes, global variables, and what those hold.
Only what the code that runs mentions is looked at. The model's own attributes are the business of `model_state.py`.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from torchgraft.capturing.handlers import recovers
from torchgraft.capturing.parts import closed_over
from torchgraft.capturing.pictures import (
    CONTAINERS,
    Picture,
    holdings,
    is_users_class,
    picture_of,
    picture_of_container,
)
from torchgraft.ir.origin import SourceLine, asked_once, is_user_code, source_line

_MISSING = object()
_LIBRARIES = ("torch", "torchgraft", "builtins", "typing", "abc")
_PLAIN = (int, float, str, bool, bytes, complex, type(None))
_ATTRIBUTES = (*_PLAIN, tuple)
_NOT_USERS = frozenset({"torch", "torchgraft", "numpy", *sys.stdlib_module_names}) - {"__main__"}


class OutsideState:
    """Pictures of everything outside of the model that the functions of a trace mention."""

    def __init__(self, is_memo: Callable[[Any], bool], allows_notes: bool = False) -> None:
        self._is_memo = is_memo
        # Whether a function may append to a list that it closes over and never reads: that is how people watch a trace.
        self._allows_notes = allows_notes
        # Whether some function goes on after errors of torch's.
        self.recovers = False
        # Tensors and modules among what the functions keep and mention.
        self.tensors: list[torch.Tensor] = []
        self.modules: list[torch.nn.Module] = []
        # Functions that remember their results (`functools.lru_cache`).
        self.memos: list[Any] = []
        self._seen: set[int] = set()
        # (what it is called, where it is mentioned, its picture)
        self._pictures: list[tuple[str, SourceLine | None, Picture]] = []

    def watch_class(self, cls: type) -> None:
        """Watch the attributes of a module's class, and what its methods mention."""
        if id(cls) in self._seen:
            return
        self._seen.add(id(cls))
        functions, names = reached(cls)
        for base in cls.__mro__:
            # Of the bases, which may be large, only what is mentioned.
            if _is_users(base) and (base is cls or id(base) not in self._seen):
                self._watch_attributes(base, base.__qualname__, None, None if base is cls else names)
        for function in functions:
            self.watch_function(function)

    def watch_function(self, function: Any) -> None:
        """Watch what a function, a method or a callable object keeps, the global variables that it mentions, and those that
        functions it mentions do."""
        if callable(getattr(function, "cache_info", None)):
            self.memos.append(function)
        if not isinstance(function, FunctionType):
            self._watch_object("what it is called on", function, None, 0)
            function = inspect.unwrap(getattr(function, "__func__", function))
            function = function if isinstance(function, FunctionType) else vars(type(function)).get("__call__")
        if not isinstance(function, FunctionType) or not is_user_code(function.__code__):
            return
        if function.__closure__ or function.__defaults__ or function.__kwdefaults__ or function.__dict__:
            self._watch_object(f"what {function.__name__} keeps", function, None, 0)
        if id(function.__code__) in self._seen:
            return
        self._seen.add(id(function.__code__))
        self.recovers = self.recovers or recovers(function.__code__)
        scope = function.__globals__
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a variable that has no value yet
                if isinstance(cell.cell_contents, FunctionType):
                    self.watch_function(cell.cell_contents)
        for name, is_assigned, line in _mentioned(function.__code__):
            value = scope.get(name, _MISSING)
            if is_assigned:
                self._watch_binding(scope, name, value, line)
            wrapped = getattr(value, "__wrapped__", value) if callable(value) else value
            if callable(getattr(value, "cache_info", None)):
                self.memos.append(value)
            if isinstance(wrapped, FunctionType) and _home(wrapped.__module__) not in _NOT_USERS:
                self.watch_function(wrapped)
            elif isinstance(value, ModuleType):
                self._watch_module(value, function.__code__, line)
            elif value is not _MISSING:
                self._watch_value(name, value, line)

    def _watch_module(self, module: ModuleType, code: CodeType, line: SourceLine | None) -> None:
        """Watch the variables of another Python module that a function may mention."""
        if _home(module.__name__) in _NOT_USERS:
            return
        for name in {mentioned for inner in codes_in(code) for mentioned in inner.co_names}:
            value = vars(module).get(name, _MISSING)
            if value is not _MISSING and not isinstance(value, (type, ModuleType)) and not callable(value):
                self._watch_binding(vars(module), name, value, line)
                self._watch_value(name, value, line)

    def watch_object(self, name: str, value: Any) -> None:
        """Watch what an object keeps."""
        self._watch_object(name, value, None, 0)

    def _watch_binding(self, scope: dict[str, Any], name: str, value: Any, line: SourceLine | None) -> None:
        def restore() -> bool:
            if scope.get(name, _MISSING) is value:
                return False
            scope.pop(name, None) if value is _MISSING else scope.__setitem__(name, value)
            return True

        self._pictures.append((name, line, restore))

    def _watch_value(self, name: str, value: Any, line: SourceLine | None) -> None:
        kind: Any = type(value)
        if isinstance(value, type):
            if id(value) not in self._seen and _home(value.__module__) not in _NOT_USERS and _is_users(value):
                self._watch_attributes(value, name, line)
        elif kind in CONTAINERS or is_users_class(kind):
            self._watch_object(name, value, line, 0)
        elif isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif (picture := None if isinstance(value, _PLAIN) else picture_of(value)) is not None:
            self._pictures.append((name, line, picture))

    def _watch_object(self, name: str, value: Any, line: SourceLine | None, depth: int) -> None:
        if id(value) in self._seen or depth > 4:
            return
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, torch.nn.Module):
            self.modules.append(value)
        content, pictures, held = holdings(value)
        if self._allows_notes and type(value) is FunctionType:
            notes = _notes(value)
            held = [item for item in held if id(item) not in notes]
        self._seen.add(id(value))
        if content is not None:
            self._pictures.append((name, line, picture_of_container(content, self._is_memo)))
        elif not pictures and not held and (picture := picture_of(value)) is not None:
            pictures = [picture]
        self._pictures += [(name, line, picture) for picture in pictures]
        inside = content.values() if isinstance(content, dict) else content or ()
        for item in (*inside, *held):
            if not isinstance(item, _PLAIN):
                self._watch_object(name, item, line, depth + 1)

    def _watch_attributes(
        self, cls: type, name: str, line: SourceLine | None, names: frozenset[str] | None = None
    ) -> None:
        """Watch the attributes of a class, or those of certain names."""
        self._seen.add(id(cls))
        before = _plain_attributes(cls, names)

        def restore() -> bool:
            now = _plain_attributes(cls, names)
            if now == before:
                return False
            for key in now.keys() - before.keys():
                delattr(cls, key)
            for key, value in before.items():
                if vars(cls).get(key, _MISSING) is not value:
                    setattr(cls, key, value)
            return True

        self._pictures.append((name, line, restore))
        for key in vars(cls).keys() if names is None else names & vars(cls).keys():
            value = vars(cls)[key]
            if type(value) in CONTAINERS and not key.startswith("__") and id(value) not in self._seen:
                self._seen.add(id(value))
                self._pictures.append((f"{name}.{key}", line, picture_of_container(value, self._is_memo)))

    def restore(self) -> tuple[str, SourceLine | None] | None:
        """Put everything back; what had been changed first, and where it is mentioned, or None."""
        changed = [(name, line) for name, line, restore in self._pictures if restore()]
        return changed[0] if changed else None


def _home(name: str | None) -> str:
    return (name or "").split(".")[0]


@functools.lru_cache(maxsize=4096)
def _is_users(cls: Any) -> bool:
    # The class of a graph module holds its code, which is made when it is first needed.
    return _home(cls.__module__) not in _LIBRARIES and "_shared_class" not in vars(cls)


def _plain_attributes(cls: type, names: frozenset[str] | None) -> dict[str, Any]:
    table = vars(cls)
    wanted = table.keys() if names is None else names & table.keys()
    return {name: table[name] for name in wanted if isinstance(table[name], _ATTRIBUTES) and name[:2] != "__"}


# Methods that Python calls when nobody mentions them.
_ENTRIES = (
    "forward",
    "__call__",
    "__getattr__",
    "__getattribute__",
    "__setattr__",
    "__getitem__",
    "__iter__",
    "__len__",
)
_reach: dict[type, tuple[Any, tuple[FunctionType, ...], frozenset[str]]] = {}


def reached(cls: type) -> tuple[tuple[FunctionType, ...], frozenset[str]]:
    """The methods that a call of a module may come through, as far as names show, and every name they mention."""
    forward = getattr(cls, "forward", None)
    known = _reach.get(cls)
    if known is None or known[0] is not forward:
        if len(_reach) > 10_000:
            _reach.clear()
        known = _reach[cls] = forward, *_find_reached(cls)
    return known[1:]


def _find_reached(cls: type) -> tuple[tuple[FunctionType, ...], frozenset[str]]:
    found: dict[FunctionType, None] = {}
    names: set[str] = set()
    pending = list(_ENTRIES)
    while pending:
        name = pending.pop()
        if name in names:
            continue
        names.add(name)
        base = next((base for base in cls.__mro__ if name in vars(base)), None)
        if base is None or not _is_users(base):
            continue
        value = vars(base)[name]
        function = getattr(value, "fget", None) or inspect.unwrap(getattr(value, "__func__", value))
        if isinstance(function, FunctionType):
            found[function] = None
            pending += [mentioned for code in codes_in(function.__code__) for mentioned in code.co_names]
    return tuple(found), frozenset(names)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code object and those of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def _notes(function: FunctionType) -> list[int]:
    """The lists, by identity, that a function closes over and does nothing with but append."""
    found = closed_over(function).items()
    return [id(value) for name, value in found if type(value) is list and _is_only_appended(function.__code__, name)]


def _is_only_appended(code: CodeType, name: str) -> bool:
    for current in codes_in(code):
        listing = [item for item in dis.get_instructions(current) if item.opname not in ("CACHE", "PUSH_NULL")]
        for item, following in itertools.pairwise(listing):
            if item.argval == name and "DEREF" in item.opname and following.argval != "append":
                return False
    return True


@asked_once
def _mentioned(code: CodeType) -> list[tuple[str, bool, SourceLine | None]]:
    """The global names in a function and the functions inside it: whether each is assigned, and the line that says so."""
    found: dict[str, tuple[bool, SourceLine | None]] = {}
    for current in codes_in(code):
        for item in dis.get_instructions(current):
            if item.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
                is_assigned = item.opname not in ("LOAD_GLOBAL", "LOAD_NAME")
                if item.argval not in found or (is_assigned and not found[item.argval][0]):
                    found[item.argval] = (is_assigned, source_line(current, item.offset))
    return [(name, *details) for name, details in found.items()]
