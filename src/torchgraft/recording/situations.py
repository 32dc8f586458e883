"""The situations a program is tried in: the example inputs, fresh values of the same shapes, and other sizes.
Inputs are only made here, never run; the example itself is copied and left alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from torchgraft.analysis.comparison import has_values, tensors_in
from torchgraft.codegen.calling import copied_inputs

_MOST_OTHER_SIZES = 3

Draw = Callable[[torch.Tensor], torch.Tensor]


class Situation(NamedTuple):
    """Inputs to try, and what is special about them."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: bool = True

    def copied(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs that a run may write into."""
        return copied_inputs(self.args, self.kwargs)


class Planned(NamedTuple):
    """A situation that is known by its name and not made yet."""

    name: str
    make: Callable[[], Situation]


def situations(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    seed: int,
    other_values: bool,
    other_sizes: bool | int,
    gradients: bool,
) -> list[Planned]:
    """The example first, then the others, to be made one after the other so that only one set of inputs is in memory."""
    planned = [Planned("example", lambda: Situation("example", args, kwargs))]
    tensors = [tensor for tensor in tensors_in((args, kwargs)) if _can_be_drawn(tensor)]
    if not tensors:
        return planned
    generator = torch.Generator().manual_seed(seed)

    def plan(name: str, draw: Draw, gradients: bool = True) -> None:
        def make() -> Situation:
            new = {id(tensor): draw(tensor) for tensor in tensors}
            return Situation(name, *copied_inputs(args, kwargs, new), gradients)

        planned.append(Planned(name, make))

    if other_values:
        plan("fresh values", lambda tensor: fresh_tensor(tensor, tensor.shape, generator))
        plan("other values", lambda tensor: fresh_tensor(tensor, tensor.shape, generator, wide=True), False)
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        if gradients and floating and not any(tensor.requires_grad for tensor in floating):
            plan("inputs with grad", lambda tensor: _with_grad(fresh_tensor(tensor, tensor.shape, generator)))
    if other_sizes:
        most = None if other_sizes is True else other_sizes
        for number, (name, resize) in enumerate(itertools.islice(_other_sizes(tensors), most)):
            # A backward takes twice the time of a forward; one with another size is enough to see how sizes are handled.
            plan(name, lambda tensor, size=resize: fresh_tensor(tensor, size(tensor), generator), number == 0)  # type: ignore[misc]
    return planned


def _with_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


# ---- fresh values ----


def _can_be_drawn(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and not tensor.is_quantized and not tensor.is_nested


def fresh_tensor(example: torch.Tensor, shape: Any, generator: torch.Generator, wide: bool = False) -> torch.Tensor:
    """New values like those of an example: within its range, or with `wide` beyond it wherever that can be meaningful.

    Integers stay within the range (with `wide` down to 0), because they may be indices. Infinities and other values that
    are not finite stay in place where the shape does.

    >>> fresh = fresh_tensor(torch.tensor([3, 5, 3]), (100,), torch.Generator().manual_seed(0))
    >>> sorted(set(fresh.tolist()))
    [3, 4, 5]
    """
    shape = tuple(shape)
    if has_values(example) and example.numel():
        values = _drawn_values(example.detach(), shape, generator, wide)
    else:
        values = torch.zeros(shape, dtype=example.dtype, device=example.device)
    if shape == tuple(example.shape):
        values = torch.empty_like(example).detach().copy_(values)  # keeps the order of dimensions in memory
    result = torch.nn.Parameter(values, False) if isinstance(example, torch.nn.Parameter) else values
    return result.requires_grad_(example.requires_grad)


def _drawn_values(
    example: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator, wide: bool
) -> torch.Tensor:
    if example.is_complex():
        parts = [_drawn_values(part, shape, generator, wide) for part in (example.real, example.imag)]
        return torch.complex(*parts)
    if example.dtype is torch.bool:
        share = 0.5 if wide else float(example.double().mean())
        drawn = torch.rand(shape, generator=generator) < share
    elif not example.is_floating_point():
        low, high = int(example.min()), int(example.max())
        drawn = torch.randint(0 if wide and low > 0 else low, high + 1, shape, generator=generator)
    else:
        drawn = _drawn_floats(example.double(), shape, generator, wide)
    return drawn.to(device=example.device, dtype=example.dtype)


def _drawn_floats(
    example: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator, wide: bool
) -> torch.Tensor:
    finite = torch.isfinite(example)
    known = example[finite]
    low, high = (float(known.min()), float(known.max())) if known.numel() else (-1.0, 1.0)
    if low == high:  # torch.ones and the like say nothing about a range
        low, high = (-1.0, 1.0) if low == 0 else sorted((low / 2, low * 3 / 2))
    if wide:  # around the other side of zero, so that a branch on a sum or a sign goes the other way
        drawn = (
            torch.randn(shape, generator=generator, dtype=torch.float64) * max(abs(low), abs(high)) - (low + high) / 2
        )
    else:
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low
    drawn = drawn.to(example.device)
    return torch.where(finite, drawn, example) if shape == tuple(example.shape) else drawn


# ---- other sizes ----


def _other_sizes(tensors: list[torch.Tensor]) -> Iterator[tuple[str, Callable[[torch.Tensor], tuple[int, ...]]]]:
    """Names of changes of size, each with the function from a tensor to its new shape.

    The batch is the first dimension of the first input, and of every input that shares it. Any other number that occurs
    among the sizes is changed wherever it occurs.
    """
    batch = next((tensor.shape[0] for tensor in tensors if tensor.dim()), None)
    if batch is None or not batch:
        return
    for size in dict.fromkeys((batch + 1, 1 if batch > 1 else 3)):
        yield f"batch {batch} -> {size}", _resizing(batch, None, size)
    others = dict.fromkeys(
        size
        for tensor in tensors
        for index, size in enumerate(tensor.shape)
        if size > 1 and not (index == 0 and size == batch)
    )
    for size in list(others)[:_MOST_OTHER_SIZES]:
        other = size // 2 if size % 2 == 0 and size > 2 else size + 1
        yield f"size {size} -> {other}", _resizing(batch, size, other)


def _resizing(batch: int, old: int | None, new: int) -> Callable[[torch.Tensor], tuple[int, ...]]:
    def resize(tensor: torch.Tensor) -> tuple[int, ...]:
        marked = [None if index == 0 and size == batch else size for index, size in enumerate(tensor.shape)]
        return tuple(new if mark == old else size for mark, size in zip(marked, tensor.shape, strict=True))

    return resize
