"""`x[...]` with numbers, slices, None and an ellipsis, as the operators that it means. torch's own code for it asks whether a
slice takes everything, which would fix sizes for an answer that changes nothing; indices that are tensors are left to it.
"""

from __future__ import annotations

from typing import Any

import torch

from torchgraft.capturing.flowing.sizes import unwrapped
from torchgraft.lowering.tensors import TracedTensor

_aten = torch.ops.aten


def is_simple_index(tensor: Any, index: Any) -> bool:
    """Whether an index takes a part of a traced tensor without looking anything up in other tensors."""
    parts = index if isinstance(index, tuple) else (index,)
    return type(tensor) is TracedTensor and all(map(_is_simple, parts))


def _is_simple(part: Any) -> bool:
    if isinstance(part, slice):
        return all(_is_number(item) or item is None or _is_scalar(item) for item in (part.start, part.stop, part.step))
    return part is None or part is Ellipsis or _is_number(part)


def _is_number(value: Any) -> bool:
    return type(value) is int or unwrapped(value) is not None


def _is_scalar(value: Any) -> bool:
    return type(value) is TracedTensor and value.actual.dim() == 0 and not value.actual.is_floating_point()


def _number(value: Any) -> Any:
    """One end of a slice: of a tensor, Python asks for its number."""
    return _aten.item.default(value) if type(value) is TracedTensor else value


def _takes_all(part: Any) -> bool:
    return isinstance(part, slice) and part.start is None and part.stop is None and part.step is None


def indexed(tensor: Any, index: Any) -> Any:
    """The part of a tensor that an index takes; always a tensor of its own."""
    parts = index if isinstance(index, tuple) else (index,)
    used = sum(part is not None and part is not Ellipsis for part in parts)
    # An index that takes everything gives a tensor of its own all the same.
    is_whole = all(part is Ellipsis or _takes_all(part) for part in parts)
    result, place = _aten.alias.default(tensor) if is_whole else tensor, 0
    for part in parts:
        if part is None:
            result = _aten.unsqueeze.default(result, place)
            place += 1
        elif part is Ellipsis:
            place += tensor.dim() - used
        elif isinstance(part, slice):
            if not _takes_all(part):
                start, stop, step = map(_number, (part.start, part.stop, part.step))
                result = _aten.slice.Tensor(result, place, start, stop, 1 if step is None else step)
            place += 1
        else:
            result = _aten.select.int(result, place, part)
    return result
