"""What a traced function may change outside of its model: class attributes, global variables, and what those hold.
Only what the code that runs mentions is looked at. The model's own attributes are the business of `model_state.py`.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
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


def _is_users(cls: type) -> bool:
    # The class of a graph module holds its code, which is made when it is first needed.
    return cls.__module__.split(".")[0] not in _LIBRARIES and "_shared_class" not in vars(cls)


def _plain_attributes(cls: type, names: frozenset[str] | None) -> dict[str, Any]:
    table = vars(cls)
    wanted = table.keys() if names is None else names & table.keys()
    return {name: table[name] for name in wanted if isinstance(table[name], _PLAIN) and not name.startswith("__")}


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
    for current in codes_in(code):
        for item in dis.get_instructions(current):
            if item.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
                is_assigned = item.opname not in ("LOAD_GLOBAL", "LOAD_NAME")
                if item.argval not in found or (is_assigned and not found[item.argval][0]):
                    found[item.argval] = (is_assigned, source_line(current, item.offset))
    return [(name, *details) for name, details in found.items()]
