"""What a traced function may change outside of its model: class attributes, global variables, and what those hold.
Only what the code that runs mentions (`mentions.py`) is looked at; the model's own attributes are in `model_state.py`.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from torchgraft.capturing.mentions import (
    PLAIN,
    ClassTable,
    Mentions,
    closure_of,
    codes_in,
    is_of_library,
    is_users,
    keeps_something,
    mentions_of,
    notes_of,
    reached,
    table_of,
)
from torchgraft.capturing.pictures import (
    CONTAINERS,
    DEEPEST,
    Picture,
    holdings,
    is_iterator,
    is_users_class,
    picture_of,
    picture_of_container,
    picture_of_context,
    picture_of_iterator,
    picture_of_variable,
)
from torchgraft.errors import TraceError
from torchgraft.ir.origin import SourceLine, is_user_code

_MISSING = object()


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
        # The functions that are watched, and those that they mention as parts of Python modules.
        self.functions: list[FunctionType] = []
        # Functions that remember their results (`functools.lru_cache`).
        self.memos: list[Any] = []
        self._seen: set[int] = set()
        self._watches_context = False
        # (what it is called, where it is mentioned, its picture)
        self._pictures: list[tuple[str, SourceLine | None, Picture]] = []
        # The same for classes: what was in them, and of which names that matters.
        self._tables: list[tuple[str, SourceLine | None, type, ClassTable, frozenset[str] | None]] = []

    def watch_context(self) -> None:
        """Watch all context variables, which torch's own tracers would write; else those that are mentioned are watched."""
        self._watches_context = True
        self._pictures.append(("a context variable", None, picture_of_context()))

    def watch_class(self, cls: type) -> None:
        """Watch the attributes of a module's class, and what its methods mention."""
        if id(cls) in self._seen:
            return
        self._seen.add(id(cls))
        reach = reached(cls)
        for base in reach.bases:
            # Of the bases, which may be large, only what is mentioned.
            if base is cls or id(base) not in self._seen:
                self._watch_attributes(base, base.__qualname__, None, None if base is cls else reach.names)
        closure, seen = closure_of(reach), self._seen
        self.recovers = self.recovers or closure.recovers
        self.memos += closure.memos
        others = [entry for entry in closure.others if id(entry[0].__code__) not in seen]
        fresh = [place for place, identity in enumerate(closure.identities) if identity not in seen]
        seen.update(closure.identities)
        self.functions += [closure.plain[place] for place in fresh]
        for function, mentions in others:
            self._watch_others(function, mentions)
        for function in closure.keeping:
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
        if keeps_something(function):
            self._watch_object(f"what {function.__name__} keeps", function, None, 0)
        if id(function.__code__) in self._seen:
            return
        self._seen.add(id(function.__code__))
        self.functions.append(function)
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a variable that has no value yet
                if isinstance(cell.cell_contents, FunctionType):
                    self.watch_function(cell.cell_contents)
        mentions = mentions_of(function)
        self.recovers = self.recovers or mentions.recovers
        self.memos += mentions.memos
        for mentioned in mentions.functions:
            self.watch_function(mentioned)
        self._watch_others(function, mentions)

    def _watch_others(self, function: FunctionType, mentions: Mentions) -> None:
        """Watch the global variables that a function mentions, except for those that always stand for the same."""
        scope = function.__globals__
        for name in mentions.imports:
            if isinstance(sys.modules.get(name), ModuleType):
                self._watch_module(sys.modules[name], function.__code__, None)
        for name, is_assigned, line in mentions.others:
            value = scope.get(name, _MISSING)
            if is_assigned:
                self._watch_binding(scope, name, value, line)
            wrapped = getattr(value, "__wrapped__", value) if callable(value) else value
            if callable(getattr(value, "cache_info", None)):
                self.memos.append(value)
            if isinstance(wrapped, FunctionType) and not is_of_library(wrapped.__module__):
                self.watch_function(wrapped)
            elif isinstance(value, ModuleType):
                self._watch_module(value, function.__code__, line)
            elif is_iterator(value):
                self._watch_iterator(scope, name, value, line)
            elif value is not _MISSING:
                self._watch_value(name, value, line)

    def _watch_iterator(self, scope: dict[str, Any], name: str, value: Any, line: SourceLine | None) -> None:
        picture = picture_of_iterator(value, functools.partial(scope.__setitem__, name))
        if picture is None:
            raise TraceError(
                f"cannot capture a function that takes from the {type(value).__name__} '{name}'{f' at {line}' if line else ''}: "
                "that cannot be undone; keep a list or a number instead"
            )
        self._pictures.append((name, line, picture))

    def _watch_module(self, module: ModuleType, code: CodeType, line: SourceLine | None) -> None:
        """Watch the variables of another Python module that a function may mention."""
        if module is os and any("environ" in inner.co_names for inner in codes_in(code)):
            self._watch_value("os.environ", os.environ, line)
        if is_of_library(module.__name__) and module is not builtins:
            return
        for name in {mentioned for inner in codes_in(code) for mentioned in inner.co_names}:
            value = vars(module).get(name, _MISSING)
            if isinstance(value, FunctionType):
                self.functions.append(value)
            if value is _MISSING:
                self._watch_binding(vars(module), name, value, line)
            elif not isinstance(value, (type, ModuleType)) and not callable(value):
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
            if id(value) not in self._seen and not is_of_library(value.__module__) and is_users(value):
                self._watch_attributes(value, name, line)
        elif kind in CONTAINERS or is_users_class(kind):
            self._watch_object(name, value, line, 0)
        elif isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, ContextVar) and not self._watches_context:
            self._pictures.append((name, line, picture_of_variable(value)))
        elif (picture := None if isinstance(value, PLAIN) else picture_of(value)) is not None:
            self._pictures.append((name, line, picture))

    def _watch_object(self, name: str, value: Any, line: SourceLine | None, depth: int) -> None:
        if id(value) in self._seen or depth > DEEPEST:
            return
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, torch.nn.Module):
            self.modules.append(value)
        content, pictures, held = holdings(value)
        if self._allows_notes and type(value) is FunctionType:
            notes = notes_of(value)
            held = [item for item in held if id(item) not in notes]
        self._seen.add(id(value))
        if content is not None:
            self._pictures.append((name, line, picture_of_container(content, self._is_memo)))
        elif not pictures and not held and (picture := picture_of(value)) is not None:
            pictures = [picture]
        self._pictures += [(name, line, picture) for picture in pictures]
        inside = content.values() if isinstance(content, dict) else content or ()
        for item in (*inside, *held):
            is_bare = isinstance(item, PLAIN) or (type(item) is FunctionType and not keeps_something(item))
            if not is_bare:
                self._watch_object(name, item, line, depth + 1)

    def _watch_attributes(
        self, cls: type, name: str, line: SourceLine | None, names: frozenset[str] | None = None
    ) -> None:
        """Watch the attributes of a class, or those of certain names."""
        self._seen.add(id(cls))
        before = table_of(cls)
        self._tables.append((name, line, cls, before, names))
        for key in before.containers:
            value = before.content[key]
            if (names is None or key in names) and id(value) not in self._seen:
                self._seen.add(id(value))
                self._pictures.append((f"{name}.{key}", line, picture_of_container(value, self._is_memo)))

    def restore(self) -> tuple[str, SourceLine | None] | None:
        """Put everything back; what had been changed first, and where it is mentioned, or None."""
        changed = [
            (name, line)
            for name, line, cls, before, names in self._tables
            if not before.still_holds(cls) and _put_back(cls, before.plain(names), names)
        ]
        changed += [(name, line) for name, line, restore in self._pictures if restore()]
        return changed[0] if changed else None


def _put_back(cls: type, before: dict[str, Any], names: frozenset[str] | None) -> bool:
    now = ClassTable(cls).plain(names)
    if now == before:
        return False
    for key in now.keys() - before.keys():
        delattr(cls, key)
    for key, value in before.items():
        if vars(cls).get(key, _MISSING) is not value:
            setattr(cls, key, value)
    return True
