"""The guard that a program in torch's operators begins with: what the operators were chosen by, and no other guard speaks of.
All other guards are those of the program above.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchgraft.ir.guards import guard, refuse
from torchgraft.lowering.recorder import Recorder
from torchgraft.lowering.tensors import TracedTensor

_AGAIN = "capture the model again with tensors like these, or run it at level 'function'"


def _conditions(
    tensors: Any,
    ranks: Sequence[int],
    dtypes: str | Sequence[str],
    layouts: Sequence[str],
    names: Sequence[str],
    autocast: bool | None,
    where: str,
) -> Iterator[tuple[str, Any]]:
    yield from _grouped("number of dimensions", names, ranks)
    yield from _grouped("dtype", names, _each(dtypes, names))
    yield from _grouped("layout", names, layouts)
    if autocast is not None:
        yield "torch.is_autocast_enabled()", autocast


def _grouped(what: str, names: Sequence[str], answers: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """One condition for all tensors with the same answer: a model has hundreds of parameters."""
    for answer in dict.fromkeys(answers):
        found = [f"'{name}'" for name, other in zip(names, answers, strict=False) if other == answer]
        more = f" and {len(found) - 3} more" if len(found) > 4 else ""
        yield f"{what} of {', '.join(found[:3] if more else found)}{more}", answer


def _shortened(dtypes: list[str]) -> str | tuple[str, ...]:
    """Commonly all tensors have one dtype, which need not be said for each."""
    return dtypes[0] if len(set(dtypes)) == 1 else tuple(dtypes)


def _each(dtypes: str | Sequence[str], tensors: Sequence[Any]) -> Sequence[str]:
    return [dtypes] * len(tensors) if isinstance(dtypes, str) else dtypes


@guard(_conditions)
def check_tensors(
    tensors: Sequence[Any],
    ranks: Sequence[int],
    dtypes: str | Sequence[str],
    layouts: Sequence[str],
    names: Sequence[str],
    autocast: bool | None,
    where: str,
) -> None:
    """Raise unless tensors have these numbers of dimensions, dtypes and layouts, and autocast is on or off as it was. There may
    be fewer layouts than tensors, one dtype for all or none at all; None says that autocast does not matter."""
    dtypes = _each(dtypes, tensors)
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            return  # the check of the inputs says so better
        name = names[index]
        if tensor.dim() != ranks[index]:
            what = f"the program was lowered for {ranks[index]} dimensions of '{name}', and now it has {tensor.dim()}"
            refuse(what, where, _AGAIN)
        if dtypes and str(tensor.dtype) != dtypes[index]:
            what = f"the program was lowered for the dtype {dtypes[index]} of '{name}', and now it is {tensor.dtype}"
            refuse(what, where, _AGAIN)
        if index < len(layouts) and not _has_layout(tensor, layouts[index]):
            what = f"the program was lowered for '{name}' with the layout {layouts[index]}, and now it has another"
            refuse(what, where, "give a copy in that layout, or capture the model again with inputs like these")
    if autocast is not None and is_autocast_enabled() != autocast:
        what = f"the program was lowered with autocast {'on' if autocast else 'off'}, and its operators have no other casts"
        refuse(what, where, "capture the model again under this autocast, or run it at level 'function' or 'aten'")


def _has_layout(tensor: torch.Tensor, layout: str) -> bool:
    """What is a view and what a copy was decided by the layout: "contiguous", "channels_last", or the order of the strides."""
    if layout == "contiguous":
        return tensor.is_contiguous()
    if layout == "channels_last":
        return tensor.is_contiguous(memory_format=torch.channels_last)
    return layout_of(tensor) == layout


def layout_of(tensor: torch.Tensor) -> str:
    """How the memory of a tensor is laid out, in one word or by the order of its strides.

    >>> layout_of(torch.ones(2, 3)), layout_of(torch.ones(2, 3).t())
    ('contiguous', 'strides (1, 0)')
    """
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    if tensor.is_contiguous():
        return "contiguous"
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels_last"
    strides = tensor.stride()
    return f"strides {tuple(sorted(range(len(strides)), key=lambda place: -strides[place]))}"


def is_autocast_enabled() -> bool:
    """Whether torch casts the arguments of operators by itself, on any kind of device."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def guard_tensors(
    recorder: Recorder, inputs: dict[str, TracedTensor], held: dict[str, TracedTensor], where: str
) -> None:
    """Have a program begin with the guard, for inputs and the tensors that it holds."""
    decided = recorder.decompositions is not None
    tensors = {**inputs, **held} if decided else inputs
    if not tensors:
        return
    arguments: tuple[Any, ...] = (
        tuple([tensor.node for tensor in tensors.values()]),
        tuple([tensor.actual.dim() for tensor in tensors.values()]),
        _shortened([str(tensor.dtype) for tensor in tensors.values()]) if decided else (),
        tuple([layout_of(tensor.actual) for tensor in inputs.values()]) if decided else (),
        tuple(tensors),
        is_autocast_enabled() if decided else None,
        where,
    )
    recorder.create_node("call_function", check_tensors, arguments, {})
