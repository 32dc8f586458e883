"""`type` during a watched run: for a symbolic number it says what it says for a plain one, so that a model which asks is
answered as in eager; and whether an input is a parameter, where somebody asks. The numbers themselves are in `sizes.py`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Iterable
from types import FunctionType, GenericAlias
from typing import Any

import torch

from torchgraft.capturing.flowing.dtypes import FlowingDtype
from torchgraft.capturing.flowing.sizes import unwrapped
from torchgraft.capturing.patching.active import Patch, active
from torchgraft.capturing.patching.module_patches import TrainingFlag

_STANDS_FOR: dict[type, type] = {TrainingFlag: bool, FlowingDtype: torch.dtype}


class _Asked(type):
    """Makes the class below answer as `type` itself would; only calling it with one value is different."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not _Type:
            return super().__call__(*args, **kwargs)
        if len(args) != 1:
            return type(*args, **kwargs)
        number = unwrapped(args[0])
        if number is not None:
            return type(number.value)
        if type(args[0]) is torch.Tensor:
            _ask_class(args[0])
        return _STANDS_FOR.get(type(args[0])) or type(args[0])

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type) if cls is _Type else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type) if cls is _Type else super().__subclasscheck__(subclass)

    def __eq__(cls, other: object) -> bool:
        return cls is other or (cls is _Type and other is type)

    def __hash__(cls) -> int:
        return hash(type) if cls is _Type else super().__hash__()

    def __getitem__(cls, item: Any) -> GenericAlias:
        return GenericAlias(type, item)


class _Type(type, metaclass=_Asked):
    pass


def _ask_class(tensor: torch.Tensor) -> None:
    tracer = active.tracer
    if tracer is not None and tracer._runs_for_real and not tracer._switching:
        tracer.values.guard_class(tensor)


_ParameterClass: Any = type(torch.nn.Parameter)
_is_instance = _ParameterClass.__instancecheck__


def _is_parameter(cls: Any, instance: Any) -> bool:
    """`isinstance(x, torch.nn.Parameter)`, where x is not of exactly that class."""
    if type(instance) is torch.Tensor:
        _ask_class(instance)
    return _is_instance(cls, instance)


PARAMETER_PATCH = Patch(_ParameterClass, "__instancecheck__", _is_parameter)
_patches: dict[int, tuple[dict[str, Any], Patch]] = {}
_lock = threading.Lock()


def type_patches(function: Any, modules: Iterable[torch.nn.Module]) -> list[Patch]:
    """Patches of `type` where the code of a model looks it up: in the files of its classes. Nobody else's is touched."""
    names = {name for kind in set(map(type, modules)) for name in _files_of(kind)}
    scopes = [vars(sys.modules[name]) for name in names if name in sys.modules]
    function = inspect.unwrap(function)
    if isinstance(function, FunctionType) and not (function.__module__ or "").startswith(_NOT_LOOKED_AT):
        scopes.append(function.__globals__)
    with _lock:
        for scope in scopes:
            if id(scope) not in _patches:
                _patches[id(scope)] = (scope, Patch(scope, "type", _Type))
        found = {id(scope): _patches[id(scope)][1] for scope in scopes}
    return [patch for patch in found.values() if patch.users or "type" not in patch.holder]


@functools.cache
def _files_of(cls: Any) -> list[str]:
    """The names of the modules in which the code of a class may be."""
    return [base.__module__ for base in cls.__mro__ if not base.__module__.startswith(_NOT_LOOKED_AT)]


_NOT_LOOKED_AT = ("torch.", "torchgraft", "builtins", "typing", "abc", "collections")
