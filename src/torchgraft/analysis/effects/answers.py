"""The memory of answers: what an answer depends on, and whether it still holds.
Nothing here keeps a model alive, and no answer outlives a change of anything it was read from.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from torchgraft.analysis.effects.machine import ModuleRead
from torchgraft.analysis.effects.values import MISSING, OUTSIDE, Findings, is_plain_data, lift

Fact = TypeVar("Fact")

_LIMIT = 16_384


@dataclass(frozen=True, slots=True)
class Remembered(Generic[Fact]):
    """A fact and what it was read from: names in namespaces, and attributes of modules."""

    fact: Fact
    names: tuple[tuple[Any, str, Any], ...]
    attributes: tuple[tuple[weakref.ref[torch.nn.Module], str, Any], ...]

    def still_holds(self) -> bool:
        for namespace, name, found in self.names:
            if namespace.get(name) is not found:
                return False
        for owner, name, expected in self.attributes:
            module = owner()
            if module is None:
                return False
            found = current(module, name)
            if found is not expected and not (isinstance(expected, weakref.ref) and expected() is found):
                if type(found) is not type(expected) or found != expected:
                    return False
        return True


class Answers(Generic[Fact]):
    """Facts by call: of functions that live in a Python module, and of neural modules for as long as those live."""

    def __init__(self) -> None:
        self._by_call: dict[Any, Remembered[Fact]] = {}
        self._by_module: weakref.WeakKeyDictionary[torch.nn.Module, dict[Any, Remembered[Fact]]] = (
            weakref.WeakKeyDictionary()
        )

    def get(self, node: Any, find: Callable[[Any], tuple[Fact, Findings]]) -> Fact:
        """The fact about a call, from memory if it still holds."""
        shelf, key = self._place(node)
        if shelf is None or key is None:
            return find(node)[0]
        remembered = shelf.get(key)
        if remembered is not None and remembered.still_holds():
            return remembered.fact
        fact, findings = find(node)
        names, attributes = dependencies(findings)
        if names is not None and attributes is not None:
            if len(shelf) >= _LIMIT:
                shelf.clear()
            shelf[key] = Remembered(fact, names, attributes)
        return fact

    def clear(self) -> None:
        """Forget everything."""
        self._by_call.clear()
        self._by_module.clear()

    def _place(self, node: Any) -> tuple[dict[Any, Remembered[Fact]] | None, Any]:
        if node.op != "call_module":
            if node.op == "call_function" and not is_permanent(node.target):
                return None, None
            return self._by_call, call_key(node)
        module = submodule(node.graph.owning_module, node.target)
        try:
            return (None if module is None else self._by_module.setdefault(module, {})), call_key(node)
        except TypeError:
            return None, None


def submodule(root: torch.nn.Module | None, path: str) -> torch.nn.Module | None:
    """The module at a dotted path, without running anything."""
    module = root
    for name in path.split("."):
        children = None if module is None else module.__dict__.get("_modules")
        if not isinstance(children, dict):
            return None
        module = children.get(name)
    return module


def current(module: torch.nn.Module, name: str) -> Any:
    """What an instance has under a name now; the questions of `ModuleRead` have names of their own."""
    attributes = module.__dict__
    if name in attributes:
        return attributes[name]
    for part in ("_parameters", "_buffers", "_modules"):
        if name in attributes[part]:
            return attributes[part][name]
    if name == ModuleRead.HOOKS:
        return bool(attributes["_forward_hooks"] or attributes["_forward_pre_hooks"] or _global_hooks())
    if name == ModuleRead.CHILDREN:
        return tuple(attributes["_modules"])
    if name == ModuleRead.CLASS:
        return type(module)
    return MISSING


def _global_hooks() -> bool:
    inner = torch.nn.modules.module
    return bool(inner._global_forward_hooks or inner._global_forward_pre_hooks)


def dependencies(findings: Findings) -> tuple[Any, Any]:
    """What an analysis depends on in a form that can be kept, or (None, None) if it must not be kept."""
    if not findings.cacheable:
        return None, None
    names = {(id(namespace), name): (namespace, name, found) for namespace, name, found in findings.reads}
    if any(lift(found, OUTSIDE).places for _, _, found in names.values() if not isinstance(found, _DESCRIPTORS)):
        return None, None
    attributes = {}
    for module, name, found in findings.module_reads:
        expected = found
        if found is not MISSING and not is_plain_data(found) and not isinstance(found, type):
            try:
                expected = weakref.ref(found)
            except TypeError:
                return None, None
        attributes[id(module), name] = (weakref.ref(module), name, expected)
    return tuple(names.values()), tuple(attributes.values())


_DESCRIPTORS = (property, staticmethod, classmethod, types.GetSetDescriptorType, types.MemberDescriptorType)


def is_permanent(target: Any) -> bool:
    """Whether a function lives in a module under its name, so that remembering it keeps nothing alive."""
    if isinstance(target, types.FunctionType):
        module = sys.modules.get(target.__module__ or "")
        return module is not None and module.__dict__.get(target.__qualname__) is target
    return isinstance(target, types.BuiltinFunctionType | torch._ops.OperatorBase | torch._ops.OpOverloadPacket)


def call_key(node: Any) -> Any:
    """The target and the arguments of a call, with positions in the place of nodes; None if it cannot be a key."""
    order: dict[Any, int] = {}
    try:
        positional = tuple([_argument_key(value, order) for value in node.args])
        named = tuple([(name, _argument_key(value, order)) for name, value in node.kwargs.items()])
        key = (node.op, node.target, positional, named)
        hash(key)
        return key
    except TypeError:
        return None


def _argument_key(value: Any, order: dict[Any, int]) -> Any:
    if hasattr(type(value), "all_input_nodes"):
        return (Findings, order.setdefault(value, len(order)))
    if isinstance(value, list | tuple):
        return (type(value), *[_argument_key(item, order) for item in value])
    if isinstance(value, slice):
        return (slice, *[_argument_key(part, order) for part in (value.start, value.stop, value.step)])
    if not is_plain_data(value):
        raise TypeError("not a constant")
    # 1, 1.0 and True are equal, but not for `isinstance` in the code that is read.
    return (type(value), value)
