"""Calls on fake tensors, remembered: the same call on tensors that look the same gives one that looks the same.
torch takes some 70 microseconds to work out one operator, a look-up and a new fake take 15. What a fake is is said in `fake.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as torch_modules

from torchgraft.analysis.effects.operators import ARITHMETIC, operator_of
from torchgraft.analysis.fake import FakeTensor, FakeTensorMode, detached
from torchgraft.interpreter import Interpreter
from torchgraft.ir.modules import is_from_torch

_CONSTANTS = frozenset(
    {int, float, bool, complex, str, type(None), type(...)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)


class _Looks(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    history: Any


class FakeCalls:
    """What calls gave under one mode: operators without effects, and modules of torch.nn, which change no looks.
    Results are remembered that are one tensor, either in memory of its own or the very one that was given.

    >>> from torchgraft.analysis.fake import fake_mode_of, fake_tree
    >>> mode = fake_mode_of()
    >>> calls, x = FakeCalls(mode), fake_tree(torch.ones(2, 3), mode)
    >>> first, second = calls.function(torch.relu, (x,), {}), calls.function(torch.relu, (x,), {})
    >>> first is second, second.shape, second.device, len(calls)
    (False, torch.Size([2, 3]), device(type='cpu'), 1)
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        # A result by its looks, or by its place among the tensors of the call.
        self._known: dict[Any, _Looks | int] = {}
        # The newest fake that was made here, and the tensor without data that it was made of.
        self._newest: tuple[Any, Any] = (None, None)

    def __len__(self) -> int:
        return len(self._known)

    def function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a function on fakes."""
        description = self._described("call_function", target, args, kwargs)
        return self._result(description, lambda: target(*args, **kwargs))

    def method(self, target: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a method of the first of some fakes."""
        description = self._described("call_method", target, args, kwargs)
        return self._result(description, lambda: getattr(args[0], target)(*args[1:], **kwargs))

    def module(self, target: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a module whose tensors are fakes."""
        return self._result(self._described_module(target, args, kwargs), lambda: target(*args, **kwargs))

    def snapshot(self, fake: Any) -> Any:
        """A fake of the same memory that stays as it is now, whatever is done to the shape of the given one."""
        newest, bare = self._newest
        if fake is newest:
            return FakeTensor(self._mode, bare, fake.fake_device)
        return detached(fake, self._mode)

    # ---- results ----

    def _result(self, description: _Description | None, call: Callable[[], Any]) -> Any:
        if description is None:
            return self._worked_out(call)
        key, tensors = tuple(description.parts), description.tensors
        known = self._known.get(key)
        if known is None:
            result = self._worked_out(call)
            if description.still_holds():
                self._remember(key, result, tensors)
            return result
        if type(known) is int:
            return tensors[known]
        if known.history:  # type: ignore[union-attr]
            return _Remembered.apply(self, known, description.looks, *tensors)
        return self._make(known)  # type: ignore[arg-type]

    def _worked_out(self, call: Callable[[], Any]) -> Any:
        self._newest = None, None  # it may be written in place, and get another shape
        with self._mode:
            return call()

    def _remember(self, key: Any, result: Any, tensors: list[torch.Tensor]) -> None:
        place = next((place for place, tensor in enumerate(tensors) if tensor is result), None)
        if place is not None:
            self._known[key] = place
        elif type(result) is FakeTensor and _is_ordinary(result, self._mode) and not _shares_memory(result, tensors):
            self._known[key] = _Looks(
                tuple(result.shape), result.stride(), result.dtype, result.fake_device, result.requires_grad
            )

    def _make(self, looks: _Looks) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            bare = torch.empty_strided(looks.shape, looks.stride, dtype=looks.dtype, device="meta")
        fake = FakeTensor(self._mode, bare, looks.device)
        self._newest = fake, bare
        return fake

    # ---- what the looks of a result depend on; None where that cannot be told, or somebody watches the calls ----

    def _described(self, op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Description | None:
        try:
            if not _is_plain(op, target) or "out" in kwargs or not self._is_alone():
                return None
        except TypeError:  # a callable object that cannot be a key
            return None
        description = _Description(self._mode, target)
        return description if description.add(args) and (not kwargs or description.add(kwargs)) else None

    def _described_module(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _Description | None:
        cls = type(module)
        if not is_from_torch(cls) or not self._is_alone():
            return None
        if torch_modules._has_any_global_hook():
            return None
        description = _Description(self._mode, cls)
        # Tables of hooks and of submodules are in there too: one that is not empty has no description.
        if not description.add(args) or not description.add(module.__dict__):
            return None
        return description if not kwargs or description.add(kwargs) else None

    def _is_alone(self) -> bool:
        if torch._C._len_torch_function_stack() or torch._C._is_any_autocast_enabled():
            return False
        if torch._C._are_functorch_transforms_active():
            return False
        depth = torch._C._len_torch_dispatch_stack()
        return depth == 0 or (
            depth == 1 and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is self._mode
        )


class _Description:
    """A call in words that can be compared: its target, constants and the looks of its tensors, which are kept beside."""

    __slots__ = ("looks", "mode", "parts", "tensors", "tracks")

    def __init__(self, mode: FakeTensorMode, target: Any) -> None:
        self.mode = mode
        self.tracks = torch.is_grad_enabled()
        self.parts: list[Any] = [target, torch.get_default_dtype(), self.tracks]
        self.tensors: list[Any] = []
        self.looks: list[tuple[Any, ...]] = []

    def add(self, value: Any) -> bool:
        """Describe a value; False where there are no words for it."""
        cls = type(value)
        if cls in _CONSTANTS:
            self.parts += (cls, value)
            return True
        if cls is FakeTensor:
            if not _is_ordinary(value, self.mode):
                return False
            looks = self._looks_of(value)
            self.tensors.append(value)
            self.looks.append(looks)
            self.parts.append(looks)
            return True
        if isinstance(value, (tuple, list)):
            self.parts += (cls, len(value))
            return all(self.add(item) for item in value)
        if isinstance(value, dict):
            self.parts += (cls, *value)
            return all(self.add(item) for item in value.values())
        return cls is set and not value

    def still_holds(self) -> bool:
        """Whether all tensors look as they did when this was written."""
        return self.looks == [self._looks_of(tensor) for tensor in self.tensors]

    def _looks_of(self, tensor: Any) -> tuple[Any, ...]:
        # A leaf that has gradients cannot be written in place.
        history = self.tracks and (tensor.requires_grad, tensor.is_leaf)
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device, history


class _Remembered(torch.autograd.Function):
    """A result with a history: whatever it was made of gets gradients, without data as well."""

    @staticmethod
    def forward(ctx: Any, calls: FakeCalls, result: _Looks, given: list[Any], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.calls, ctx.given = calls, given
        return calls._make(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        wanted = zip(ctx.given, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *[ctx.calls._make(_Looks(*looks)) if needed else None for looks, needed in wanted]


class FakeInterpreter(Interpreter):
    """An interpreter that works out equal calls once, where it has `calls` and so runs on fakes."""

    calls: FakeCalls | None = None

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return target(*args, **kwargs) if self.calls is None else self.calls.function(target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.calls is None:
            return getattr(args[0], target)(*args[1:], **kwargs)
        return self.calls.method(target, args, kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.calls is None:
            return super().call_module(target, args, kwargs)
        return self.calls.module(self.fetch_attr(target), args, kwargs)


@functools.cache
def _is_plain(op: str, target: Any) -> bool:
    """Whether the target is an operator of torch that only returns a tensor, the same for the same arguments."""
    if op == "call_function" and target in ARITHMETIC:
        return True
    found = operator_of(op, target)
    return found is not None and bool(found.signatures) and found.is_plain


def _is_ordinary(fake: FakeTensor, mode: FakeTensorMode) -> bool:
    """Whether looks and gradients are all that there is to say about a tensor."""
    return (
        fake.fake_mode is mode
        and mode.shape_env is None
        and fake.constant is None
        and fake.layout is torch.strided
        and not fake.is_inference()
        and not (fake.is_quantized or fake.is_conj() or fake.is_neg())
    )


def _shares_memory(result: torch.Tensor, tensors: list[Any]) -> bool:
    memory = result.untyped_storage()._cdata
    return any(tensor.untyped_storage()._cdata == memory for tensor in tensors)
