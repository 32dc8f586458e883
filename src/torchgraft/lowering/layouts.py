"""Whether a tensor can be seen in another form as it lies in memory, where its sizes are free. What is a view because a size is 1
is a copy in a run where it is larger: there a copy is written down, which has the right values in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from torchgraft.capturing.flowing.sizes import SymbolicNumber, factors, unwrapped
from torchgraft.lowering.tensors import TracedTensor

# Free sizes, and the values they have in another run.
Change = Mapping[SymbolicNumber, int]
# A size that fits nothing by chance.
_LARGER = 10007
_ORDERS = {torch.channels_last: (0, 2, 3, 1), torch.channels_last_3d: (0, 2, 3, 4, 1)}


class Layout(NamedTuple):
    """How a tensor lies in memory."""

    sizes: list[int]
    strides: list[int]


def laid_out(tensor: TracedTensor, change: Change, earlier_is: int = 1) -> Layout:
    """How a tensor lies in memory in a run with other sizes, as far as its strides show which dimension is inside which. Of two
    that both are 1 they do not: the earlier one is outside (1) or inside (-1)."""
    sizes, strides = list(tensor.actual.size()), list(tensor.actual.stride())
    if not change:
        return Layout(sizes, strides)
    changed = [changed_size(size, change) for size in tensor.symbolic_sizes()]
    # A size of 1 has the step of the dimension outside of it; what is expanded takes no memory.
    order = sorted(
        filter(strides.__getitem__, range(len(sizes))), key=lambda at: (strides[at], sizes[at] != 1, -at * earlier_is)
    )
    before = after = 1
    for place in order:
        strides[place] = strides[place] * after // before
        before, after = before * max(sizes[place], 1), after * max(changed[place], 1)
    return Layout(changed, strides)


def changed_size(size: Any, change: Change) -> int:
    """A size in a run in which others have other values."""
    number = unwrapped(size)
    if number is None:
        return int(size)
    return math.prod([change.get(factor, int(factor.value)) for factor in factors(number)])


def _is_contiguous(layout: Layout, memory_format: Any) -> bool:
    step = 1
    for place in reversed(_ORDERS.get(memory_format, range(len(layout.sizes)))):
        if layout.sizes[place] != 1:
            if layout.strides[place] != step:
                return 0 in layout.sizes
            step *= layout.sizes[place]
    return True


def _free_sizes(tensor: TracedTensor) -> list[SymbolicNumber]:
    numbers = [number for size in tensor.symbolic_sizes() if (number := unwrapped(size)) is not None]
    return list(dict.fromkeys(factor for number in numbers for factor in factors(number) if not factor.is_constant()))


def _larger(free: Iterable[SymbolicNumber]) -> Change:
    return {number: _LARGER for number in free if number.value == 1}


def expanded(tensor: TracedTensor, sizes: Any, value: torch.Tensor) -> torch.Tensor:
    """The value of `tensor.expand(sizes)` with no steps where it is repeated, be it once."""
    given = [None] * (len(sizes) - tensor.dim()) + tensor.symbolic_sizes()
    strides = [
        0 if value.size(at) == 1 and unwrapped(sizes[at]) not in (None, unwrapped(given[at])) else step
        for at, step in enumerate(value.stride())
    ]
    return value.as_strided(value.size(), strides)


def viewable(tensor: TracedTensor, sizes: Any) -> TracedTensor:
    """A tensor, or a copy of it, whose memory can be seen with other sizes."""

    def fits(layout: Layout, change: Change) -> bool:
        return is_viewable(layout, [changed_size(size, change) for size in sizes])

    return _copied_unless(tensor, fits, torch.contiguous_format)


def contiguous(tensor: TracedTensor, memory_format: Any = torch.contiguous_format) -> TracedTensor:
    """A tensor, or a copy of it, that is contiguous."""
    return _copied_unless(tensor, lambda layout, change: _is_contiguous(layout, memory_format), memory_format)


def _fits_larger(tensor: TracedTensor, fits: Callable[[Layout, Change], bool]) -> bool:
    larger = _larger(_free_sizes(tensor))
    return not larger or all(fits(laid_out(tensor, larger, earlier_is), larger) for earlier_is in (1, -1))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one whole, whatever its sizes: the commonest case, told at once."""
    sizes, step = tensor.shape, 1
    for size, stride in zip(reversed(sizes), reversed(tensor.stride()), strict=True):
        if stride != step:
            return False
        step *= size
    return step > 0 and sizes.count(1) < 2


def _copied_unless(tensor: TracedTensor, fits: Callable[[Layout, Change], bool], memory_format: Any) -> TracedTensor:
    if memory_format is torch.contiguous_format and _is_plain(tensor.actual):
        return tensor
    fits_here = fits(laid_out(tensor, {}), {})
    if fits_here and _fits_larger(tensor, fits):
        return tensor
    free = _free_sizes(tensor)
    changes = {number: {number: _LARGER if number.value == 1 else 1} for number in free}
    decisive = [number for number in free if fits(laid_out(tensor, changes[number]), changes[number]) != fits_here]
    decisive = decisive or (list(_larger(free)) if fits_here else [])
    if fits_here and tensor.recorder.keeps_views:
        tensor.recorder.guard_ones(decisive)
        return tensor
    copy = torch.ops.aten.clone.default(tensor, memory_format=memory_format)
    # Whoever writes one of the two writes the other in some runs, and not in others.
    tensor.recorder.note_copy(tensor, copy, decisive)
    return copy


def is_viewable(old: Layout, new: list[int]) -> bool:
    """Whether memory can be seen with other sizes as it is."""
    count = math.prod(old.sizes)
    if not count:
        return True
    if -1 in new:
        new = [size if size != -1 else count // -math.prod(new) for size in new]
    # Runs of dimensions that lie one behind the other, and their lengths.
    runs: list[int] = []
    last = None
    for size, stride in zip(*old, strict=True):
        if size == 1:
            continue
        if last is not None and last == size * stride:
            runs[-1] *= size
        else:
            runs.append(size)
        last = stride
    for size in [size for size in new if size != 1]:
        if not runs or runs[0] % size:
            return False
        runs[0] //= size
        if runs[0] == 1:
            runs.pop(0)
    return not runs
