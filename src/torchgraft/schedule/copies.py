"""Copies of tensors to a device, in one call and as a start and a wait; to a CUDA device by a stream of their own.
Which copies of a program are made early is decided in `prefetch_copies.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchgraft.analysis.effects import pure


@dataclass(frozen=True)
class Copies:
    """Copies that are under way: what they will be, and the event after them where a stream of its own makes them.

    `reads_caller` says that pinned memory is read, which whoever owns it may write as soon as the wait is over.
    """

    results: tuple[Tensor, ...]
    event: Any = None
    reads_caller: bool = False


@pure
def copies_on(device: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors on a device; those that are there already as they are.

    >>> copies_on("meta", torch.ones(2))[0].device
    device(type='meta')
    """
    return wait_for_copies(start_copies(device, *tensors))


@pure
def start_copies(device: Any, *tensors: Tensor) -> Copies:
    """Start to copy tensors to a device; where nothing can be done beside other work, the copies are made at once."""
    return _start(device, tensors, lambda tensor: tensor.to(device))


@pure
def wait_for_copies(copies: Copies) -> tuple[Tensor, ...]:
    """Let the current stream wait for copies, and return them."""
    if copies.event is not None:
        for result in copies.results:
            current = torch.cuda.current_stream(result.device)
            current.wait_event(copies.event)
            result.record_stream(
                current
            )  # its memory is the other stream's, which must not reuse it before this one is done
        if copies.reads_caller:
            copies.event.synchronize()
    return copies.results


@pure
def copied(device: Any, tensor: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
    """`tensor.to(*args, **kwargs)`, which is known to go to that device."""
    return wait_for_copy(start_copy(device, tensor, *args, **kwargs))


@pure
def start_copy(device: Any, tensor: Tensor, /, *args: Any, **kwargs: Any) -> Copies:
    """Start what `tensor.to(*args, **kwargs)` does, which is known to go to that device."""
    return _start(device, (tensor,), lambda source: source.to(*args, **kwargs))


@pure
def wait_for_copy(copies: Copies) -> Tensor:
    """Let the current stream wait for one copy, and return it."""
    return wait_for_copies(copies)[0]


def _start(device: Any, tensors: tuple[Tensor, ...], copy: Callable[[Tensor], Tensor]) -> Copies:
    device = torch.device(device)
    if device.type != "cuda" or not all(type(tensor).__name__ != "FakeTensor" and tensor.is_cpu for tensor in tensors):
        return Copies(tuple(copy(tensor) for tensor in tensors))
    pinned = [tensor.is_pinned() for tensor in tensors]
    # Only from pinned memory a copy is made beside other work. What is pinned here belongs to nobody else.
    sources = [tensor if is_pinned else tensor.pin_memory() for tensor, is_pinned in zip(tensors, pinned, strict=True)]
    stream = _stream(torch.cuda.current_device() if device.index is None else device.index)
    if any(pinned):
        stream.wait_stream(
            torch.cuda.current_stream(device)
        )  # a copy from the device may still be filling pinned memory
    with torch.cuda.stream(stream):
        results = tuple(copy(source.to(device, non_blocking=True)) for source in sources)
        event = stream.record_event()
    return Copies(results, event, any(pinned))


@functools.cache
def _stream(index: int) -> Any:
    """The stream that copies to one device."""
    return torch.cuda.Stream(torch.device("cuda", index))
