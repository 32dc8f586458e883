"""What code mentions: the global names of a function, the methods that a call of a module may come through, the attributes of
classes. All of it is found once and stays true as long as the names stand for the same objects.
Which of it is pictured before a run, and put back after it, is decided in `outside_state.py`.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from operator import attrgetter, is_
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from torchgraft.capturing.handlers import recovers
from torchgraft.capturing.parts import closed_over
from torchgraft.capturing.pictures import CONTAINERS
from torchgraft.ir.bytecode import global_names, instructions
from torchgraft.ir.origin import SourceLine, asked_once, is_user_code, source_line

PLAIN = (int, float, str, bool, bytes, complex, type(None))
_PLAIN = frozenset(PLAIN)
_QUIET = _PLAIN | {FunctionType, BuiltinFunctionType}
_LIBRARIES = ("torch", "torchgraft", "builtins", "typing", "abc")
_NOT_USERS = frozenset({"torch", "torchgraft", "numpy", *sys.stdlib_module_names}) - {"__main__"}
_MOST = 10_000


def is_of_library(name: str | None) -> bool:
    """Whether a Python module belongs to torch, numpy or Python itself."""
    return _home(name) in _NOT_USERS


def _home(name: str | None) -> str:
    return (name or "").split(".")[0]


@functools.lru_cache(maxsize=4096)
def is_users(cls: Any) -> bool:
    """Whether a class may be written to by a model."""
    # The class of a graph module holds its code, which is made when it is first needed.
    return _home(cls.__module__) not in _LIBRARIES and "_shared_class" not in vars(cls)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code object and those of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


# ---- functions ----


class Mentions:
    """The global names in a function: those of which nothing can be changed, functions of the user's among them, and others."""

    __slots__ = ("functions", "imports", "memos", "names", "others", "recovers", "scope", "values")

    def __init__(self, code: CodeType, scope: dict[str, Any]) -> None:
        self.scope = scope
        self.recovers = recovers(code)
        self.functions: list[FunctionType] = []
        # Functions that remember their results (`functools.lru_cache`).
        self.memos: list[Any] = []
        # (name, whether it is assigned, the line that says so)
        self.others: list[tuple[str, bool, SourceLine | None]] = []
        # Only objects that stay anyway are held on to here.
        self.names: list[str] = []
        self.values: list[Any] = []
        # Names of the Python modules that are imported on the way.
        self.imports = _imported(code)
        for name, is_assigned, owner, offset in _mentioned(code):
            value = scope.get(name)
            function: Any = getattr(value, "__wrapped__", value) if callable(value) else value
            is_followed = type(function) is FunctionType and not is_of_library(function.__module__)
            is_environment = value is os and any("environ" in inner.co_names for inner in codes_in(code))
            if is_assigned or is_environment or value is builtins or not (is_followed or _is_quiet(value)):
                self.others.append((name, is_assigned, source_line(owner, offset)))
                continue
            self.names.append(name)
            self.values.append(value)
            if is_followed:
                self.functions.append(function)
            if callable(getattr(value, "cache_info", None)):
                self.memos.append(value)

    def still_hold(self) -> bool:
        """Whether the names stand for the same objects."""
        return all(map(is_, map(self.scope.get, self.names), self.values))


def _is_quiet(value: Any) -> bool:
    kind = type(value)
    if kind is ModuleType:
        return is_of_library(value.__name__)
    if isinstance(value, type):
        return is_of_library(value.__module__) or not is_users(value)
    return kind in _QUIET


_known: dict[int, tuple[CodeType, Mentions]] = {}


def mentions_of(function: FunctionType) -> Mentions:
    """What a function mentions, as things are now."""
    code = function.__code__
    known = _known.get(id(code))
    if known is None or known[1].scope is not function.__globals__ or not known[1].still_hold():
        if len(_known) > _MOST:
            _known.clear()
        known = _known[id(code)] = code, Mentions(code, function.__globals__)
    return known[1]


@asked_once
def _mentioned(code: CodeType) -> list[tuple[str, bool, CodeType, int]]:
    """The global names in a function and the functions inside it: whether each is assigned, and the place that says so."""
    found: dict[str, tuple[bool, CodeType, int]] = {}
    for current in codes_in(code):
        for name, is_assigned, offset in global_names(current):
            if name not in found or (is_assigned and not found[name][0]):
                found[name] = is_assigned, current, offset
    if "globals" in found:  # `globals()["name"] = value`
        for current in codes_in(code):
            names = [item for item in current.co_consts if isinstance(item, str) and item.isidentifier()]
            found |= dict.fromkeys(names, (True, current, 0))
    return [(name, *details) for name, details in found.items()]


def _imported(code: CodeType) -> list[str]:
    """The names in a function that are also those of Python modules of the user's."""
    names = dict.fromkeys(name for inner in codes_in(code) for name in inner.co_names)
    return [name for name in names if name in sys.modules and not is_of_library(name)]


def keeps_something(function: FunctionType) -> bool:
    """Whether a function has attributes, variables of its own or defaults that could be changed."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return bool(function.__closure__ or function.__dict__) or not _PLAIN.issuperset(map(type, defaults))


def notes_of(function: FunctionType) -> list[int]:
    """The lists, by identity, that a function closes over and does nothing with but append."""
    found = closed_over(function).items()
    return [id(value) for name, value in found if type(value) is list and _is_only_appended(function.__code__, name)]


def _is_only_appended(code: CodeType, name: str) -> bool:
    for current in codes_in(code):
        listing = [item for item in instructions(current) if item.opname != "PUSH_NULL"]
        for item, following in itertools.pairwise(listing):
            if item.argval == name and "DEREF" in item.opname and following.argval != "append":
                return False
    return True


# ---- classes ----

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


class Reach:
    """What a call of a module may come to, as far as names show: methods, every name they mention, classes of the user's."""

    __slots__ = ("bases", "forward", "functions", "names")

    def __init__(self, cls: type) -> None:
        self.forward = getattr(cls, "forward", None)
        self.bases = tuple([base for base in cls.__mro__ if is_users(base)])
        found: dict[FunctionType, None] = {}
        names: set[str] = set()
        pending = list(_ENTRIES)
        while pending:
            name = pending.pop()
            if name in names:
                continue
            names.add(name)
            base = next((base for base in cls.__mro__ if name in vars(base)), None)
            if base is None or not is_users(base):
                continue
            value = vars(base)[name]
            function = getattr(value, "fget", None) or inspect.unwrap(getattr(value, "__func__", value))
            if isinstance(function, FunctionType):
                found[function] = None
                pending += [mentioned for code in codes_in(function.__code__) for mentioned in code.co_names]
        self.functions, self.names = tuple(found), frozenset(names)


_reach: dict[type, Reach] = {}


def reached(cls: type) -> Reach:
    """What a call of a module of a class may come to."""
    known = _reach.get(cls)
    if known is None or known.forward is not getattr(cls, "forward", None):
        if len(_reach) > _MOST:
            _reach.clear()
        known = _reach[cls] = Reach(cls)
    return known


_code_of, _defaults_of, _named_defaults_of = map(attrgetter, ("__code__", "__defaults__", "__kwdefaults__"))


class Closure:
    """All functions that a call of a module may come to, by way of those that they mention.

    `plain` are those that keep nothing themselves; what is said about them holds as long as they, and the names in them, are
    what they were, and that is seen in one sweep. The others, and what those mention, have to be looked at each time.
    """

    __slots__ = (
        "_codes",
        "_defaults",
        "_named_defaults",
        "_names",
        "_scopes",
        "_values",
        "identities",
        "keeping",
        "memos",
        "others",
        "plain",
        "recovers",
    )

    def __init__(self, functions: Iterable[FunctionType]) -> None:
        found: dict[FunctionType, Mentions] = {}
        keeping: dict[FunctionType, None] = {}
        pending = list(functions)
        while pending:
            function = pending.pop()
            if function in found or function in keeping or not is_user_code(function.__code__):
                continue
            if keeps_something(function):
                keeping[function] = None
                continue
            mentions = found[function] = mentions_of(function)
            pending += mentions.functions
        self.plain, self.keeping = list(found), list(keeping)
        self.identities = [id(function.__code__) for function in found]
        self.recovers = any(mentions.recovers for mentions in found.values())
        self.memos = [memo for mentions in found.values() for memo in mentions.memos]
        self.others = [
            (function, mentions) for function, mentions in found.items() if mentions.others or mentions.imports
        ]
        self._codes = list(map(_code_of, self.plain))
        self._defaults = list(map(_defaults_of, self.plain))
        self._named_defaults = list(map(_named_defaults_of, self.plain))
        self._scopes = [mentions.scope for mentions in found.values() for _ in mentions.names]
        self._names = [name for mentions in found.values() for name in mentions.names]
        self._values = [value for mentions in found.values() for value in mentions.values]

    def still_holds(self) -> bool:
        """Whether all is as it was: names, codes and defaults, and nobody has written attributes onto a function."""
        return (
            all(map(is_, map(dict.get, self._scopes, self._names), self._values))
            and all(map(is_, map(_code_of, self.plain), self._codes))
            and all(map(is_, map(_defaults_of, self.plain), self._defaults))
            and all(map(is_, map(_named_defaults_of, self.plain), self._named_defaults))
            and not any(map(vars, self.plain))
        )


_closures: dict[Reach, Closure] = {}


def closure_of(reach: Reach) -> Closure:
    """The functions behind what a call of a module may come to, as things are now."""
    known = _closures.get(reach)
    if known is None or not known.still_holds():
        if len(_closures) > _MOST:
            _closures.clear()
        known = _closures[reach] = Closure(reach.functions)
    return known


class ClassTable:
    """What is in a class: everything, and the names of the containers among it."""

    __slots__ = ("_names", "_values", "containers", "content")

    def __init__(self, cls: type) -> None:
        self.content = vars(cls).copy()
        self._names, self._values = list(self.content), list(self.content.values())
        self.containers = tuple(
            [name for name, value in self.content.items() if type(value) in CONTAINERS and name[:2] != "__"]
        )

    def still_holds(self, cls: type) -> bool:
        """Whether the class has the same under the same names: the same containers, and values that are equal."""
        table, content = vars(cls), self.content
        try:  # a comparison of lists looks first whether the items are the same objects, which most are
            is_equal = list(table.values()) == self._values and list(table) == self._names
        except Exception:  # arrays, which cannot be compared so
            return False
        return is_equal and all(table[name] is content[name] for name in self.containers)

    def plain(self, names: frozenset[str] | None) -> dict[str, Any]:
        """Numbers, texts and tuples, of certain names."""
        wanted = self.content if names is None else names & self.content.keys()
        found = {name: self.content[name] for name in wanted if name[:2] != "__" or name == "__doc__"}
        return {name: value for name, value in found.items() if isinstance(value, (*PLAIN, tuple))}


_tables: dict[type, ClassTable] = {}


def table_of(cls: type) -> ClassTable:
    """What is in a class now."""
    known = _tables.get(cls)
    if known is None or not known.still_holds(cls):
        if len(_tables) > _MOST:
            _tables.clear()
        known = _tables[cls] = ClassTable(cls)
    return known
