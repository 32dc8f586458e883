"""What other processes do, and waiting for it, is recorded as calls: functions of torch.distributed.rpc, remote references,
futures, the handles of collectives that were started, barriers. Collectives themselves need nothing of the kind: torch's
override protocol sees them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from torchgraft.capturing.patching.active import CodePatch, Patch, active

# By module. Each is a check or a log around the function proper, which its code closes over as `func`.
_FUNCTIONS = {
    "torch.distributed.rpc.api": ("rpc_sync", "rpc_async", "remote"),
    "torch.distributed.distributed_c10d": ("barrier", "monitored_barrier"),
}


def remote_call_patches() -> list[Any]:
    """Patches for what has to do with other processes; none where there are no others."""
    has_calls = "torch.distributed.rpc.api" in sys.modules
    if not has_calls and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    return list(_patches(has_calls))


def fetch_reference(reference: Any, timeout: float = -1.0) -> Any:
    """The value that a remote reference refers to: `reference.to_here(timeout)`."""
    return reference.to_here(timeout)


def wait_for_work(work: Any, *timeout: Any) -> Any:
    """Wait for a collective that was started; None is what a process has that takes no part in it."""
    return None if work is None else work.wait(*timeout)


def wait_for_future(future: Any) -> Any:
    """Wait for a call in another process, and return what it returned."""
    return future.wait()


@functools.cache
def _patches(has_calls: bool) -> tuple[Any, ...]:
    patches: list[Any] = []
    for home, names in _FUNCTIONS.items():
        for function in [getattr(sys.modules.get(home), name, None) for name in names]:
            if getattr(getattr(function, "__code__", None), "co_freevars", ()) == ("func",):
                patch = _calls[function.__name__] = CodePatch(function)  # type: ignore[union-attr,arg-type]
                patch.lend(_lent())  # type: ignore[arg-type]
                patches.append(patch)
    collectives, calls = (getattr(torch._C, name, None) for name in ("_distributed_c10d", "_distributed_rpc"))
    methods: list[tuple[Any, str, Callable[..., Any]]] = [
        (getattr(calls, "PyRRef", None), "to_here", fetch_reference),
        (getattr(collectives, "Work", None), "wait", wait_for_work),
        (torch._C.Future, "wait", wait_for_future),
    ]
    return (*patches, *[_method_patch(*item) for item in methods if item[0] is not None])


def _method_patch(cls: Any, name: str, target: Callable[..., Any]) -> Patch:
    original = getattr(cls, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = active.tracer
        if tracer is None or not tracer._runs_for_real:
            return original(self, *args, **kwargs)
        return tracer.calls.leaf(target, original, (self, *args), kwargs, always=True)

    return Patch(cls, name, method)


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
