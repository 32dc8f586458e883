"""What the analysis knows about a value while it reads code: the object itself where that is certain, and the memory it
may share. The effects found so far are collected here too; which code has which effects is said in the other files.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch

OUTSIDE: Final = "<outside>"


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()


class Local:
    """An object made by the analysed code: what can be reached through it, and its contents where they are certain."""

    __slots__ = ("entries", "items", "reach")

    def __init__(self) -> None:
        self.reach: set[Place] = set()
        self.items: tuple[Value, ...] | None = None
        self.entries: dict[str, Value] | None = None


# Memory that an effect can touch: the number of an input of the analysed call, the path of module state
# ("bn.running_mean"), OUTSIDE, or an object made by the analysed code itself (writing such a one is no effect).
Place = int | str | Local
NO_PLACES: Final[frozenset[Place]] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One value of the analysed code. `cls` is its class or a base of it, where known."""

    known: Any = MISSING
    places: frozenset[Place] = NO_PLACES
    cls: type | None = None

    @property
    def is_known(self) -> bool:
        return self.known is not MISSING

    def same_as(self, other: Value) -> bool:
        return _same_object(self.known, other.known) and self.places == other.places and self.cls is other.cls


@dataclass(frozen=True, slots=True, eq=False)
class OneOf:
    """The callable objects of which one is called; met after a branch that chooses between functions."""

    choices: tuple[Value, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A function together with the value it takes as its first argument."""

    function: Any
    receiver: Value


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """A `functools.partial` made by the analysed code."""

    function: Value
    positional: tuple[Value, ...]
    keyword: dict[str, Value]


@dataclass(frozen=True, slots=True, eq=False)
class Super:
    """`super()` inside a method of `cls`."""

    cls: type
    receiver: Value


@dataclass(frozen=True, slots=True, eq=False)
class Closure:
    """A function defined inside the analysed code: its tree, where its free names live, and its evaluated defaults."""

    tree: Any
    frame: Any
    defaults: tuple[Value, ...]
    keyword_defaults: tuple[Value | None, ...]


class CannotTell(Exception):
    """Ends an analysis whose answer is "unknown"; never leaves this folder."""


class Findings:
    """Everything an analysis has found out: effects, why, and what the answer depends on."""

    def __init__(self) -> None:
        self.writes: set[int | str] = set()
        self.random = False
        self.unknown = False
        self.reasons: list[str] = []
        # (namespace, name, object found there): the answer holds as long as all are still the same.
        self.reads: list[tuple[dict[str, Any], str, Any]] = []
        self.module_reads: list[tuple[torch.nn.Module, str, Any]] = []
        self.cacheable = True
        # What exceptions may carry to the handlers that catch them.
        self.raised: set[Place] = set()
        self._sites: dict[Any, Local] = {}
        # What was put into objects that existed before: writing such an object may then write this too.
        self._held: dict[Place, set[Place]] = {}
        # Grows whenever a local object changes, so that loops know when they have settled.
        self.version = 0

    def write(self, value: Value, reason: str) -> None:
        """`value` itself changes. An object known to exist before the analysed code ran is never local."""
        if value.places:
            self.write_places(value.places, reason)
        elif value.is_known and not is_plain_data(value.known):
            self.write_places((OUTSIDE,), reason)

    def write_places(self, places: Iterable[Place], reason: str) -> None:
        pending: list[Place] = [place for place in places if not isinstance(place, Local)]
        if pending:
            self.reasons.append(reason)
        touched: set[Place] = set()
        while pending:
            place = pending.pop()
            if place not in touched:
                touched.add(place)
                pending += place.reach if isinstance(place, Local) else self._held.get(place, ())
        self.writes |= {place for place in touched if not isinstance(place, Local)}

    def write_outside(self, reason: str) -> None:
        self.write_places((OUTSIDE,), reason)

    def draw(self, reason: str) -> None:
        self.random = True
        self.reasons.append(reason)

    def give_up(self, reason: str) -> NoReturn:
        """Anything may happen here, so reading on would tell nothing more."""
        self.unknown = True
        self.reasons.append(reason)
        raise CannotTell(reason)

    def site(self, key: Any) -> Local:
        """The object made at one place in the code; always the same one, so that loops settle."""
        local = self._sites.get(key)
        if local is None:
            local = self._sites[key] = Local()
            self.version += 1
        return local

    def make(self, key: Any, contents: Iterable[Value] = (), cls: type | None = None) -> Value:
        """A new object that may hold `contents`."""
        local = self.site(key)
        self.forget_contents(local)
        for value in contents:
            self.extend(local, value)
        return Value(MISSING, frozenset((local,)), cls)

    def make_sequence(self, key: Any, items: Iterable[Value], cls: type) -> Value:
        """A new tuple or list with exactly these items."""
        items = tuple(items)
        first_time = key not in self._sites
        local = self.site(key)
        if first_time:
            local.items = items
        elif local.items is None or len(local.items) != len(items):
            self.forget_contents(local)
        else:
            joined = tuple(join(old, new) for old, new in zip(local.items, items, strict=True))
            if not all(old.same_as(new) for old, new in zip(local.items, joined, strict=True)):
                local.items = joined
                self.version += 1
        for value in items:
            self.extend(local, value)
        return Value(MISSING, frozenset((local,)), cls)

    def make_mapping(self, key: Any, entries: dict[str, Value], cls: type) -> Value:
        """A new dict or object with exactly these entries."""
        first_time = key not in self._sites
        local = self.site(key)
        if first_time:
            local.entries = {}
        if local.entries is not None and (first_time or local.entries.keys() >= entries.keys()):
            for name, value in entries.items():
                self.set_entry(local, name, value)
        else:
            self.forget_contents(local)
        for value in entries.values():
            self.extend(local, value)
        return Value(MISSING, frozenset((local,)), cls)

    def set_entry(self, local: Local, name: str, value: Value) -> None:
        """An entry or attribute of `local` may now be `value`, besides what it may have been before."""
        assert local.entries is not None
        previous = local.entries.get(name)
        joined = value if previous is None else join(previous, value)
        if previous is None or not previous.same_as(joined):
            local.entries[name] = joined
            self.version += 1
        self.extend(local, value)

    def extend(self, local: Local, value: Value) -> None:
        """`value` becomes reachable through `local`."""
        if not value.places <= local.reach:
            local.reach |= value.places
            self.version += 1

    def store(self, holder: Value, value: Value, reason: str) -> None:
        """`value` is put into `holder`."""
        self.write(holder, reason)
        for place in holder.places or ((OUTSIDE,) if holder.is_known else ()):
            if isinstance(place, Local):
                self.forget_contents(place)
                self.extend(place, value)
            else:
                self._held.setdefault(place, set()).update(value.places)
        if not holder.places and not holder.is_known and value.places:
            self.give_up(f"{reason}, into an object of unknown origin")

    def forget_contents(self, local: Local) -> None:
        if local.items is not None or local.entries is not None:
            local.items = local.entries = None
            self.version += 1


# What stands in `Value.known` for objects that do not exist yet.
WRAPPERS = (OneOf, Bound, Partial, Super, Closure)


def reachable(values: Iterable[Value]) -> frozenset[Place]:
    """All memory that can be reached from the values."""
    result: set[Place] = set()
    pending = {place for value in values for place in value.places}
    while pending:
        place = pending.pop()
        result.add(place)
        if isinstance(place, Local):
            pending |= place.reach - result
    return frozenset(result)


def element_of(value: Value) -> Value:
    """Something inside `value`, of which nothing more is known."""
    places = reachable((value,))
    if not places and value.is_known and not is_plain_data(value.known):
        places = frozenset((OUTSIDE,))
    return Value(MISSING, places)


def contents(value: Value) -> Local | None:
    """The one local object that `value` is, if it is exactly one."""
    if not value.is_known and len(value.places) == 1:
        (place,) = value.places
        if isinstance(place, Local):
            return place
    return None


def covers(general: Value, special: Value) -> bool:
    """Whether everything that can happen with `special` can happen with `general`, which may be known less well."""
    if general.is_known and not _same_object(general.known, special.known):
        return False
    if general.cls is not None and general.cls is not special.cls:
        return False
    first, second = contents(general), contents(special)
    if first is not None and first.items is not None:
        if second is None or second.items is None or len(first.items) != len(second.items):
            return False
        if not all(covers(one, other) for one, other in zip(first.items, second.items, strict=True)):
            return False
    if first is not None and first.entries is not None:
        if second is None or second.entries is None or first.entries.keys() != second.entries.keys():
            return False
        if not all(covers(value, second.entries[name]) for name, value in first.entries.items()):
            return False
    return _effective(special) <= _effective(general)


def _effective(value: Value) -> frozenset[Place]:
    return frozenset(place for place in reachable((value,)) if not isinstance(place, Local))


def join(first: Value, second: Value) -> Value:
    """What is true of both."""
    if first is second or first.same_as(second):
        return first
    places = first.places | second.places
    if _same_object(first.known, second.known):
        return Value(first.known, places)
    choices = _choices(first) + _choices(second)
    if first.is_known and second.is_known and len(choices) <= 16 and all(_is_callable(c.known) for c in choices):
        return Value(OneOf(choices), places)
    cls = first.cls if first.cls is second.cls else None
    return Value(MISSING, places, cls)


def _is_callable(known: Any) -> bool:
    return callable(known) or isinstance(known, Bound | Partial | Closure)


def _choices(value: Value) -> tuple[Value, ...]:
    return value.known.choices if isinstance(value.known, OneOf) else (value,)


def join_environments(environments: list[dict[str, Value]]) -> dict[str, Value]:
    """The names after several ways of getting to the same statement."""
    result = dict(environments[0])
    for environment in environments[1:]:
        for name, value in environment.items():
            result[name] = join(result[name], value) if name in result else value
    return result


def lift(known: Any, place: Place) -> Value:
    """The value of an object that exists before the analysed code runs; `place` names its memory if it can change."""
    if is_plain_data(known) or isinstance(known, _FIXED):
        return Value(known)
    return Value(known, frozenset((place,)))


_SIMPLE: Final = frozenset(
    {int, float, bool, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), range}
)
_SIMPLE_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum)
# Objects without memory worth tracking: calling them is analysed, setting an attribute on them is a write outside.
_FIXED = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ModuleType,
    type,
    torch._ops.OperatorBase,
    torch._ops.OpOverloadPacket,
)


def is_plain_data(known: Any) -> bool:
    """Whether the object can never change: numbers, text, dtypes, and tuples of such."""
    cls = type(known)
    if cls in _SIMPLE or isinstance(known, _SIMPLE_TORCH):
        return True
    if cls is tuple or cls is frozenset:
        return all(is_plain_data(item) or isinstance(item, _FIXED) for item in known)
    if cls is slice:
        return is_plain_data((known.start, known.stop, known.step))
    return False


def _same_object(first: Any, second: Any) -> bool:
    if first is second:
        return True
    return type(first) is type(second) and type(first) in _SIMPLE and first == second
