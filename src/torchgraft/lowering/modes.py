"""The places where torch's dispatcher hands operators to a recorder: before autograd and autocast, or after both.
The only file here that knows private parts of torch's dispatcher; tests/lowering/test_modes.py holds torch to them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import _set_mode_pre_dispatch, unset_mode_pre_dispatch
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchgraft.lowering.autocast import active_casts
from torchgraft.lowering.operators import record
from torchgraft.lowering.recorder import Recorder

# Modes before autograd are one list for the whole process: an operator of one thread would go to the recorder of another.
_ONE_THREAD = threading.RLock()
_FREE_IN_PYTHON = frozenset({torch.nn.functional.interpolate, torch.nn.functional.upsample})


class AfterAutograd(TorchDispatchMode):
    """Operators as kernels see them: composite ones are taken apart, gradients and casts are operators of their own."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return record(self.recorder, function, args, kwargs or {}, self)


class BeforeAutograd(AfterAutograd, SchemaCheckMode):
    """Operators as torch's functions call them: `linear` and `dropout` are one each.

    torch takes three kinds of modes there; this is one of them by name only.
    """

    _dispatch_key = torch._C.DispatchKey.PreDispatch

    def __enter__(self) -> BeforeAutograd:
        _set_mode_pre_dispatch(self)
        return self

    def __exit__(self, *details: object) -> None:
        unset_mode_pre_dispatch(None, schema_check=True)


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """While active, operators go to the recorder. Under autocast, what is taken apart has to be cast before."""
    is_cast = recorder.decompositions is not None and bool(active_casts())
    if recorder.is_above_autograd and not is_cast:
        with _ONE_THREAD, BeforeAutograd(recorder), enable_python_dispatcher():
            yield
    else:
        # torch's C++ code for these fixes sizes; that in Python does not.
        is_free_in_python = recorder.above is not None and recorder.above.target in _FREE_IN_PYTHON
        with AfterAutograd(recorder), enable_python_dispatcher() if is_free_in_python else contextlib.nullcontext():
            yield
