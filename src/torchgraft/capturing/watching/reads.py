"""What Python reads out of tensors during a watched run: sizes, items, dtypes, devices. A number that only flows on stays
symbolic (`flow.py`); whatever decides something becomes a guard. Calls that make tensors are in `calls.py`.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.capturing.flowing.sizes import is_in_message, unwrapped
from torchgraft.capturing.user_code.comparisons import is_taken_apart, may_be_given_dtypes
from torchgraft.capturing.watching.flow import Flow
from torchgraft.capturing.watching.values import Values

if TYPE_CHECKING:
    from torchgraft.capturing.watching.watcher import Watcher

# Properties that say nothing about what a program computes.
_UNGUARDED = frozenset({"_backward_hooks", "output_nr", "data", "_version"})
# What is present or absent, and otherwise no value that could be compared.
_PRESENT_OR_ABSENT = frozenset({"grad_fn", "grad", "_base"})
# What the copies that the run gets do not have in common with the inputs.
_LOST_BY_COPYING = frozenset({"_base", "_version"})
_TO_NUMBER = frozenset({"__bool__", "__int__", "__float__", "__index__", "__complex__"})


class Reads:
    """Answers questions about tensors."""

    def __init__(self, watcher: Watcher, values: Values, flow: Flow) -> None:
        self._watcher, self._values, self._flow, self._guards = watcher, values, flow, flow.guards

    # ---- methods and functions, as torch hands them over ----

    def _size(self, tensor: torch.Tensor) -> torch.Size:
        if self._guards.is_plain or self._values.is_static(tensor):
            return tensor.size()
        return self._flow.sizes(self._values.node_of(tensor), tensor)

    def size(self, function: Any, args: Any, kwargs: Any) -> Any:
        """`x.size()`, `x.size(0)`."""
        sizes = self._size(args[0])
        dimension = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return sizes if dimension is None else sizes[int(dimension)]

    def length(self, function: Any, args: Any, kwargs: Any) -> int:
        """`len(x)`."""
        if not args[0].dim():
            return len(args[0])
        number = self._size(args[0])[0]
        if unwrapped(number) is not None:
            self._flow.before_plain("len")
        return int(number)

    def numel(self, function: Any, args: Any, kwargs: Any) -> Any:
        """`x.numel()`."""
        tensor = args[0]
        if self._guards.is_plain or self._values.is_static(tensor):
            return tensor.numel()
        node = self._values.node_of(tensor)
        make = functools.partial(self._watcher.create_node, "call_method", "numel", (node,), {})
        return self._flow.number(node, "numel", tensor.numel(), make, f"{node._name}.numel()")

    def dim(self, function: Any, args: Any, kwargs: Any) -> int:
        """`x.dim()`."""
        tensor = args[0]
        if not self._guards.is_plain and not self._values.is_static(tensor):
            # torch asks before it iterates, and unbind() refuses a tensor without dimensions just as well.
            if sys._getframe(3).f_code is not torch.Tensor.__iter__.__code__:
                self._guards.fact(self._values.node_of(tensor), "ndim", tensor.dim())
        return tensor.dim()

    def item(self, function: Any, args: Any, kwargs: Any) -> Any:
        """`x.item()`."""
        tensor = args[0]
        if tensor.device.type == "meta":
            raise self._watcher.refusal("the value of a tensor without data was read")
        value = tensor.item()
        if self._guards.is_plain:
            return value
        node = self._values.node_of(tensor)
        # Made now: the tensor may be written into before the number is used.
        item = self._watcher.create_node("call_method", "item", (node,), {})
        if isinstance(value, complex):
            self._guards.value(item, value, f"{node.name}.item()")
            return value
        return self._flow.number(item, "item", value, lambda: item, f"{node.name}.item()")

    def number(self, function: Any, args: Any, kwargs: Any) -> Any:
        """`bool(x)`, `int(x)` and their like."""
        number = self.item(function, args[:1], {})
        symbol = unwrapped(number)
        if symbol is not None and function.__name__ in ("__int__", "__float__"):
            self._flow.before_plain(function.__name__.strip("_"))
        if symbol is None:
            return function(args[0])
        plain = symbol._decide()
        # Where tensors are made fakes, making one writes attributes onto it.
        return self._watcher.unwatched(lambda: function(torch.tensor(plain)))

    def contains(self, function: Any, args: Any, kwargs: Any) -> Any:
        """`0 in x`, written down as torch works it out, so that the answer is a tensor until somebody decides by it."""
        tensor, element = args
        if not isinstance(element, (torch.Tensor, bool, int, float, complex, torch.SymInt, torch.SymFloat)):
            return function(tensor, element)
        call = self._watcher.calls.call
        found = call(torch.Tensor.any, (call(torch.Tensor.eq, (tensor, element), {}),), {})
        return self.number(torch.Tensor.__bool__, (found,), {})

    def text(self, function: Any, args: Any, kwargs: Any) -> Any:
        """`f"{x}"`, which does not matter in a message: nothing is computed from it."""
        if not is_in_message():
            raise self._watcher.refusal(f"{function.__name__}() takes a tensor out of torch")
        return self._watcher.unwatched(function, *args, **kwargs)

    # ---- properties ----

    def property_of(self, tensor: Any, name: str) -> Any:
        """A property of a tensor."""
        if name == "shape":
            return self._size(tensor)
        result = getattr(tensor, name)
        is_plain = self._guards.is_plain
        if name in _LOST_BY_COPYING and self._values.is_input(tensor):
            raise self._watcher.refusal(f"{name} of an input was read")
        if name in _PRESENT_OR_ABSENT and not is_plain:
            self._guards.absence(self._values.node_of(tensor), name, result)
        if isinstance(result, torch.Tensor):
            node = self._watcher.create_node("call_function", getattr, (self._values.node_of(tensor), name), {})
            return self._values.register(result, node, {})
        if is_plain or (name == "ndim" and self._values.is_static(tensor)):
            return result
        if name == "dtype" and self._flow.dtypes_flow and may_be_given_dtypes(sys._getframe(4).f_code):
            return self._flow.dtype(self._values.node_of(tensor), result)
        if name == "device" and not is_taken_apart(*(self._watcher._instruction or (None, 0))):
            self._flow.read_device(self._values.node_of(tensor), result)
        elif name not in _UNGUARDED and name not in _PRESENT_OR_ABSENT:
            self._guards.fact(self._values.node_of(tensor), name, result)
        return result


# How a method or function that reads is answered, by its name.
SPECIAL: dict[str, Any] = {
    "size": Reads.size,
    "__len__": Reads.length,
    "numel": Reads.numel,
    "nelement": Reads.numel,
    "dim": Reads.dim,
    "ndimension": Reads.dim,
    "item": Reads.item,
    "__contains__": Reads.contains,
    **dict.fromkeys(("__format__", "__str__", "__repr__"), Reads.text),
    **dict.fromkeys(_TO_NUMBER, Reads.number),
}
