"""Calls of operators on fake tensors, remembered: the same call on tensors that look the same gives one that looks the same.
torch takes some 70 microseconds to work out one call, a look-up and a new fake take 15. What a fake is is said in `fake.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torchgraft.analysis.effects.operators import (
    ARITHMETIC,
    operator_of,
)
from torchgraft.analysis.fake import FakeTensor, FakeTensorMode, detached
from torchgraft.interpreter import Interpreter

_CONSTANTS = frozenset(
    {int, float, bool, complex, str, type(None), type(...)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)


class _Looks(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class FakeCalls:
    """What calls gave under one mode. Only calls without effects are remembered, and only results in memory of their own.

    >>> from torchgraft.analysis.fake import fake_mode_of, fake_tree
    >>> mode = fake_mode_of()
    >>> calls, x = FakeCalls(mode), fake_tree(torch.ones(2, 3), mode)
    >>> first, second = calls.function(torch.relu, (x,), {}), calls.function(torch.relu, (x,), {})
    >>> first is second, second.shape, second.device, len(calls)
    (False, torch.Size([2, 3]), device(type='cpu'), 1)
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Any, _Looks] = {}
        # The newest fake that was made here, and the tensor without data that it was made of.
        self._newest: tuple[Any, Any] = (None, None)

    def __len__(self) -> int:
        return len(self._known)

    def function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a function on fakes."""
        key = self._key("call_function", target, args, kwargs)
        if key in self._known:
            return self._make(self._known[key])
        with self._mode:
            return self._remember(key, target(*args, **kwargs), args, kwargs)

    def method(self, target: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a method of the first of some fakes."""
        key = self._key("call_method", target, args, kwargs)
        if key in self._known:
            return self._make(self._known[key])
        with self._mode:
            return self._remember(key, getattr(args[0], target)(*args[1:], **kwargs), args, kwargs)

    def _remember(self, key: Any, result: Any, args: Any, kwargs: Any) -> Any:
        looks = None if key is None else self._looks(result)
        if looks is not None and not _shares_memory(result, args, kwargs):
            self._known[key] = looks
        return result

    def snapshot(self, fake: Any) -> Any:
        """A fake of the same memory that stays as it is now, whatever is done to the shape of the given one."""
        newest, bare = self._newest
        if fake is newest:
            return FakeTensor(self._mode, bare, fake.fake_device)
        return detached(fake, self._mode)

    def _key(self, op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the look of the result depends on; None where that cannot be told, or somebody watches the calls."""
        try:
            if not _is_plain(op, target) or "out" in kwargs or not self._is_alone():
                return None
        except TypeError:  # a callable object that cannot be a key
            return None
        parts: list[Any] = [target, torch.get_default_dtype()]
        if not self._describe(args, parts) or (kwargs and not self._describe(kwargs, parts)):
            return None
        return tuple(parts)

    def _is_alone(self) -> bool:
        if torch._C._len_torch_function_stack() or torch._C._is_any_autocast_enabled():
            return False
        depth = torch._C._len_torch_dispatch_stack()
        return depth == 0 or (
            depth == 1 and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is self._mode
        )

    def _describe(self, value: Any, parts: list[Any]) -> bool:
        cls = type(value)
        if cls is FakeTensor:
            if not self._is_ordinary(value):
                return False
            parts += (value.dtype, value.shape, value.stride(), value.fake_device)
            return True
        if cls in _CONSTANTS:
            parts += (cls, value)
            return True
        if isinstance(value, (tuple, list)):
            parts += (cls, len(value))
            return all(self._describe(item, parts) for item in value)
        if isinstance(value, dict):
            parts += (cls, *value)
            return all(self._describe(item, parts) for item in value.values())
        return False

    def _is_ordinary(self, fake: FakeTensor) -> bool:
        """Whether shape, strides, type and device are all that there is to say about a tensor."""
        return (
            fake.fake_mode is self._mode
            and self._mode.shape_env is None
            and fake.constant is None
            and fake.layout is torch.strided
            and not (fake.requires_grad and torch.is_grad_enabled())
            and not fake.is_inference()
            and not (fake.is_quantized or fake.is_conj() or fake.is_neg())
        )

    def _looks(self, result: Any) -> _Looks | None:
        if type(result) is not FakeTensor or result.requires_grad or not self._is_ordinary(result):
            return None
        return _Looks(tuple(result.shape), result.stride(), result.dtype, result.fake_device)

    def _make(self, looks: _Looks) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            bare = torch.empty_strided(looks.shape, looks.stride, dtype=looks.dtype, device="meta")
        fake = FakeTensor(self._mode, bare, looks.device)
        self._newest = fake, bare
        return fake


class FakeInterpreter(Interpreter):
    """An interpreter that works out equal calls once, where it has `calls` and so runs on fakes."""

    calls: FakeCalls | None = None

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function."""
        return target(*args, **kwargs) if self.calls is None else self.calls.function(target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a method of the first argument."""
        if self.calls is None:
            return getattr(args[0], target)(*args[1:], **kwargs)
        return self.calls.method(target, args, kwargs)


@functools.cache
def _is_plain(op: str, target: Any) -> bool:
    """Whether the target is an operator of torch that only returns a tensor, the same for the same arguments."""
    if op == "call_function" and target in ARITHMETIC:
        return True
    found = operator_of(op, target)
    return found is not None and bool(found.signatures) and found.is_plain


def _shares_memory(result: torch.Tensor, args: Any, kwargs: Any) -> bool:
    given = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    memory = result.untyped_storage()._cdata
    return any(leaf.untyped_storage()._cdata == memory for leaf in given)
