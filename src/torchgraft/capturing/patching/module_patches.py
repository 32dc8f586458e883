"""What `torch.nn.Module` and its like do while a model is traced: they ask their own thread's tracer, if there is one.
The answers are the tracer's; the machinery that puts these functions in place and takes them away is in `active.py`.
"""

from __future__ import annotations

import inspect
import operator
import sys
from types import MethodType
from typing import Any

import torch

from torchgraft.capturing.patching.active import CodePatch, Patch, active, shared_patch
from torchgraft.capturing.patching.autograd_functions import FUNCTION_PATCHES
from torchgraft.capturing.patching.regions import REGION_PATCHES
from torchgraft.capturing.patching.switches import SWITCH_PATCHES
from torchgraft.capturing.patching.wrapping import recorded_call, recorded_method
from torchgraft.capturing.user_code.comparisons import asks_nearby, compares_with_bool

# Factories that take sizes one by one refuse a proxy before torch's override protocol is asked.
_SIZE_METHODS = ("expand", "view", "reshape", "repeat", "permute", "tile", "new_zeros", "new_ones", "new_empty")
_SIZE_FACTORIES = ("zeros", "ones", "empty", "rand", "randn")

# Unwrapped, because torch.fx may be tracing, and have its own functions there, when this file is first imported.
_module_call = CodePatch(inspect.unwrap(torch.nn.Module.__call__))
MODULE_GETATTR = CodePatch(inspect.unwrap(torch.nn.Module.__getattr__))
_module_setattr = CodePatch(inspect.unwrap(torch.nn.Module.__setattr__))
_module_delattr = CodePatch(inspect.unwrap(torch.nn.Module.__delattr__))

call_module = _module_call.original
read_attribute = MODULE_GETATTR.original


class ModuleForward:
    """The `forward` that a tracer's `call_module` receives: runs a module's forward with traced values."""

    __slots__ = ("_module", "_tracer")
    __name__ = "forward"  # which tracers of other libraries read

    def __init__(self, module: torch.nn.Module, tracer: Any) -> None:
        self._module = module
        self._tracer = tracer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._tracer._enter_module(self._module)
        if self._tracer._optional_inputs:
            self._tracer._guard_optional_inputs(self._module, args, kwargs)
        return call_module(self._module, *args, **kwargs)


# The names that the lent code below needs; see CodePatch.lend.
_torchgraft_active = active
_torchgraft_call = call_module
_torchgraft_getattr = read_attribute
_torchgraft_setattr = _module_setattr.original
_torchgraft_delattr = _module_delattr.original


def _lent_call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    tracer = _torchgraft_active.tracer
    if tracer is None:
        return _torchgraft_call(self, *args, **kwargs)
    return tracer._call(self, args, kwargs)


def _lent_getattr(self: torch.nn.Module, name: str) -> Any:
    tracer = _torchgraft_active.tracer
    if tracer is None:
        return _torchgraft_getattr(self, name)
    if tracer._default_getattr and name in (modules := self.__dict__.get("_modules", ())):
        return modules[name]  # what is asked most of all
    return tracer._read_attribute(self, name)


class _LentMethods:
    """The originals of these call `super()` and so close over `__class__`; what is lent to them must do so too."""

    def write(self: Any, name: str, value: Any) -> None:
        super  # noqa: B018 (mentioning it is enough to close over __class__)
        tracer = _torchgraft_active.tracer
        if tracer is not None:
            if tracer._is_written_in_place(self, name, value):
                return
            tracer._before_write(self, name, value)
        _torchgraft_setattr(self, name, value)

    def delete(self: Any, name: str) -> None:
        super  # noqa: B018 (mentioning it is enough to close over __class__)
        tracer = _torchgraft_active.tracer
        if tracer is not None:
            tracer._before_write(self, name, None)
        _torchgraft_delattr(self, name)


_module_call.lend(_lent_call)  # type: ignore[arg-type]
MODULE_GETATTR.lend(_lent_getattr)  # type: ignore[arg-type]
_module_setattr.lend(_LentMethods.write)  # type: ignore[arg-type]
_module_delattr.lend(_LentMethods.delete)  # type: ignore[arg-type]


class TrainingFlag:
    """`self.training`, or `not self.training`, while tracing: handed on it stays a question asked when the program runs; branched
    on, a guard."""

    __slots__ = ("_is_negated", "_module", "_tracer")

    def __init__(self, module: torch.nn.Module, tracer: Any, is_negated: bool = False) -> None:
        self._module = module
        self._tracer = tracer
        self._is_negated = is_negated

    def __bool__(self) -> bool:
        return bool(self._tracer._training_decides(self._module)) is not self._is_negated

    def __fx_create_arg__(self, tracer: Any) -> Any:
        mode = self._tracer._training_node(self._module)
        if not self._is_negated:
            return mode
        if isinstance(mode, bool):
            return not mode
        node = tracer.create_node("call_function", operator.not_, (mode,), {})
        if tracer._runs_for_real:
            tracer.flow.plain[node] = plain_mode(self)
        return node

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Its presence lets torch's built-in functions take a flag for a bool. The mode at work has looked at the call by now.
        plain = {name: plain_mode(value) for name, value in (kwargs or {}).items()}
        return function(*[plain_mode(value) for value in args], **plain)

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __int__(self) -> int:
        return int(bool(self))

    __index__ = __int__

    def __repr__(self) -> str:
        return repr(bool(self))

    def __format__(self, specification: str) -> str:
        return format(bool(self), specification)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return bool  # for isinstance(); bool itself cannot be inherited from


def plain_mode(value: Any) -> Any:
    """The plain mode of a flag; any other value as it is. Nothing is decided by it."""
    if type(value) is not TrainingFlag:
        return value
    mode = value._module.__dict__["training"]
    return not mode if value._is_negated else mode


def _add_bool_operator(name: str) -> None:
    function = getattr(operator, name)
    setattr(TrainingFlag, f"__{name.strip('_')}__", lambda self, other: function(bool(self), other))
    setattr(TrainingFlag, f"__r{name.strip('_')}__", lambda self, other: function(other, bool(self)))


for _name in ("add", "sub", "mul", "truediv", "and_", "or_", "xor"):
    _add_bool_operator(_name)


class _TrainingDescriptor:
    """Stands on nn.Module for the attribute `training`; no property, because TorchScript compiles those."""

    def __get__(self, module: Any, owner: type) -> Any:
        return self if module is None else _read_training(module)

    def __set__(self, module: torch.nn.Module, value: Any) -> None:
        module.__dict__["training"] = plain_mode(value)

    def __delete__(self, module: torch.nn.Module) -> None:
        if "training" not in module.__dict__:
            raise AttributeError("training")
        del module.__dict__["training"]


def _read_training(module: torch.nn.Module) -> Any:
    if "training" not in module.__dict__:
        raise AttributeError("training")  # Python goes on to ask __getattr__, as it would have without the property
    tracer = active.tracer
    if tracer is None or tracer._switching:
        return module.__dict__["training"]
    # `self.training is True` can only be answered by the plain value.
    if tracer.flags_are_plain or (not tracer._runs_for_real and asks_nearby(compares_with_bool, sys._getframe(2))):
        return tracer._training_decides(module)
    tracer._has_stand_ins = True
    return TrainingFlag(module, tracer)


_set_tensor_attribute = torch.Tensor.__setattr__


def _write_tensor_attribute(tensor: torch.Tensor, name: str, value: Any) -> None:
    """`self.buffer.note = value`. What torch itself has under that name (`data`, `grad`) takes care of itself."""
    tracer = active.tracer
    if tracer is not None and not tracer._switching:
        if name in ("real", "imag") and tracer._runs_for_real:
            tracer.calls.unseen(setattr, (tensor, name, value), {})
            return
        if not hasattr(torch.Tensor, name):
            tracer._before_tensor_write(tensor, name, value)
    _set_tensor_attribute(tensor, name, value)


_set_memory = torch.Tensor.set_


def _share_memory_with(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`tensor.set_(other)`."""
    tracer = active.tracer
    if tracer is None or tracer._switching or not tracer._runs_for_real:
        return _set_memory(tensor, *args, **kwargs)
    return tracer.calls.unseen(_set_memory, (tensor, *args), kwargs)


# Writes that torch's override protocol is not asked about, except for attributes of somebody's own.
TENSOR_WRITE_PATCHES = [
    Patch(torch.Tensor, "__setattr__", _write_tensor_attribute),
    Patch(torch.Tensor, "set_", _share_memory_with),
]


class _SizeMethod:
    """Stands on torch.Tensor for a method. Asked of the class itself it is the method that was there: torch's override
    protocol looks methods up there to say which one was called."""

    __slots__ = ("_original", "_replacement")

    def __init__(self, name: str) -> None:
        self._original = getattr(torch.Tensor, name)
        self._replacement = recorded_method(self._original)

    def __get__(self, tensor: Any, owner: type) -> Any:
        return self._original if tensor is None else MethodType(self._replacement, tensor)


MODULE_PATCHES = [
    _module_call,
    MODULE_GETATTR,
    _module_setattr,
    _module_delattr,
    Patch(torch.nn.Module, "training", _TrainingDescriptor()),  # type: ignore[arg-type]
    *FUNCTION_PATCHES,
    TENSOR_WRITE_PATCHES[0],
    *REGION_PATCHES,
    *SWITCH_PATCHES,
    *[
        Patch(torch.Tensor, name, _SizeMethod(name))  # type: ignore[arg-type]
        for name in _SIZE_METHODS
    ],
    *[patch for name in _SIZE_FACTORIES if (patch := shared_patch(torch, name, recorded_call)) is not None],
]
