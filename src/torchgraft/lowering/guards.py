"""The guard that a program in torch's operators begins with: what the operators were chosen by, and no other guard speaks of.
All other guards are those of the program above.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchgraft.errors import GuardError
from torchgraft.ir.guards import guard
from torchgraft.lowering.recorder import Recorder
from torchgraft.lowering.tensors import TracedTensor


@guard
def check_tensors(
    tensors: Sequence[torch.Tensor],
    ranks: Sequence[int],
    dtypes: Sequence[str],
    names: Sequence[str],
    autocast: bool | None,
) -> None:
    """Raise unless tensors have these numbers of dimensions and dtypes, and autocast is on or off as it was; an empty sequence
    and None say that it does not matter."""
    for index, tensor in enumerate(tensors):
        if tensor.dim() != ranks[index]:
            raise GuardError(
                f"the program was lowered for {ranks[index]} dimensions of '{names[index]}', and now it has {tensor.dim()}\n"
                "  capture and lower the model again with inputs like these"
            )
        if dtypes and str(tensor.dtype) != dtypes[index]:
            raise GuardError(
                f"the program was lowered for the dtype {dtypes[index]} of '{names[index]}', and now it is {tensor.dtype}\n"
                "  capture and lower the model again with tensors like these, or run it at level 'function'"
            )
    if autocast is not None and (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")) != autocast:
        raise GuardError(
            f"the program was lowered with autocast {'on' if autocast else 'off'}, and its operators have no other casts\n"
            "  capture the model again under this autocast, or run it at level 'function' or 'aten'"
        )


def guard_tensors(recorder: Recorder, tensors: Sequence[TracedTensor], names: Sequence[str]) -> None:
    """Have a program begin with the guard."""
    if not tensors:
        return
    decided = recorder.decompositions is not None
    dtypes = tuple(str(tensor.dtype) for tensor in tensors) if decided else ()
    is_cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    arguments: tuple[Any, ...] = (
        tuple(tensor.node for tensor in tensors),
        tuple(tensor.actual.dim() for tensor in tensors),
        dtypes,
        tuple(names),
        is_cast if decided else None,
    )
    recorder.create_node("call_function", check_tensors, arguments, {})
