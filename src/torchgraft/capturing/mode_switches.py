"""What a model's own `train()` does: whether it only gives every module the mode, as torch's does, or more (freezes some, merges
weights). It is tried on a stand-in for the model, which has its attributes and no right to compute anything; one that looks at
numbers and flags alone, as most do, on an object that has just those.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable
from itertools import chain
from operator import is_
from types import CodeType, FunctionType
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from torchgraft.ir.bytecode import instructions
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import check_modes
from torchgraft.ir.origin import asked_once, source_line


def has_own_train(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether one of some modules is switched to another mode in a way of its own."""
    return any(map(defines_train, {type(module) for module in modules}))


def defines_train(cls: type[torch.nn.Module]) -> bool:
    """The same for a class."""
    return not cls.train.__module__.startswith("torch.")


def guard_modes(graph: Graph, paths: dict[torch.nn.Module, str]) -> None:
    """Have a program check, before anything else, the modes of what it calls in modules that have a `train` of their own."""
    called = {node._target for node in graph.find_nodes(op="call_module")}
    for module, path in paths.items():
        own: Any = type(module).train
        if not has_own_train((module,)) or path in called:
            continue
        inside = [(inner, name) for inner, name in paths.items() if name in called and _is_in(name, path)]
        modes = [(module, path), *inside]
        start = next(node for node in graph.nodes if node._op != "placeholder")
        with graph.inserting_before(start):
            found = [graph.create_node("get_attr", f"{name}.training" if name else "training") for _, name in modes]
            expected = tuple([bool(item.__dict__["training"]) for item, _ in modes])
            graph.create_node("call_function", check_modes, (tuple(found), expected, str(_line_of(own))))


def _is_in(name: str, path: str) -> bool:
    return not path or name.startswith(f"{path}.")


def _line_of(function: Any) -> Any:
    """Where a function is written."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return source_line(code, 0) or getattr(function, "__qualname__", function)


def only_switches(root: torch.nn.Module, modules: Iterable[torch.nn.Module]) -> bool:
    """Whether switching a model there and back gives every one of its modules the mode, and does nothing else.

    The stand-in shares lists and objects with the model: the caller puts those back.
    """
    own = [module for module in modules if defines_train(type(module))]
    return all(_only_switches_itself(module, root.training) for module in own) or _only_switches_all(root)


# ---- a trial on an object with nothing but what the method mentions ----


def _only_switches_itself(module: torch.nn.Module, training: bool) -> bool:
    """Whether a module's own `train` is seen to do nothing else, whatever is inside the module."""
    cls = type(module)
    mentioned = _mentioned_by_train(cls)
    if mentioned is None:
        return False
    probe = object.__new__(cls)
    attributes = probe.__dict__
    attributes["children"] = tuple  # none: those that have a `train` of their own are tried by themselves
    attributes["training"] = training
    for name in mentioned:
        value = module.__dict__.get(name, getattr(cls, name, None))
        if name not in module.__dict__ and type(value) is FunctionType:
            attributes[name] = _refuse
        elif type(value) not in _PLAIN or any(name in table for table in _tables(module)[1:]):
            return False
        elif name in module.__dict__:
            attributes[name] = value
    before = attributes.copy()
    try:
        for mode in (not training, training):
            probe.train(mode)
            before["training"] = mode
            if attributes.keys() != before.keys() or not all(attributes[name] is before[name] for name in before):
                return False
    except Exception:
        return False
    return True


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError("a method was called that may do anything")


_PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None)})


def _mentioned_by_train(cls: type[torch.nn.Module]) -> frozenset[str] | None:
    """The attributes that the `train` methods of a class mention; None if they do what a look at these does not show."""
    if any(not getattr(cls, name).__module__.startswith("torch.") for name in ("__getattr__", "__setattr__")):
        return None
    if cls.__getattribute__ is not object.__getattribute__:
        return None
    own = [base for base in cls.__mro__ if not base.__module__.startswith("torch.")]
    pending = [vars(base)["train"] for base in own if "train" in vars(base)]
    found: set[str] = set()
    properties: set[str] = set()
    while pending:
        method: Any = pending.pop()
        names = _names_in(method.__code__) if type(method) is FunctionType else None
        if names is None:
            return None
        for name in names - found - properties:
            value = getattr(cls, name, None)
            if isinstance(value, property):
                properties.add(name)
                pending.append(value.fget)
            else:
                found.add(name)
    return None if "children" in found else frozenset(found - {"train", "training"})


@asked_once
def _names_in(code: CodeType) -> set[str] | None:
    """The attributes that a method mentions; None if it mentions anything else, or makes functions."""
    if code.co_freevars not in ((), ("__class__",)) or code.co_cellvars:
        return None
    listing = [item for item in instructions(code) if item.opname != "PUSH_NULL"]
    names: set[str] = set()
    for place, item in enumerate(listing):
        if item.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR") or "SUPER_ATTR" in item.opname:
            names.add(item.argval)
        elif item.opname == "LOAD_GLOBAL" and item.argval in ("getattr", "hasattr"):
            whose, name, *rest = listing[place + 1 : place + 5]
            is_spelled = whose.opname.startswith("LOAD_FAST") and name.opname == "LOAD_CONST"
            is_alone = bool(rest) and _is_call(rest[0] if rest[0].opname != "LOAD_CONST" else rest[-1])
            if not is_spelled or not is_alone:
                return None
            names.add(name.argval)
        elif "NAME" in item.opname or "FUNCTION" in item.opname or "GLOBAL" in item.opname:
            if item.argval != "super":
                return None
    return None if any(name.startswith("__") for name in names) else names


def _is_call(instruction: dis.Instruction) -> bool:
    return instruction.opname in ("PRECALL", "CALL")


# ---- a trial on a stand-in for all of the model ----


def _only_switches_all(root: torch.nn.Module) -> bool:
    copies: dict[torch.nn.Module, torch.nn.Module] = {}
    copy = _stand_in(root, copies)
    tables = [table for stand_in in copies.values() for table in _tables(stand_in)]
    names, values = _content(tables)
    modes = [place for place, name in enumerate(names) if name == "training"]
    try:
        for mode in (not root.training, bool(root.training)):
            with _NoCalls():
                copy.train(mode)
            for place in modes:
                values[place] = mode
            # Each time: what it sets in one mode it may set back in the other.
            names_now, values_now = _content(tables)
            if names_now != names or not all(map(is_, values_now, values)):
                return False
        return True
    except Exception:
        return False  # it wants to compute, or the stand-in is not enough for it
    finally:
        for table in tables:
            table.clear()  # they refer to one another, and would be left to the garbage collector


class _NoCalls(TorchFunctionMode):
    """Refuses every call of torch's, so that what belongs to the real model stays as it is."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{function} was called")


def _stand_in(module: torch.nn.Module, copies: dict[torch.nn.Module, torch.nn.Module]) -> torch.nn.Module:
    """A module of the same class with tables of its own, and stand-ins for the modules inside."""
    known = copies.get(module)
    if known is None:
        known = copies[module] = object.__new__(type(module))
        attributes = known.__dict__
        attributes.update(module.__dict__)
        attributes["_parameters"] = attributes["_parameters"].copy()
        attributes["_buffers"] = attributes["_buffers"].copy()
        table = attributes["_modules"] = attributes["_modules"].copy()
        for name, inner in table.items():
            if inner is not None:
                table[name] = _stand_in(inner, copies)
        if type(module).train is _TRAIN and all(_switch_of(inner) for inner in table.values() if inner is not None):
            attributes["train"] = _Switch(known)
    return known


_TRAIN = torch.nn.Module.train


class _Switch:
    """What torch's own `train` does to a module and those inside, none of which has another one; it takes a tenth of the time."""

    __slots__ = ("_module", "_tables")

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        inner = [_switch_of(part) for part in module._modules.values() if part is not None]
        self._tables = [module.__dict__, *[table for switch in inner for table in switch._tables]]

    def __call__(self, mode: bool = True) -> torch.nn.Module:
        for table in self._tables:
            table["training"] = mode
        return self._module


def _switch_of(module: torch.nn.Module) -> Any:
    return module.__dict__.get("train")


def _tables(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    attributes = module.__dict__
    return attributes, attributes["_parameters"], attributes["_buffers"], attributes["_modules"]


def _content(tables: list[dict[str, Any]]) -> tuple[list[str], list[Any]]:
    """The names and the objects in many tables, in order."""
    return list(chain.from_iterable(tables)), list(chain.from_iterable(map(dict.values, tables)))
