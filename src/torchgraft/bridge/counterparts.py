"""What is called one thing here and another in torch.fx: functions that programs call, tracer classes, and regions.
Whatever is not listed is the same object on both sides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.fx
import torch.fx.immutable_collections
import torch.fx.proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from torchgraft.capturing.symbolic.inputs import _assert_is_none
from torchgraft.capturing.symbolic.tracer import Tracer
from torchgraft.capturing.tracer_base import assert_traced
from torchgraft.errors import BridgeError
from torchgraft.ir.arguments import immutable_dict, immutable_list
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.copying import import_object


def enter_region(factory: str, *args: Any, **kwargs: Any) -> Any:
    """`enter_context` for torch.fx, whose generated code can write the name of a context manager but not its class.

    >>> context = enter_region("torch.no_grad")
    >>> torch.is_grad_enabled(), exit_context(context), torch.is_grad_enabled()
    (False, None, True)
    """
    _refuse_tracing(factory)
    return enter_context(import_object(factory), *args, **kwargs)


def _refuse_tracing(factory: str) -> None:
    """torch.fx records calls that have a traced argument. This one has none, so a trace would lose it without a word."""
    # The flag and not the function, which answers for our traces too (capturing/patching/fx_tracing.py).
    tracing: Any = torch.fx._symbolic_trace
    flag = tracing._get_is_fx_tracing() if hasattr(tracing, "_get_is_fx_tracing") else tracing._is_fx_tracing_flag
    is_tracing = flag and not torch.compiler.is_compiling()  # torch 2.15 has a flag for each thread
    if is_tracing and get_proxy_mode() is None:
        raise BridgeError(
            f"torch.fx cannot trace a program that enters the region {factory}: it would lose the region; "
            "trace the program with torchgraft. torch.fx traces also when it unpickles a module: pickle the torchgraft "
            "module instead, and convert it after loading"
        )


# (torch.fx's, ours); the first is None where this version of torch has no such function.
_PAIRS: list[tuple[Any, Any]] = [
    (getattr(torch.fx._symbolic_trace, "_assert_is_none", None), _assert_is_none),
    (getattr(torch.fx.proxy, "assert_fn", None), assert_traced),
    (torch.fx.immutable_collections.immutable_list, immutable_list),
    (torch.fx.immutable_collections.immutable_dict, immutable_dict),
    (enter_region, enter_context),
]
# Another thread may be tracing when this file is first imported, and have put replacements there.
_OURS = {getattr(theirs, "__torchgraft_original__", theirs): ours for theirs, ours in _PAIRS if theirs is not None}
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}


def keep_in_torch_fx(function: Callable[..., Any]) -> None:
    """Have torch.fx's dead code elimination leave calls of a function alone whose result is not used."""
    torch.fx.node.has_side_effect(function)


for _function in (enter_region, exit_context, _assert_is_none, assert_traced):
    keep_in_torch_fx(_function)


def our_target(target: Any) -> Any:
    """What a torch.fx node with this target calls here."""
    if isinstance(target, str):
        return target
    called = getattr(target, "__torchgraft_called__", None)
    return _lookup(_OURS, target) if called is None else called


def their_target(target: Any) -> Any:
    """What a node with this target calls in torch.fx."""
    if isinstance(target, str):
        return target
    function = getattr(target, "__self__", None)
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        return _function_calling(target, function.__module__, function.__qualname__)
    if isinstance(target, torch.jit.ScriptFunction):
        return _function_calling(target, __name__, target.name)
    return _lookup(_THEIRS, target)


@functools.cache
def _function_calling(called: Callable[..., Any], module: str, name: str) -> Callable[..., Any]:
    """A function in the place of something that torch.fx writes by a name that is not its own: it takes the method `apply` of an
    autograd function for a function of that name in `torch.autograd.function`, which does not exist (and once told to wrap that
    cannot trace any more), and a scripted function for its class."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return called(*args, **kwargs)

    call.__torchgraft_called__ = called  # type: ignore[attr-defined]
    call.__module__, call.__qualname__ = module, f"{name}_apply"
    call.__name__ = call.__qualname__.rpartition(".")[2]
    return call


def _lookup(table: dict[Any, Any], target: Any) -> Any:
    try:
        return table.get(target, target)
    except TypeError:  # a callable object need not be hashable
        return target


def our_tracer(graph: torch.fx.Graph) -> type | None:
    """The tracer class to note on our graph."""
    kept = getattr(graph, "_torchgraft_tracer_cls", None)
    if kept is not None:
        return kept
    return Tracer if graph._tracer_cls is torch.fx.Tracer else graph._tracer_cls


def note_tracer(tracer_cls: type | None, graph: torch.fx.Graph) -> None:
    """Note the tracer class on a torch.fx graph.

    torch.fx makes an instance of the class when it unpickles a module, so one of ours must not stand there; it is kept
    beside, for the way back.
    """
    if tracer_cls is Tracer:
        graph._tracer_cls = torch.fx.Tracer
    elif tracer_cls is None or issubclass(tracer_cls, torch.fx.Tracer):
        graph._tracer_cls = tracer_cls
    else:
        graph._torchgraft_tracer_cls = tracer_cls  # type: ignore[attr-defined]


# ---- context managers by name ----


def factory_name(factory: Callable[..., Any], node_name: str) -> str:
    """The name under which `enter_region` finds a context manager."""
    short = f"torch.{getattr(factory, '__name__', '')}"
    long = f"{getattr(factory, '__module__', '')}.{getattr(factory, '__qualname__', '')}"
    for name in (short, long):
        try:
            if import_object(name) is factory:
                return name
        except (ImportError, AttributeError, ValueError):
            continue
    raise BridgeError(
        f"cannot carry node '{node_name}' over to torch.fx: it enters the context manager {factory!r}, which cannot be "
        f"imported as '{long}', and code generated by torch.fx can only name what can be imported; "
        "define it at the top level of a module"
    )
