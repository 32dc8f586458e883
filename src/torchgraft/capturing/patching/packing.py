"""`torch.nn.TransformerEncoder` packs what is not padded where no gradients are needed, and then returns zeros for the padding.
While torch functions are watched it never does, so the watcher is told, and keeps what calls the encoder whole.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch

from torchgraft.capturing.patching.active import Patch, active

_VARIABLES = frozenset(inspect.unwrap(torch.nn.TransformerEncoder.forward).__code__.co_varnames)
_has_torch_function = torch.overrides.has_torch_function


def _asked_for_functions(relevant_args: Any) -> bool:
    """Whether something overrides torch's functions; the encoder asks when all else speaks for packing."""
    # Its code may have been changed for the time of the run, and has the same variables then.
    tracer = active.tracer
    if tracer is not None and tracer._runs_for_real and _VARIABLES.issubset(sys._getframe(1).f_code.co_varnames):
        raise tracer.refusal("it packs what is not padded where no gradients are needed")
    return bool(_has_torch_function(relevant_args))


PACKING_PATCH = Patch(torch.overrides, "has_torch_function", _asked_for_functions)
