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
from torchgraft.ir.node import Node

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
        try:
            key = call_key(node)
            shelf = self._by_call if node.op != "call_module" else self._shelf_of_module(node)
            remembered = None if shelf is None else shelf.get(key)
        except TypeError:  # something in the call cannot be a key
            return find(node)[0]
        if remembered is not None and remembered.still_holds():
            return remembered.fact
        fact, findings = find(node)
        if shelf is not None and (node.op != "call_function" or is_permanent(node.target)):
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

    def _shelf_of_module(self, node: Any) -> dict[Any, Remembered[Fact]] | None:
        module = submodule(node.graph.owning_module, node.target)
        return None if module is None else self._by_module.setdefault(module, {})


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
    """The target and the arguments of a call, with positions in the place of nodes; TypeError if some cannot be keys."""
    order: dict[Any, int] = {}
    positional = tuple([_argument_key(value, order) for value in node.args])
    if not node.kwargs:
        return node.op, node.target, positional
    return node.op, node.target, positional, tuple([(k, _argument_key(v, order)) for k, v in node.kwargs.items()])


def _argument_key(value: Any, order: dict[Any, int]) -> Any:
    cls = type(value)
    if cls is Node or hasattr(cls, "all_input_nodes"):
        return Node, order.setdefault(value, len(order))
    if isinstance(value, list | tuple):
        return (cls, *[_argument_key(item, order) for item in value])
    if cls is slice:
        return (slice, *[_argument_key(part, order) for part in (value.start, value.stop, value.step)])
    if not is_plain_data(value):
        raise TypeError("not a constant")
    # 1, 1.0 and True are equal, but not for `isinstance` in the code that is read.
    return cls, value
