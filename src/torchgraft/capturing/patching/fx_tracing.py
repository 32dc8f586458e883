"""torch.fx's question whether somebody is tracing, which libraries ask while they are traced, answered for our traces too.
Our own form of the question is in `fx_passes/tracing.py`; torch.fx is not imported for it, only found where it is loaded.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from torchgraft.capturing.patching.active import CodePatch, active


def is_tracing() -> bool:
    """Whether a symbolic trace is going on in this thread."""
    tracer: Any = active.tracer
    return tracer is not None and not tracer._runs_for_real


# The lent code finds these names among the globals of torch.fx's functions (CodePatch.lend).
_torchgraft_is_tracing = is_tracing
_torchgraft_is_fx_tracing: Any = None
_torchgraft_is_fx_symbolic_tracing: Any = None


def _is_fx_tracing() -> bool:
    return _torchgraft_is_tracing() or _torchgraft_is_fx_tracing()


def _is_fx_symbolic_tracing() -> bool:
    return _torchgraft_is_tracing() or _torchgraft_is_fx_symbolic_tracing()


def fx_tracing_patches() -> list[CodePatch]:
    """The patches of torch.fx's two questions; none where torch.fx is not loaded, or has no such functions."""
    module = sys.modules.get("torch.fx._symbolic_trace")
    return [] if module is None else _patches_of(module)


@cache
def _patches_of(module: Any) -> list[CodePatch]:
    patches = []
    for lent in (_is_fx_tracing, _is_fx_symbolic_tracing):
        function = vars(module).get(lent.__name__[1:])
        if function is not None:
            patch = CodePatch(function)
            globals()[f"_torchgraft{lent.__name__}"] = patch.original
            patch.lend(lent)  # type: ignore[arg-type]
            patches.append(patch)
    return patches
