"""One call of torch while it is being lowered: which of its arguments flow, and the spellings of calls for which torch's own code
would decide something before any operator is asked. Which calls these are is said in `kinds.py`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import types
from collections.abc import Callable
from typing import Any

import torch

from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node
from torchgraft.lowering.decompositions import flatten, reshape
from torchgraft.lowering.indexing import indexed, is_simple_index
from torchgraft.lowering.layouts import contiguous
from torchgraft.lowering.recorder import Recorder
from torchgraft.lowering.sizes import merged
from torchgraft.lowering.tensors import TracedTensor
from torchgraft.lowering.values import Flow, concrete, has_nodes

_FULL, _TO = Graph().call_function(torch.full), Graph().call_method("to")
_MOVED_BY = {torch.device: "device", torch.dtype: "dtype"}


def spelled(recorder: Recorder, node: Node, args: Any, kwargs: Any) -> tuple[Node, Any, Any]:
    """The call that is made: `torch.tensor(...)` as one of which dtype and device are arguments of an operator."""
    if node.target == "new_tensor":
        # Whoever writes it writes a copy.
        return _TO, (_kept_constant(recorder, _widest(args[1])), args[0]), {"copy": True}
    if node.target is not torch.tensor:
        return node, args, kwargs
    if isinstance(concrete(args[0]), (int, float)):
        return _FULL, ((), *args), kwargs
    if kwargs.keys() <= {"dtype", "device"} and not has_nodes(args):
        value = torch.tensor(args[0])
        if "dtype" in kwargs:
            value = _widest(args[0])  # which dtype it is rounded to, the program says
        elif value.is_floating_point() or value.is_complex():
            recorder.guard_default_dtype()
        return _TO, (_kept_constant(recorder, value),), {"dtype": value.dtype, **kwargs, "copy": True}
    return node, args, kwargs


def _widest(data: Any) -> torch.Tensor:
    """Numbers as a tensor, rounded to nothing narrower than what Python has."""
    value = torch.tensor(data)
    wide = torch.complex128 if value.is_complex() else torch.float64 if value.is_floating_point() else value.dtype
    return torch.tensor(data, dtype=wide)


def _kept_constant(recorder: Recorder, value: torch.Tensor) -> TracedTensor:
    if value.is_inference():  # the program may run where gradients are computed
        with torch.inference_mode(False):
            value = value.clone()
    return recorder.traced(value, recorder.constant(value), is_static=True, is_outside=True)


def flowing(node: Node, args: Any, kwargs: Any) -> dict[int | str, Flow]:
    """The values among the arguments that flow, by position and name."""
    found: dict[int | str, Flow] = {name: value for name, value in kwargs.items() if type(value) is Flow}
    names = _parameters(node.target) if node.op == "call_function" else []
    for index, value in enumerate(args):
        if type(value) is Flow and node.target == "to" and type(value.value) in _MOVED_BY:
            found[_MOVED_BY[type(value.value)]] = value
        elif type(value) is Flow:
            found[names[index] if index < len(names) else index] = value
    return found


def _parameters(function: Any) -> list[str]:
    """The names of a function's parameters, where it is written in Python."""
    return list(inspect.signature(function).parameters) if isinstance(function, types.FunctionType) else []


def called(node: Node, args: Any, kwargs: Any) -> Any:
    """Make a call with traced tensors."""
    if node.target is operator.getitem and is_simple_index(*args):
        return indexed(*args)
    if node.target in ("to", "cpu", "cuda"):
        return _moved(str(node.target), args, kwargs)
    if node.target == "contiguous":  # torch's method gives a contiguous tensor back before any operator is asked
        layout = args[1] if len(args) > 1 else kwargs.get("memory_format", torch.contiguous_format)
        if args[0].recorder.decompositions is not None:
            return contiguous(args[0], layout)
        return torch.ops.aten.contiguous.default(args[0], memory_format=layout)
    if node.target is operator.setitem and not isinstance(args[2], torch.Tensor):
        args[0].recorder.note_fact(args[0], "dtype")  # torch makes a tensor of the value, with this dtype
    free = _free_form(node, args)
    if free is not None:
        return free(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


def _moved(method: str, args: Any, kwargs: Any) -> Any:
    """`x.to(...)`, `x.cpu()`: torch's methods read the dtype of the tensor, and the dtype and device of another, before any
    operator is asked."""
    tensor, *rest = args
    if method == "to" and rest and type(rest[0]) is TracedTensor:
        return torch.ops.aten.to.other(*args, **kwargs)
    is_alone = len(rest) == 1 and not kwargs and isinstance(rest[0], (str, int, torch.device))
    device = rest[0] if is_alone else kwargs["device"] if not rest and kwargs.keys() == {"device"} else None
    if method != "to" and not rest and not kwargs:
        device = method
    if device is None:
        return getattr(tensor, method)(*rest, **kwargs)
    return torch.ops.aten.to.dtype_layout(tensor, device=torch.device(device))


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    places = list(range(-len(normalized_shape), 0))
    scale = torch.rsqrt(wide.pow(2).mean(places, keepdim=True) + (torch.finfo(wide.dtype).eps if eps is None else eps))
    result = wide * scale
    return (result if weight is None else result * weight).to(input.dtype)


def _group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-05, cudnn_enabled: bool = True
) -> Any:
    batch, channels, *rest = input.shape
    whole = torch.ops.aten.contiguous.default(input)
    count = functools.reduce(operator.mul, rest, 1)
    return torch.native_group_norm(whole, weight, bias, batch, channels, count, num_groups, eps)[0]


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    if input.dim() < 3:
        return torch.nn.functional.linear(input, weight, bias)
    rows = torch.nn.functional.linear(_rows(input), weight, bias)
    return rows.view(*input.shape[:-1], weight.shape[0])


def _matmul(input: Any, other: Any) -> Any:
    if min(input.dim(), other.dim()) < 2 or max(input.dim(), other.dim()) == 2:
        return torch.matmul(input, other)
    if other.dim() == 2:
        return torch.mm(_rows(input), other).view(*input.shape[:-1], other.shape[1])
    pairs = itertools.zip_longest(reversed(input.shape[:-2]), reversed(other.shape[:-2]), fillvalue=1)
    batch = [_broadcast_size(one, two) for one, two in pairs][::-1]
    count = functools.reduce(operator.mul, batch)
    matrices = [reshape(item.expand(*batch, *item.shape[-2:]), (count, *item.shape[-2:])) for item in (input, other)]
    return torch.bmm(*matrices).view(*batch, input.shape[-2], other.shape[-1])


def _broadcast_size(one: Any, two: Any) -> Any:
    size = merged([one, two])
    return size if size is not None else two if one == 1 else one


def _rows(tensor: Any) -> Any:
    return reshape(tensor, (functools.reduce(operator.mul, tensor.shape[:-1]), tensor.shape[-1]))


def _reshaped(input: Any, *sizes: Any, shape: Any = None) -> Any:
    return reshape(
        input, sizes if shape is None and sizes and not isinstance(sizes[0], (tuple, list)) else shape or sizes[0]
    )


def _flattened(input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    result = flatten(input, start_dim, end_dim)
    return torch.flatten(input, start_dim, end_dim) if result is NotImplemented else result


def _free_form(node: Node, args: Any) -> Callable[..., Any] | None:
    """A call that leaves the sizes free which torch's C++ code fixes, where that code is going to be asked."""
    recorder = args[0].recorder if args and type(args[0]) is TracedTensor else None
    if recorder is None or recorder.decompositions is None:
        return None
    return _FREE_FORMS.get(node.target) or (None if recorder.is_above_autograd else _FREE_PRODUCTS.get(node.target))


_FREE_FORMS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.reshape, "reshape"), _reshaped),
    **dict.fromkeys((torch.flatten, "flatten"), _flattened),
    **dict.fromkeys((torch.nn.functional.rms_norm, torch.rms_norm), _rms_norm),
    **dict.fromkeys((torch.nn.functional.group_norm, torch.group_norm), _group_norm),
}
# torch 2.11 looks at the sizes of these.
_FREE_PRODUCTS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.linear: _linear,
    **dict.fromkeys((torch.matmul, operator.matmul, "matmul", "__matmul__"), _matmul),
}


def is_constant_size(node: Node, value: Any) -> bool:
    """Whether a call asks for a size that is known to be the same in every run."""
    is_size = node.target in ("size", "numel") or (node.target is getattr and node.args[1] == "shape")
    return is_size and all(type(item) is int for item in (value if isinstance(value, tuple) else (value,)))
