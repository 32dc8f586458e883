"""The guards that a program in torch's operators begins with: what the operators were chosen by, and no other guard speaks of.
All other guards are those of the program above.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.ir.guards import guard, refuse
from torchgraft.lowering.autocast import Casts, active_casts
from torchgraft.lowering.tensors import TracedTensor

if TYPE_CHECKING:
    from torchgraft.lowering.recorder import Recorder

Tensors = dict[str, Any]
_INPUTS = "the inputs of"
_MODES = {True: "training mode", False: "evaluation mode"}
_AGAIN = "capture the model again with tensors like these, or run it at level 'function'"


def _facts(found: Tensors, dtype: str | None, ranks: Sequence[int], where: str) -> Iterator[tuple[str, Any]]:
    is_input = where.startswith(_INPUTS)
    whose = ", ".join([f"'{name}'" for name in found]) if is_input else f"the tensors of '{where or 'the model'}'"
    if dtype:
        yield f"dtype of {whose}", dtype
    yield f"number of dimensions of {whose}", ranks if len(set(ranks)) > 1 else ranks[0]


@guard(_facts)
def check_tensors(found: Tensors, dtype: str | None, ranks: Sequence[int], where: str) -> None:
    """Raise unless tensors have this dtype, and these numbers of dimensions.

    `where` is the module that holds the tensors, or says that they are inputs.
    """
    for (name, tensor), rank in zip(found.items(), ranks, strict=True):
        if not isinstance(tensor, torch.Tensor):
            return  # the check of the inputs says so better
        if tensor.dim() != rank:
            what = f"{rank} dimensions of '{name}', and now it has {tensor.dim()}"
        elif dtype is not None and str(tensor.dtype) != dtype:
            what = f"the dtype {dtype} of '{name}', and now it is {tensor.dtype}"
        else:
            continue
        refuse(f"the program was lowered for {what}", where or "the model", _AGAIN)


def _circumstances(found: Tensors, layouts: Sequence[str], casts: Casts, where: str) -> Iterator[tuple[str, Any]]:
    for layout in dict.fromkeys(layouts):
        names = [f"'{name}'" for name, other in zip(found, layouts, strict=False) if other == layout]
        yield f"layout of {', '.join(names)}", layout
    yield "torch.is_autocast_enabled()", bool(casts)
    for device, dtype in casts:
        yield f"torch.get_autocast_dtype('{device}')", dtype


@guard(_circumstances)
def check_layouts(found: Tensors, layouts: Sequence[str], casts: Casts, where: str) -> None:
    """Raise unless inputs have these layouts, and autocast is on, with these dtypes, or off as it was."""
    for (name, tensor), layout in zip(found.items(), layouts, strict=False):
        if isinstance(tensor, torch.Tensor) and not _has_layout(tensor, layout):
            what = f"the program was lowered for '{name}' with the layout {layout}, and now it has another"
            refuse(what, where, "give a copy in that layout, or capture the model again with inputs like these")
    if active_casts() != casts:
        was = " and ".join([f"to {dtype} on {device}" for device, dtype in casts]) or "off"
        what = f"the program was lowered with autocast {was}, and its operators have no other casts"
        refuse(what, where, "capture the model again under this autocast, or run it at level 'function' or 'aten'")


@guard(lambda found, expected, where: [(str(getattr(found, "target", "training")), expected)])
def check_mode(found: bool, expected: bool, where: str) -> None:
    """Raise unless a module is in the mode that its operators were chosen by."""
    if found != expected:
        switch, back = ("eval", "train") if expected else ("train", "eval")
        refuse(
            f"the program was lowered in {_MODES[expected]}, and the module is now in {_MODES[not expected]}",
            where,
            f"call .{switch}() on the model and capture it again at this level, switch this module back with .{back}(), "
            "or run it at level 'function' or 'aten', which take both modes",
        )


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


def guard_tensors(recorder: Recorder, inputs: dict[str, TracedTensor], where: str) -> None:
    """Have a program begin with guards on its inputs, and on the circumstances that decided its operators."""
    if inputs:
        _check(recorder, inputs, where)
    if recorder.decompositions is not None:
        nodes = {name: tensor.node for name, tensor in inputs.items()}
        layouts = tuple([layout_of(tensor.actual) for tensor in inputs.values()])
        recorder.create_node("call_function", check_layouts, (nodes, layouts, active_casts(), where), {})


def guard_state(recorder: Recorder, names: Iterable[str], fetch: Callable[[str], Any]) -> None:
    """Have a program check the tensors that it holds, module by module."""
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    for module, paths in modules.items():
        values = {path.rpartition(".")[2]: fetch(path) for path in paths}
        tensors = {name: value for name, value in values.items() if type(value) is TracedTensor}
        if tensors:
            _check(recorder, tensors, module)


def _check(recorder: Recorder, tensors: dict[str, TracedTensor], where: str) -> None:
    dtypes = {} if recorder.decompositions is None else {name: str(tensor.dtype) for name, tensor in tensors.items()}
    for dtype in dict.fromkeys(dtypes.values()) if dtypes else (None,):
        alike = {name: tensor for name, tensor in tensors.items() if dtypes.get(name) == dtype}
        nodes = {name: tensor.node for name, tensor in alike.items()}
        ranks = tuple([tensor.actual.dim() for tensor in alike.values()])
        recorder.create_node("call_function", check_tensors, (nodes, dtype, ranks, where), {})
