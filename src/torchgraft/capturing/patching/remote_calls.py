"""Calls of functions in other processes, by torch.distributed.rpc, are recorded whole: what they do is done elsewhere.
Collectives need nothing of the kind, because torch's override protocol sees them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from torchgraft.capturing.patching.active import CodePatch, Patch, active

_NAMES = ("rpc_sync", "rpc_async", "remote")


def remote_call_patches() -> list[Any]:
    """Patches for calls in other processes and for fetching what remote references stand for; none where RPC is not loaded."""
    return [] if "torch.distributed.rpc.api" not in sys.modules else list(_patches())


def fetch_reference(reference: Any, timeout: float = -1.0) -> Any:
    """The value that a remote reference refers to: `reference.to_here(timeout)`."""
    return reference.to_here(timeout)


@functools.cache
def _patches() -> tuple[Any, ...]:
    api = sys.modules["torch.distributed.rpc.api"]
    functions = [getattr(api, name, None) for name in _NAMES]
    # Each is a check whether there is a network, around the function proper; torch built without RPC has none of them.
    known = [
        function
        for function in functions
        if getattr(getattr(function, "__code__", None), "co_freevars", ()) == ("func",)
    ]
    patches = tuple(map(CodePatch, known))  # type: ignore[arg-type]
    for patch in patches:
        _calls[patch.function.__name__] = patch
        patch.lend(_lent())  # type: ignore[arg-type]
    references = getattr(getattr(torch._C, "_distributed_rpc", None), "PyRRef", None)
    if references is None:
        return patches
    original = references.to_here

    def to_here(reference: Any, timeout: float = -1.0) -> Any:
        tracer = active.tracer
        if tracer is None or not tracer._runs_for_real:
            return original(reference, timeout)
        return tracer.calls.leaf(fetch_reference, original, (reference, timeout), {}, always=True)

    return (*patches, Patch(references, "to_here", to_here))


_calls: dict[str, CodePatch] = {}


def _record(name: str, args: Any, kwargs: Any) -> Any:
    patch, tracer = _calls[name], active.tracer
    if tracer is None:
        return patch.original(*args, **kwargs)
    if tracer._runs_for_real:
        return tracer.calls.leaf(patch.function, patch.original, args, kwargs, always=True)
    return tracer.create_proxy("call_function", patch.function, args, kwargs)


# The name that the lent code below needs; see CodePatch.lend.
_torchgraft_remote_call = _record


def _lent() -> Callable[..., Any]:
    func: Any = None  # the lent code closes over the function proper, as the code it takes the place of does

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return _torchgraft_remote_call(func.__name__, args, kwargs)

    return wrapper
