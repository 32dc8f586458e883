"""Results that are objects of their own kind (a cache, say): taken apart into tensors and a template, and put together again.
Containers that torch's pytree knows are not handled here.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.overrides import handle_torch_function, has_torch_function

from torchgraft.errors import GraphError
from torchgraft.ir.arguments import immutable_dict


class _Slot(NamedTuple):
    number: int


class _Container:
    """A container of somebody's own kind in a template: its class may have ideas about what it holds, and in which order, when
    it is copied, pickled or filled (transformers' results, named tuples)."""

    def __init__(self, value: Any) -> None:
        self.kind = type(value)
        self.items: Any = []
        self.attributes: dict[str, Any] = {}
        self.setting: Any = value.default_factory if isinstance(value, defaultdict) else getattr(value, "maxlen", None)

    def begin(self) -> Any:
        """The container, still empty, if it can be filled later."""
        return None if issubclass(self.kind, (tuple, frozenset)) else _builtin(self.kind).__new__(self.kind)

    def fill(self, result: Any, items: Any, attributes: dict[str, Any]) -> Any:
        """The container with its items and attributes, without asking its class."""
        base: Any = _builtin(self.kind)
        if result is None:
            result = base(items) if base is self.kind else base.__new__(self.kind, items)
        elif isinstance(result, dict):
            for key, item in items.items():
                base.__setitem__(result, key, item)
            if isinstance(result, defaultdict):
                result.default_factory = self.setting
        elif isinstance(result, deque):
            deque.__init__(result, items, self.setting)
        else:
            base.update(result, items) if isinstance(result, set) else base.extend(result, items)
        set_attributes(result, attributes)
        return result


def remade(value: Any, items: Any) -> Any:
    """A container of the same class, whatever that is, with other items, and with the attributes that it has.

    >>> remade(deque([1, 2], maxlen=2), [3])
    deque([3], maxlen=2)
    """
    container = _Container(value)
    return container.fill(container.begin(), items, attributes_of(value))


def _builtin(cls: type) -> Any:
    """The class of Python's own that says how objects of a class lie in memory."""
    # From Python 3.12 on a deque is made as Python code makes classes, although it is none.
    return next(kind for kind in cls.__mro__ if kind in _USUAL or not kind.__flags__ & _MADE_BY_PYTHON_CODE)


_MADE_BY_PYTHON_CODE = 1 << 9
_WITHOUT_ATTRIBUTES = frozenset({list, tuple, set, frozenset, deque, dict, defaultdict})
_USUAL = _WITHOUT_ATTRIBUTES | {OrderedDict}
_CONSTANTS = frozenset({int, float, bool, str, type(None)})  # whose ids compilers do not know


def has_attributes(value: Any) -> bool:
    """Whether an object is more than a value: it has attributes that may change, in its `__dict__` or in slots."""
    if hasattr(value, "__dict__"):
        return True
    is_value = type(value).__hash__ not in (None, object.__hash__) and not dataclasses.is_dataclass(value)
    return not is_value and bool(slots_of(value))


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots included.

    >>> attributes_of(_Slot(1))
    {}
    """
    if type(value) in _WITHOUT_ATTRIBUTES:  # which compilers cannot ask for a __dict__
        return {}
    slots = {name: getattr(value, name) for name in slots_of(value) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def set_attributes(value: Any, attributes: dict[str, Any]) -> None:
    """Give an object other attributes, whatever its class has to say about that (a frozen one refuses)."""
    in_slots = slots_of(value)
    for name, item in attributes.items():
        if name in in_slots:
            object.__setattr__(value, name, item)
        else:
            value.__dict__[name] = item


def slots_of(value: Any) -> tuple[str, ...]:
    """The names of the slots that the class of an object has."""
    return () if type(value) in _USUAL else _slots(type(value))  # type: ignore[arg-type]


@functools.cache
def _slots(cls: type) -> tuple[str, ...]:
    found: list[str] = []
    for kind in cls.__mro__ if cls.__module__ != "builtins" else ():
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            is_private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{kind.__name__.lstrip('_')}{name}" if is_private else name)
    return tuple([name for name in found if name not in ("__dict__", "__weakref__")])


def parts_of(value: Any) -> dict[str, Any] | None:
    """What a container or object holds, by the text that follows its path; None for what is a value itself.

    >>> parts_of({"a": 1}), parts_of((1, 2)), parts_of(3)
    ({"['a']": 1}, {'[0]': 1, '[1]': 2}, None)
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {f".{name}": getattr(value, name) for name in value._fields}
    if isinstance(value, (tuple, list)):
        return {f"[{index}]": item for index, item in enumerate(value)}
    if isinstance(value, Mapping):
        return {f"[{key!r}]": item for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f".{field.name}": getattr(value, field.name, None) for field in dataclasses.fields(value)}
    # An object that says nothing about equality is what it holds (a cache of keys and values, say).
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    says_equal = any("__eq__" in vars(cls) for cls in type(value).__mro__[:-1])
    if attributes and not says_equal and not callable(value):
        return {f".{name}": item for name, item in attributes.items()}
    return None


def take_apart(value: Any, is_part: Callable[[Any], bool]) -> tuple[Any, list[Any]]:
    """A copy of `value` with slots where a part was, and the parts; objects without parts in them are kept as they are."""
    parts: list[Any] = []
    slots: dict[int, _Slot] = {}

    def replace(leaf: Any) -> Any:
        if not is_part(leaf):
            return leaf
        if id(leaf) not in slots:
            slots[id(leaf)] = _Slot(len(parts))
            parts.append(leaf)
        return slots[id(leaf)]

    return _rebuild(value, replace, {}, _holders(value, is_part)[0]), parts


def put_together(template: Any, *parts: Any) -> Any:
    """A new object like the template, with the parts in its slots."""
    if has_torch_function(parts):
        return handle_torch_function(put_together, parts, template, *parts)
    kept = template if isinstance(template, Template) else Template(template)
    memo: Any = None if kept.is_tree else {}
    return _rebuild(
        kept.value, lambda leaf: parts[leaf.number] if isinstance(leaf, _Slot) else leaf, memo, kept.holders
    )


class _Kept:
    """Something that a program keeps as an attribute to build its results from; tracing the program again finds it there."""

    def __fx_create_arg__(self, tracer: Any) -> Any:
        for path, module in tracer.root.named_modules():
            for name, value in vars(module).items():
                if value is self:
                    return tracer.create_node("get_attr", f"{path}.{name}" if path else name, (), {})
        raise GraphError(f"cannot trace a {type(self).__name__} that is no attribute of the traced model")


class Template(_Kept):
    """The template of an object that a program puts together."""

    def __init__(self, value: Any) -> None:
        self.__setstate__({"value": value})

    def __getstate__(self) -> dict[str, Any]:
        return {"value": self.value}  # ids mean nothing elsewhere

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        # Known before the program runs: torch.compile of torch 2.11 cannot trace the ids of containers.
        self.holders, self.is_tree = _holders(self.value, lambda leaf: isinstance(leaf, _Slot))


class Record(_Kept):
    """A class whose objects are made of their fields alone, by name: dataclasses, and transformers' results among them."""

    def __init__(self, kind: type, names: tuple[str, ...]) -> None:
        self.kind = kind
        self.names = names


def record_of(value: Any) -> Record | None:
    """How to make an object like this one by calling its class with its fields; None where that gives something else."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    fields = (
        dict(value)
        if isinstance(value, dict)
        else {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    )
    try:
        made = type(value)(**fields)
    except Exception:  # an __init__ may refuse anything
        return None
    is_same = _same_contents(attributes_of(made), attributes_of(value))
    if isinstance(value, dict):
        is_same = is_same and _same_contents({**made}, fields)  # type: ignore[dict-item]
    return Record(type(value), tuple(fields)) if is_same else None


def _same_contents(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return list(one) == list(other) and all(one[key] is other[key] for key in other)


def put_together_record(record: Record, *parts: Any) -> Any:
    """A new object of a record's class with these fields, in a way that compilers can trace.

    >>> point = dataclasses.make_dataclass("Point", ["x", "y"])
    >>> put_together_record(record_of(point(1, 2)), 3, 4)
    Point(x=3, y=4)
    """
    if has_torch_function(parts):
        return handle_torch_function(put_together_record, parts, record, *parts)
    return record.kind(**dict(zip(record.names, parts, strict=True)))


def put_into(target: Any, keys: tuple[Any, ...], *values: Any) -> None:
    """Give a container other items, or an object other attributes.

    >>> items = [1]
    >>> put_into(items, (0, 1), 1, 2)
    >>> items
    [1, 2]
    """
    if isinstance(target, list):
        target[:] = values
    elif isinstance(target, dict):
        target.clear()
        target.update(zip(keys, values, strict=True))
    else:
        set_attributes(target, dict(zip(keys, values, strict=True)))


# Read by analysis/effects: what is written into an object of the caller's is never dead.
put_into.__torchgraft_effect__ = True  # type: ignore[attr-defined]


def _holders(value: Any, is_part: Callable[[Any], bool]) -> tuple[set[int], bool]:
    """The ids of the objects in which there is a part, or a container that everybody gets a copy of; also where they hold one
    another in a circle. And whether it is a tree, in which nothing that is rebuilt occurs twice, and plain containers have no
    attributes.
    """
    above: dict[int, list[int]] = {}
    found: list[int] = []
    twice: set[int] = set()
    containers: set[int] = set()
    is_plain = True
    pending = [(value, -1)]
    while pending:
        item, holder = pending.pop()
        if is_part(item) or isinstance(item, (list, set, dict, deque, _Container)):
            found.append(holder)
        if is_part(item) or isinstance(item, (torch.Tensor, torch.nn.Module, type)):
            continue
        if id(item) in above:
            above[id(item)].append(holder)
            twice.add(id(item))
            continue
        above[id(item)] = [holder]
        if isinstance(item, (list, tuple, set, frozenset, deque, dict, _Container)):
            containers.add(id(item))
            is_plain = is_plain and not (type(item) in _USUAL and attributes_of(item))
        pending += [(inner, id(item)) for inner in _contents(item)]
    result: set[int] = set()
    while found:
        holder = found.pop()
        if holder not in result:
            result.add(holder)
            found += above.get(holder, ())
    return result, is_plain and twice.isdisjoint(result | containers)


def _contents(value: Any) -> list[Any]:
    if isinstance(value, _Container):
        inside = value.items.values() if isinstance(value.items, dict) else value.items
        return [*inside, *value.attributes.values()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [*value, *attributes_of(value).values()]
    if isinstance(value, dict):
        return [*dict.values(value), *attributes_of(value).values()]
    return list(attributes_of(value).values()) if has_attributes(value) and not callable(value) else []


def _rebuild(value: Any, replace: Callable[[Any], Any], memo: dict[int, Any] | None, holders: set[int]) -> Any:
    new = replace(value)
    if new is not value or isinstance(value, (torch.Tensor, torch.nn.Module, type, _Slot)):
        return new
    if memo is not None and id(value) in memo:
        return memo[id(value)][1]
    inner = functools.partial(_rebuild, replace=replace, memo=memo, holders=holders)
    if isinstance(value, _Container):
        result = value.begin()
        if result is not None:  # before its items, which may lead back to it
            _remember(memo, value, result)
        return _remember(memo, value, value.fill(result, _each(inner, value.items), _each(inner, value.attributes)))
    if isinstance(value, immutable_dict):  # cannot be filled afterwards, and so cannot hold itself
        return _remember(memo, value, immutable_dict(_each(inner, value)))
    if isinstance(value, (list, tuple, set, frozenset, deque, dict)):
        return _rebuilt_container(value, inner, memo)
    if type(value) in _CONSTANTS or id(value) not in holders or not has_attributes(value) or callable(value):
        return value
    result = _remember(memo, value, copy.copy(value))
    inside = attributes_of(value)
    rebuilt = _each(inner, inside)
    set_attributes(result, {name: new for name, new in rebuilt.items() if new is not inside[name]})
    return result


def _rebuilt_container(value: Any, inner: Callable[[Any], Any], memo: dict[int, Any] | None) -> Any:
    attributes = {} if memo is None and type(value) in _USUAL else attributes_of(value)
    if type(value) in _USUAL and not attributes:
        if isinstance(value, dict):
            # Compilers cannot trace `copy` of these.
            result = _remember(memo, value, type(value)() if type(value) in (dict, OrderedDict) else copy.copy(value))
            for key, item in value.items():
                result[key] = inner(item)
            return result
        items = _each(inner, value)
        if isinstance(value, tuple) and all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return _remember(memo, value, deque(items, value.maxlen) if type(value) is deque else type(value)(items))
    container = _Container(value)
    if not isinstance(value, tuple):
        _remember(memo, value, container)
    container.items, container.attributes = _each(inner, value), _each(inner, attributes)
    is_same = all(map(operator.is_, container.items, value)) and all(
        new is attributes[name] for name, new in container.attributes.items()
    )
    return value if isinstance(value, tuple) and is_same else _remember(memo, value, container)


def _each(function: Callable[[Any], Any], items: Any) -> Any:
    if isinstance(items, dict):
        kind: Any = OrderedDict if isinstance(items, OrderedDict) else dict
        return {key: function(item) for key, item in kind.items(items)}
    return [function(item) for item in items]


def _remember(memo: dict[int, Any] | None, value: Any, result: Any) -> Any:
    if memo is not None:
        memo[id(value)] = (value, result)  # holding the original keeps its id its own
    return result


def in_dtype(value: Any, dtype: torch.dtype, only: torch.dtype | None = None) -> Any:
    """Floating-point tensors in another dtype, inside containers and objects too; with `only`, those of one dtype.

    >>> in_dtype({"x": torch.ones(1), "ids": torch.ones(1, dtype=torch.int64)}, torch.float16)
    {'x': tensor([1.], dtype=torch.float16), 'ids': tensor([1])}
    """

    def is_meant(item: Any) -> bool:
        return isinstance(item, torch.Tensor) and item.is_floating_point() and only in (None, item.dtype)

    if isinstance(value, torch.Tensor):
        return value.to(dtype) if is_meant(value) else value
    template, tensors = take_apart(value, is_meant)
    return put_together(template, *[tensor.to(dtype) for tensor in tensors]) if tensors else value
