"""What a traced function may change outside of its model: class attributes, global variables, and what those hold.
Only what the code that runs mentions is looked at. The model's own attributes are the business of `model_state.py`.
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from torchgraft.capturing.pictures import CONTAINERS, Picture, picture_of, picture_of_container
from torchgraft.ir.origin import SourceLine, is_user_code, source_line

_MISSING = object()
_LIBRARIES = ("torch", "torchgraft", "builtins", "typing", "abc")
_PLAIN = (int, float, str, bool, bytes, complex, tuple, type(None))


class OutsideState:
    """Pictures of everything outside of the model that the functions of a trace mention."""

    def __init__(self, is_memo: Callable[[Any], bool]) -> None:
        self._is_memo = is_memo
        self._seen: set[int] = set()
        # (what it is called, where it is mentioned, its picture)
        self._pictures: list[tuple[str, SourceLine | None, Picture]] = []

    def watch_class(self, cls: type) -> None:
        """Watch the attributes of a module's class, and what its methods mention."""
        for base in cls.__mro__:
            if _is_users(base) and id(base) not in self._seen:
                self._watch_attributes(base, base.__qualname__, None)
                for value in list(vars(base).values()):
                    function = getattr(value, "__func__", value)
                    if isinstance(function, FunctionType):
                        self.watch_function(function)

    def watch_function(self, function: Any) -> None:
        """Watch the global variables that a function mentions, and those that functions it mentions do."""
        if not isinstance(function, FunctionType) or id(function.__code__) in self._seen:
            return
        if not is_user_code(function.__code__):
            return
        self._seen.add(id(function.__code__))
        scope = function.__globals__
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a variable that has no value yet
                self.watch_function(cell.cell_contents)
        for name, is_assigned, line in _mentioned(function.__code__):
            value = scope.get(name, _MISSING)
            if is_assigned:
                self._watch_binding(scope, name, value, line)
            if isinstance(value, FunctionType) and value.__globals__ is scope:
                self.watch_function(value)
            elif value is not _MISSING:
                self._watch_value(name, value, scope.get("__name__"), line)

    def _watch_binding(self, scope: dict[str, Any], name: str, value: Any, line: SourceLine | None) -> None:
        def restore() -> bool:
            if scope.get(name, _MISSING) is value:
                return False
            scope.pop(name, None) if value is _MISSING else scope.__setitem__(name, value)
            return True

        self._pictures.append((name, line, restore))

    def _watch_value(self, name: str, value: Any, home: Any, line: SourceLine | None) -> None:
        if isinstance(value, _PLAIN) or (callable(value) and not isinstance(value, type)):
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if type(value) in CONTAINERS:
            self._pictures.append((name, line, picture_of_container(value, self._is_memo)))
        elif isinstance(value, type):
            if value.__module__ == home and _is_users(value):
                self._watch_attributes(value, name, line)
        elif (picture := picture_of(value)) is not None:
            self._pictures.append((name, line, picture))
        elif type(value).__module__ == home and hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module):
            self._pictures.append((name, line, picture_of_container(value.__dict__)))

    def _watch_attributes(self, cls: type, name: str, line: SourceLine | None) -> None:
        self._seen.add(id(cls))
        before = dict(_plain_attributes(cls))

        def restore() -> bool:
            now = dict(_plain_attributes(cls))
            if now == before:
                return False
            for key in now.keys() - before.keys():
                delattr(cls, key)
            for key, value in before.items():
                if vars(cls).get(key, _MISSING) is not value:
                    setattr(cls, key, value)
            return True

        self._pictures.append((name, line, restore))
        for key, value in list(vars(cls).items()):
            if type(value) in CONTAINERS and not key.startswith("__") and id(value) not in self._seen:
                self._seen.add(id(value))
                self._pictures.append((f"{name}.{key}", line, picture_of_container(value, self._is_memo)))

    def restore(self) -> tuple[str, SourceLine | None] | None:
        """Put everything back; what had been changed first, and where it is mentioned, or None."""
        changed = [(name, line) for name, line, restore in self._pictures if restore()]
        return changed[0] if changed else None


def _is_users(cls: type) -> bool:
    # The class of a graph module holds its code, which is made when it is first needed.
    return cls.__module__.split(".")[0] not in _LIBRARIES and "_shared_class" not in vars(cls)


def _plain_attributes(cls: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(cls).items():
        if not name.startswith("__") and isinstance(value, _PLAIN):
            yield name, value


# By identity, because the hash of a code object is computed from everything in it; holding the code keeps the id its own.
_mentions: dict[int, tuple[CodeType, list[tuple[str, bool, SourceLine | None]]]] = {}


def _mentioned(code: CodeType) -> list[tuple[str, bool, SourceLine | None]]:
    """The global names in a function and the functions inside it: whether each is assigned, and the line that says so."""
    known = _mentions.get(id(code))
    if known is None:
        if len(_mentions) > 100_000:
            _mentions.clear()
        known = _mentions[id(code)] = code, _find_mentioned(code)
    return known[1]


def _find_mentioned(code: CodeType) -> list[tuple[str, bool, SourceLine | None]]:
    found: dict[str, tuple[bool, SourceLine | None]] = {}
    pending = [code]
    while pending:
        current = pending.pop()
        pending += [constant for constant in current.co_consts if isinstance(constant, CodeType)]
        for item in dis.get_instructions(current):
            if item.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
                is_assigned = item.opname not in ("LOAD_GLOBAL", "LOAD_NAME")
                if item.argval not in found or (is_assigned and not found[item.argval][0]):
                    found[item.argval] = (is_assigned, source_line(current, item.offset))
    return [(name, *details) for name, details in found.items()]
