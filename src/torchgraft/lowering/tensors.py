"""The tensors that a program is run with while it is lowered: a real tensor, the node that it is the value of, and sizes that
stay symbolic. Which operators become nodes is decided in `recorder.py`.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.capturing.flowing.sizes import SymbolicNumber, wrapped
from torchgraft.ir.node import Node

if TYPE_CHECKING:
    from torchgraft.lowering.recorder import Recorder

_aten = torch.ops.aten


class TracedTensor(torch.Tensor):
    """A tensor whose data is in `actual`. torch asks this class for its sizes, which are numbers of the recorder.

    >>> TracedTensor.__torch_function__ is torch._C._disabled_torch_function_impl
    True
    """

    actual: torch.Tensor
    recorder: Recorder
    is_static: bool
    # The node, or what makes it when somebody first uses the tensor.
    source: Any
    sizes: list[Any] | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[TracedTensor], recorder: Recorder, actual: torch.Tensor, source: Any, is_static: bool = False
    ) -> TracedTensor:
        """`source` is the node or a function that makes it; a static tensor has the same size in every run."""
        self: TracedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            actual.size(),
            strides=actual.stride(),
            storage_offset=actual.storage_offset(),
            dtype=actual.dtype,
            layout=actual.layout,
            device=actual.device,
            requires_grad=actual.requires_grad and recorder.is_above_autograd,
            dispatch_sizes_strides_policy="sizes",
        )
        torch._C._set_conj(self, actual.is_conj())
        torch._C._set_neg(self, actual.is_neg())
        self.actual, self.recorder, self.source, self.is_static, self.sizes = actual, recorder, source, is_static, None
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TracedTensor({self.node.name})"

    @property
    def node(self) -> Node:
        """The node whose value this is."""
        return self.source if isinstance(self.source, Node) else self.source()

    def _unavailable(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a tensor that a program is lowered with has no memory of its own")

    def dim(self) -> int:
        """The number of dimensions."""
        return int(self.ndim)

    # What torch takes out of memory without asking its dispatcher.
    tolist = numpy = __array__ = data_ptr = untyped_storage = _unavailable

    def symbolic_sizes(self) -> list[Any]:
        """The sizes as torch and Python see them: numbers that the program computes anew."""
        if self.is_static:
            return list(self.actual.size())
        known = self.sizes
        if known is None or len(known) != self.actual.dim():
            known = self.sizes = [None] * self.actual.dim()
        for index, value in enumerate(self.actual.size()):
            if known[index] is None:
                make = functools.partial(self._size_node, index)
                known[index] = self.recorder.number(value, make, functools.partial(self._size_text, index))
        return known

    def _size_node(self, index: int) -> Node:
        return self.recorder.create_node("call_method", "size", (self.node, index), {})

    def _size_text(self, index: int) -> str:
        return f"{self.node.name}.size({index})"

    def _stride(self, index: int) -> Any:
        value = self.actual.stride(index)
        if self.is_static:
            return value
        make = functools.partial(self.recorder.create_node, "call_method", "stride", (self.node, index), {})
        # How memory is laid out decides between a view and a copy, never a value; the layout of the inputs is checked.
        return wrapped(SymbolicNumber(self.recorder, value, make, f"{self.node.name}.stride({index})", decides=False))

    def strides(self) -> list[Any]:
        """The strides; what is decided by them needs no guard."""
        return [self._stride(index) for index in range(self.actual.dim())]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        answer = QUESTIONS.get(function)
        if answer is None:
            # Reached where no mode of ours is at work, as in a hook of somebody else's.
            raise NotImplementedError(f"{function} of a tensor that a program is lowered with, where nobody records it")
        return answer(*args, **(kwargs or {}))


def can_be_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of torch's own with plain memory: no class of somebody's own, not sparse, not quantized."""
    return (
        type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _fact(name: str) -> property:
    """A property that the program checks, if torch's own Python reads it while a call is taken apart."""
    original: Any = getattr(torch.Tensor, name)

    def read(self: TracedTensor) -> Any:
        self.recorder.note_fact(self, name)
        return original.__get__(self)

    return property(read, original.__set__ if name == "requires_grad" else None)


for _name in ("dtype", "device", "ndim", "layout", "is_cuda", "requires_grad"):
    setattr(TracedTensor, _name, _fact(_name))


def _count(tensor: TracedTensor) -> Any:
    return functools.reduce(operator.mul, tensor.symbolic_sizes(), 1)


def _offset(tensor: TracedTensor) -> int:
    return int(tensor.actual.storage_offset())


# What torch asks of a tensor without computing anything.
QUESTIONS: dict[Any, Any] = {
    **dict.fromkeys((_aten.size.default, _aten.sym_size.default), TracedTensor.symbolic_sizes),
    **dict.fromkeys((_aten.size.int, _aten.sym_size.int), lambda tensor, index: tensor.symbolic_sizes()[index]),
    **dict.fromkeys((_aten.stride.default, _aten.sym_stride.default), TracedTensor.strides),
    **dict.fromkeys((_aten.stride.int, _aten.sym_stride.int), lambda tensor, index: tensor.strides()[index]),
    **dict.fromkeys((_aten.numel.default, _aten.sym_numel.default), _count),
    **dict.fromkeys((_aten.storage_offset.default, _aten.sym_storage_offset.default), _offset),
    _aten.dim.default: lambda tensor: tensor.actual.dim(),
    _aten.is_contiguous.default: lambda tensor: tensor.actual.is_contiguous(),
    _aten.is_contiguous.memory_format: lambda tensor, layout: tensor.actual.is_contiguous(memory_format=layout),
    _aten.is_strides_like_format.default: lambda tensor, layout: _aten.is_strides_like_format.default(
        tensor.actual, layout
    ),
    _aten.is_non_overlapping_and_dense.default: lambda tensor: _aten.is_non_overlapping_and_dense.default(
        tensor.actual
    ),
    torch.ops.prim.layout.default: lambda tensor: tensor.actual.layout,
    torch.ops.prim.device.default: lambda tensor: tensor.actual.device,
}
