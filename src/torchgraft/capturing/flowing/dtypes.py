"""Dtypes that are read of tensors during a watched run. One that only flows into calls (`y.to(x.dtype)`,
`torch.finfo(x.dtype).min`) is read anew by the program, which so follows `.half()` and `.double()`; one that is compared becomes
a guard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchgraft.capturing.flowing.memos import is_remembered
from torchgraft.capturing.patching.active import Patch
from torchgraft.ir.node import Node

if TYPE_CHECKING:
    from torchgraft.capturing.watching.flow import Flow

# Questions that dtypes have in common: the program has to give the same answer, not to have the same dtype.
_KINDS = frozenset({"is_floating_point", "is_complex", "is_signed"})
_NUMBERS = frozenset({"min", "max", "eps", "tiny", "smallest_normal", "resolution", "bits"})
_INFORMATION: dict[str, Any] = {"finfo": torch.finfo, "iinfo": torch.iinfo}


class FlowingDtype:
    """A dtype as the model sees it. torch takes it for one, because it has `__torch_function__`."""

    __slots__ = ("__weakref__", "_flow", "node", "value")

    def __init__(self, flow: Flow, value: torch.dtype, node: Node) -> None:
        self._flow = flow
        self.value = value
        self.node = node
        flow.plain[node] = value

    def decide(self) -> torch.dtype:
        """The plain dtype: from here on the program is right only for this one."""
        if not self._flow.is_over:
            self._flow.guards.dtype(self)
        return self.value

    def __fx_create_arg__(self, tracer: Any) -> Node:
        return self.node

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Where nobody watches.
        plain = {name: plain_dtype(value) for name, value in (kwargs or {}).items()}
        return function(*map(plain_dtype, args), **plain)

    def __getattr__(self, name: str) -> Any:
        if name in _KINDS and not self._flow.is_over:
            return self._flow.guards.fact(self.node, name, getattr(self.value, name))
        return getattr(self.decide(), name)

    def __eq__(self, other: object) -> bool:
        # What is no dtype is never equal to one. Of two that differ, the program has to find that they differ, no more.
        if self._flow.is_over:
            return self.value is plain_dtype(other)
        return isinstance(other, torch.dtype) and self._flow.guards.same_dtype(self, other)

    def described(self) -> str:
        """What it is the dtype of."""
        return f"dtype of '{self.node._args[0].name}'" if self.node._target is getattr else f"'{self.node.name}'"

    def __hash__(self) -> int:
        if not self._flow.is_over and is_remembered(self._flow.remembering):
            return id(self)
        if not self._flow.is_over:
            self._flow.before_key(self)
        return hash(self.decide())

    def __repr__(self) -> str:
        return repr(self.decide())

    def __reduce__(self) -> Any:
        return getattr, (torch, str(self.decide()).removeprefix("torch."))

    def __copy__(self) -> torch.dtype:
        return self.decide()

    def __deepcopy__(self, memo: Any) -> torch.dtype:
        return self.decide()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return torch.dtype  # for isinstance(); torch.dtype itself cannot be inherited from


def plain_dtype(value: Any) -> Any:
    """The plain dtype of one that flows; any other value as it is. Nothing is decided by it."""
    return value.value if type(value) is FlowingDtype else value


class _Information:
    """`torch.finfo` of a dtype that flows: its numbers do, too."""

    def __init__(self, flow: Flow, dtype: FlowingDtype, name: str) -> None:
        self._flow, self._dtype, self._kind = flow, dtype, name
        self._plain = _INFORMATION[name](dtype.value)
        self._node = flow.create_node("call_function", _INFORMATION[name], (dtype.node,), {})

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._plain, name)
        if name not in _NUMBERS or type(value) not in (int, float):
            self._dtype.decide()
            return value
        fact = self._flow.create_node("call_function", getattr, (self._node, name), {})
        text = f"torch.{self._kind}({self._dtype.node.name}).{name}"
        return self._flow.number(fact, name, value, lambda: fact, text)

    def __repr__(self) -> str:
        self._dtype.decide()
        return repr(self._plain)


def _information_patch(name: str) -> Patch:
    original = _INFORMATION[name]

    def information(*args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("type", args[0] if args else None)
        if type(dtype) is FlowingDtype:
            return _Information(dtype._flow, dtype, name)
        return original(*args, **kwargs)

    return Patch(torch, name, information)


DTYPE_PATCHES = [_information_patch(name) for name in _INFORMATION]
