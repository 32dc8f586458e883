"""Custom autograd functions while a model is traced: a call of one is one node, so that its own backward runs.
`apply` may have been given another name before (`square = Square.apply`), so the calls are noticed inside it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from torchgraft.capturing.patching.active import CodePatch, Patch, active
from torchgraft.capturing.symbolic.proxy import find_proxy
from torchgraft.ir.names import snake_case

_original_apply = torch.autograd.Function.__dict__["apply"]


def _record_apply(cls: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """One node for a call of a function. `run` is what happens where nobody traces."""
    tracer = active.tracer
    target = _original_apply.__get__(None, cls)
    name = snake_case(cls.__name__)
    if tracer is not None and tracer._runs_for_real:
        return tracer.calls.leaf(target, run, args, kwargs, name)
    proxy = find_proxy((args, kwargs)) if tracer is not None else None
    if proxy is None:
        return run(*args, **kwargs)
    result = proxy.tracer.create_proxy("call_function", target, args, kwargs, name=name)
    result.node.meta["is_wrapped"] = True
    return result


# ---- torch up to 2.14: `apply` is a Python function, and its code is swapped ----

_torchgraft_active = active
_torchgraft_record_apply = _record_apply
_torchgraft_partial = functools.partial


class _LentApply:
    """The original calls `super()` and so closes over `__class__`; what is lent to it must do so too."""

    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        super  # noqa: B018 (mentioning it is enough to close over __class__)
        if _torchgraft_active.tracer is None:
            return _torchgraft_apply(self, *args, **kwargs)  # type: ignore[name-defined]  # noqa: F821
        run = _torchgraft_partial(_torchgraft_apply, self)  # type: ignore[name-defined]  # noqa: F821
        return _torchgraft_record_apply(self, run, args, kwargs)


def _patch_python_apply(function: FunctionType) -> CodePatch:
    patch = CodePatch(function)
    globals()["_torchgraft_apply"] = patch.original
    patch.lend(_LentApply.apply)  # type: ignore[arg-type]
    return patch


# ---- torch from 2.15 on: `apply` is written in C, and looks up `forward` and `setup_context` on the class ----


class _Applying(threading.local):
    """How far the `apply` that runs in this thread has come: whose it is, and who recorded it."""

    function: Any = None
    recorded: Any = None


_applying = _Applying()
_read = type(torch.autograd.Function).__getattribute__


def _read_of_function(cls: Any, name: str) -> Any:
    """What an attribute of an autograd function is. Between `_backward_cls` and `forward`, `apply` runs nothing of Python's,
    so that a `forward` read next is its own; any other read is somebody else's."""
    value = _read(cls, name)
    if active.tracer is None:
        return value
    if name == "_backward_cls":
        _applying.function = cls
    elif name == "forward" and _applying.function is cls:
        _applying.function = None
        return functools.partial(_forward_of_apply, cls, value)
    elif name == "setup_context" and _applying.recorded is cls:
        _applying.recorded = None
        return functools.partial(_setup_of_apply, value)
    return value


def _forward_of_apply(cls: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _read(cls, "setup_context") is not torch.autograd.Function.setup_context:
        _applying.recorded = cls
        return _record_apply(cls, forward, args, kwargs)
    context, *rest = args
    return _record_apply(cls, functools.partial(forward, context), tuple(rest), kwargs)


def _setup_of_apply(setup_context: Callable[..., Any], context: Any, inputs: Any, output: Any) -> None:
    """What a function computes for its backward is no part of the program."""
    tracer = active.tracer
    if tracer is not None and tracer._runs_for_real:
        tracer.unwatched(setup_context, context, inputs, output)
    elif find_proxy((inputs, output)) is None:
        setup_context(context, inputs, output)


def _patches() -> list[Any]:
    function = getattr(_original_apply, "__func__", None)
    if isinstance(function, FunctionType):
        return [_patch_python_apply(function)]
    return [Patch(type(torch.autograd.Function), "__getattribute__", _read_of_function)]


FUNCTION_PATCHES = _patches()
