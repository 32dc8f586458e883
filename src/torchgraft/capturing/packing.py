"""`torch.nn.TransformerEncoder` packs what is not padded where no gradients are needed, and then returns zeros for the padding.
While torch functions are watched or exported it never does, so whoever watches is told. What they make of it is theirs to say.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

import torch

from torchgraft.capturing.active import Patch, active

_VARIABLES = frozenset(inspect.unwrap(torch.nn.TransformerEncoder.forward).__code__.co_varnames)
_has_torch_function, _is_compiling = torch.overrides.has_torch_function, torch.compiler.is_compiling


def _is_encoder(frame: FrameType) -> bool:
    # Its code may have been changed for the time of the run, and has the same variables then.
    return _VARIABLES.issubset(frame.f_code.co_varnames)


def _asked_for_functions(relevant_args: Any) -> bool:
    """Whether something stands in for a tensor; the encoder asks when all else speaks for packing."""
    if hasattr(active.tracer, "before_packing") and _is_encoder(sys._getframe(1)):
        active.tracer.before_packing()
    return bool(_has_torch_function(relevant_args))


def _asked_for_compiling() -> bool:
    """Whether a tracer of torch's is at work; if so, the encoder asks no further."""
    if active.tracer is None and active.listener is not None and _is_encoder(sys._getframe(1)):
        active.listener.before_packing()
    return _is_compiling()


PACKING_PATCHES = [
    Patch(torch.overrides, "has_torch_function", _asked_for_functions),
    Patch(torch.compiler, "is_compiling", _asked_for_compiling),
]
