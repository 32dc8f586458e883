"""Reading attributes, items and iteration of values, without running any of the user's code.
What happens when the result is called is said in `calls.py`.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from torchgraft.analysis.effects.machine import Arguments, Machine, ModuleRead
from torchgraft.analysis.effects.values import (
    MISSING,
    OUTSIDE,
    WRAPPERS,
    Bound,
    Closure,
    OneOf,
    Partial,
    Super,
    Value,
    contents,
    element_of,
    is_plain_data,
    join,
    lift,
)

_BUILTIN_CONTAINERS = (list, tuple, dict, set, frozenset, range, str, bytes)
_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()), types.MappingProxyType)
_ITEM_LIMIT = 512


class Attributes(Machine):
    """The part of the machine that looks into values."""

    def read_attribute(self, site: Any, owner: Value, name: str) -> Value:
        known = owner.known
        if known is MISSING:
            return self._attribute_of_unknown(site, owner, name)
        if isinstance(known, Super):
            return self._attribute_of_super(site, known, name)
        if isinstance(known, OneOf):
            return functools.reduce(join, [self.read_attribute(site, choice, name) for choice in known.choices])
        if isinstance(known, Bound | Closure | Partial):
            return element_of(owner)
        if name == "__class__":
            return Value(type(known))
        if isinstance(known, types.ModuleType):
            return self._attribute_of_python_module(known, name)
        if isinstance(known, type):
            return self._attribute_of_class(known, name)
        if isinstance(known, torch.Tensor):
            return self._attribute_of_tensor(owner, name)
        return self._attribute_of_object(site, owner, name)

    def _attribute_of_unknown(self, site: Any, owner: Value, name: str) -> Value:
        local = contents(owner)
        if local is not None and local.entries is not None and name in local.entries:
            return local.entries[name]
        if owner.cls is not None and is_python_class(owner.cls) and not issubclass(owner.cls, torch.Tensor):
            found = self._find_in_class(owner.cls, name)
            if found is not MISSING:
                return self._bind(site, found, owner, owner.cls)
            fallback = self.call_special(site, owner, ("__getattr__",), Value(name))
            return element_of(owner) if fallback is None else join(fallback, element_of(owner))
        return self._attribute_of_tensor(owner, name)

    def _attribute_of_tensor(self, owner: Value, name: str) -> Value:
        if owner.is_known and name in getattr(owner.known, "__dict__", ()):
            return element_of(owner)
        return Value() if _is_plain_tensor_attribute(name) else element_of(owner)

    def _attribute_of_python_module(self, module: types.ModuleType, name: str) -> Value:
        namespace = vars(module)
        if name in namespace:
            self.reads.append((namespace, name, namespace[name]))
            return lift(namespace[name], OUTSIDE)
        found = getattr(module, name, MISSING)
        if found is MISSING:
            return Value(places=frozenset((OUTSIDE,)))
        if is_plain_data(found):
            # A setting behind a property (torch.backends.cudnn.enabled) may be another one at the next call.
            return Value()
        return lift(found, OUTSIDE)

    def _attribute_of_class(self, cls: type, name: str) -> Value:
        found = self._find_in_class(cls, name)
        if found is MISSING:
            found = getattr(type(cls), name, MISSING)
            return Value(places=frozenset((OUTSIDE,))) if found is MISSING else element_of(Value(found))
        if isinstance(found, staticmethod):
            return lift(found.__func__, OUTSIDE)
        if isinstance(found, classmethod):
            return Value(Bound(found.__func__, Value(cls)))
        if isinstance(found, types.ClassMethodDescriptorType):
            return Value(Bound(found, Value(cls)))
        return lift(found, OUTSIDE)

    def _attribute_of_super(self, site: Any, view: Super, name: str) -> Value:
        receiver = view.receiver
        cls = type(receiver.known) if receiver.is_known else receiver.cls
        if isinstance(receiver.known, type):
            cls = receiver.known
        mro = cls.__mro__ if cls is not None and issubclass(cls, view.cls) else view.cls.__mro__
        for parent in mro[mro.index(view.cls) + 1 :]:
            if name in vars(parent):
                self.reads.append((vars(parent), name, vars(parent)[name]))  # type: ignore[arg-type]
                return self._bind(site, vars(parent)[name], receiver, parent)
        return element_of(receiver)

    def _attribute_of_object(self, site: Any, owner: Value, name: str) -> Value:
        known, cls = owner.known, type(owner.known)
        if cls.__getattribute__ is not object.__getattribute__ and hasattr(cls.__getattribute__, "__code__"):
            self.give_up(f"{cls.__name__} defines __getattribute__")
        found = self._find_in_class(cls, name)
        if isinstance(found, property):
            return self._bind(site, found, owner, cls)
        own = self._own_attribute(known, name)
        if own is not MISSING:
            plain = not lift(own, OUTSIDE).places
            return Value(own, frozenset() if plain else child_places(owner, name))
        if found is not MISSING:
            return self._bind(site, found, owner, cls)
        fallback = getattr(cls, "__getattr__", None)
        if fallback is not None and fallback is not torch.nn.Module.__getattr__:
            self.give_up(f"{cls.__name__} defines __getattr__")
        return element_of(owner)

    def _own_attribute(self, known: Any, name: str) -> Any:
        """What the instance itself has under this name."""
        own = getattr(known, "__dict__", None)
        if not isinstance(own, dict):
            return MISSING
        if not isinstance(known, torch.nn.Module):
            # Remembering the answer would keep the object alive.
            self.cacheable = False
            return own.get(name, MISSING)
        found = own.get(name, MISSING)
        for part in ("_parameters", "_buffers", "_modules"):
            if found is MISSING:
                found = own[part].get(name, MISSING)
        self.module_reads.append((known, name, found))
        return found

    def _find_in_class(self, cls: type, name: str) -> Any:
        for parent in cls.__mro__:
            namespace = vars(parent)
            if name in namespace:
                if parent is not object:
                    self.reads.append((namespace, name, namespace[name]))  # type: ignore[arg-type]
                return namespace[name]
        return MISSING

    def call_special(self, site: Any, value: Value, names: tuple[str, ...], *arguments: Value) -> Value | None:
        """Call the first of these methods that the class of `value` defines in Python; None if it defines none."""
        if isinstance(value.known, WRAPPERS):
            return None
        cls = type(value.known) if value.is_known else value.cls
        if cls is None or not is_python_class(cls) or issubclass(cls, torch.Tensor) or is_plain_data(value.known):
            return None
        for name in names:
            method = self._find_in_class(cls, name)
            if isinstance(method, types.FunctionType) and method.__code__.co_filename != "<string>":
                given = [value] if method.__code__.co_argcount == 1 else [value, *(arguments or (Value(),))]
                return self.call((site, name), Value(method), Arguments(given))
        return None

    def find_setter(self, cls: type, name: str) -> Any:
        """The Python function that runs when the attribute is set on an instance, if there is one."""
        found = self._find_in_class(cls, name)
        if isinstance(found, property):
            return found.fset
        setter = self._find_in_class(cls, "__setattr__")
        return setter if isinstance(setter, types.FunctionType) and setter is not torch.nn.Module.__setattr__ else None

    def _bind(self, site: Any, found: Any, owner: Value, cls: type) -> Value:
        """What `owner.name` is when the class has `found` under that name."""
        if isinstance(found, types.FunctionType | types.MethodDescriptorType | types.WrapperDescriptorType):
            return Value(Bound(found, owner))
        if isinstance(found, types.ClassMethodDescriptorType):
            receiver = owner if isinstance(owner.known, type) else Value(cls)
            return Value(Bound(found, receiver))
        if isinstance(found, property):
            if found.fget is None:
                return element_of(owner)
            return self.call((site, "property"), Value(found.fget), Arguments([owner]))
        if isinstance(found, functools.cached_property):
            return self.call((site, "property"), Value(found.func), Arguments([owner]))
        if isinstance(found, staticmethod):
            return lift(found.__func__, OUTSIDE)
        if isinstance(found, classmethod):
            return Value(Bound(found.__func__, owner if isinstance(owner.known, type) else Value(cls)))
        if isinstance(found, torch._ops.OperatorBase | torch._ops.OpOverloadPacket):
            return Value(found)
        if hasattr(type(found), "__get__"):
            if hasattr(type(found).__get__, "__code__"):
                self.give_up(f"attribute of {cls.__name__} is a {type(found).__name__}")
            return element_of(owner)
        return lift(found, OUTSIDE)

    def read_item(self, site: Any, owner: Value, index: Value) -> Value:
        """The value of `owner[index]`."""
        known = owner.known
        if isinstance(known, torch.nn.Module):
            return self._item_of_module(site, owner, index)
        if index.is_known and isinstance(known, _BUILTIN_CONTAINERS) and is_plain_data(index.known):
            self._depends_on_contents(known)
            try:
                return _lift_inside(_item(known, index.known), owner)
            except (LookupError, TypeError):
                return element_of(owner)
        if isinstance(known, type) or type(known).__module__ == "typing":
            return Value()
        local = contents(owner)
        if local is not None and index.is_known:
            if (
                local.items is not None
                and isinstance(index.known, int)
                and -len(local.items) <= index.known < len(local.items)
            ):
                return local.items[index.known]
            if local.items is not None and isinstance(index.known, slice) and is_plain_data(index.known):
                return self.make_sequence(site, local.items[index.known], owner.cls or tuple)
            if local.entries is not None and isinstance(index.known, str) and index.known in local.entries:
                return local.entries[index.known]
        return self._item_by_method(site, owner, index)

    def _item_by_method(self, site: Any, owner: Value, index: Value) -> Value:
        cls = type(owner.known) if owner.is_known else owner.cls
        if cls is not None and is_python_class(cls) and not issubclass(cls, torch.Tensor):
            method = self._find_in_class(cls, "__getitem__")
            if isinstance(method, types.FunctionType):
                return self.call(site, Value(method), Arguments([owner, index]))
        return element_of(owner)

    def _item_of_module(self, site: Any, owner: Value, index: Value) -> Value:
        module = owner.known
        if not isinstance(module, torch.nn.Sequential | torch.nn.ModuleList | torch.nn.ModuleDict):
            return self._item_by_method(site, owner, index)
        children = self._children(owner)
        try:
            if isinstance(index.known, str):
                return children[index.known]
            if isinstance(index.known, int):
                return list(children.values())[index.known]
        except LookupError:
            return element_of(owner)
        if 0 < len(children) <= 16 and not index.is_known:
            return Value(OneOf(tuple(children.values())), owner.places)
        return self._item_by_method(site, owner, index)

    def items_of(self, value: Value) -> list[Value] | None:
        known = value.known
        if isinstance(known, torch.nn.Module):
            return self._children_iterated(value)
        if isinstance(known, _BUILTIN_CONTAINERS + _VIEWS) and len(known) <= _ITEM_LIMIT:
            self._depends_on_contents(known)
            return [_lift_inside(item, value) for item in known]
        local = contents(value)
        if local is not None and local.items is not None:
            return list(local.items)
        if local is not None and local.entries is not None and value.cls is dict:
            return [Value(name) for name in local.entries]
        return None

    def _children_iterated(self, value: Value) -> list[Value] | None:
        """What iterating over a module container gives, unless a subclass changed that."""
        iterate = getattr(type(value.known), "__iter__", None)
        if iterate is torch.nn.ModuleDict.__iter__:
            return [Value(name) for name in self._children(value)]
        if iterate in (torch.nn.Sequential.__iter__, torch.nn.ModuleList.__iter__):
            return list(self._children(value).values())
        return None

    def _children(self, owner: Value) -> dict[str, Value]:
        module = owner.known
        self.module_reads.append((module, ModuleRead.CHILDREN, tuple(module._modules)))
        self.module_reads += [(module, name, child) for name, child in module._modules.items()]
        return {
            name: Value(child, frozenset() if child is None else child_places(owner, name))
            for name, child in module._modules.items()
        }

    def length_of(self, value: Value) -> int | None:
        known = value.known
        if isinstance(known, _BUILTIN_CONTAINERS + _VIEWS):
            self._depends_on_contents(known)
            return len(known)
        items = self.items_of(value)
        return None if items is None else len(items)

    def _depends_on_contents(self, known: Any) -> None:
        if not is_plain_data(known) and not isinstance(known, tuple):
            self.cacheable = False


def child_places(owner: Value, name: str) -> frozenset[Any]:
    """The memory of an attribute of `owner`."""
    if len(owner.places) == 1:
        (place,) = owner.places
        if isinstance(place, str) and place != OUTSIDE:
            return frozenset((f"{place}.{name}" if place else name,))
    return owner.places or frozenset((OUTSIDE,))


def _item(container: Any, index: Any) -> Any:
    return container[index]


def _lift_inside(item: Any, owner: Value) -> Value:
    lifted = lift(item, OUTSIDE)
    return Value(item, owner.places or lifted.places) if lifted.places else lifted


def is_python_class(cls: type) -> bool:
    """Whether the class was made by a `class` statement (or by a program), not in C."""
    return bool(cls.__flags__ & (1 << 9)) and cls.__module__ != "builtins"


@functools.cache
def _is_plain_tensor_attribute(name: str) -> bool:
    """Whether an attribute of tensors is a number, a shape or the like, and not memory; an empty tensor tells."""
    try:
        # The question may come while a program is being captured, which must not see it.
        with torch._C.DisableTorchFunction():
            found = getattr(torch.empty(0, 0), name)
    except (AttributeError, RuntimeError):
        return False
    return found is not None and is_plain_data(found)
