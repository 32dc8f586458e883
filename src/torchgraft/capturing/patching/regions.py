"""Regions: noting when a traced program enters and leaves `torch.no_grad`, autocast and their like.
The calls that end up in the program are in `ir/contexts.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from torchgraft.capturing.patching.active import Patch, active
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.graph import Graph


def _no_arguments(context: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), {}


def _mode_argument(context: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (context.mode,), {}


def _autocast_arguments(context: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # The attributes are private, but the constructor's arguments are kept nowhere else; the test pins them.
    options = {"dtype": context.fast_dtype, "enabled": context._enabled, "cache_enabled": context._cache_enabled}
    return (context.device,), options


def _record_function_arguments(context: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (context.name,) if context.args is None else (context.name, context.args), {}


_CONTEXTS: dict[type, Any] = {
    torch.no_grad: _no_arguments,
    torch.enable_grad: _no_arguments,
    torch.set_grad_enabled: _mode_argument,
    torch.inference_mode: _mode_argument,
    torch.autocast: _autocast_arguments,
    torch.autograd.profiler.record_function: _record_function_arguments,
    forward_ad.dual_level: _no_arguments,
}


def _patches_of(cls: type, arguments_of: Any) -> list[Patch]:
    original_enter, original_exit = cls.__enter__, cls.__exit__  # type: ignore[attr-defined]

    def enter(self: Any) -> Any:
        tracer = active.tracer
        if tracer is None or tracer._switching:
            return original_enter(self)
        tracer._switching = True
        try:
            result = original_enter(self)
        finally:
            tracer._switching = False
        args, kwargs = arguments_of(self)
        _drop_redundant_switch(tracer, cls)
        lowered = tracer.create_arg((cls, *args)), tracer.create_arg(kwargs) if kwargs else {}
        node = tracer.create_node("call_function", enter_context, *lowered, cls.__name__)
        tracer._open_contexts.append((self, node))
        return result

    def leave(self: Any, *details: Any) -> Any:
        tracer = active.tracer
        if tracer is None or tracer._switching:
            return original_exit(self, *details)
        tracer._switching = True
        try:
            result = original_exit(self, *details)
        finally:
            tracer._switching = False
        if tracer._open_contexts and tracer._open_contexts[-1][0] is self:
            _, node = tracer._open_contexts.pop()
            tracer.create_node("call_function", exit_context, (node,), {})
        return result

    return [Patch(cls, "__enter__", enter), Patch(cls, "__exit__", leave)]


def _drop_redundant_switch(tracer: Any, cls: type) -> None:
    """`with set_grad_enabled(...)` switches once when it is made and again when it is entered; one of them says it all."""
    if cls is torch.set_grad_enabled:
        last = tracer.graph._root._prev
        if last._op == "call_function" and getattr(last._target, "__name__", "") == "_set_grad_enabled":
            tracer.graph.erase_node(last)


def remove_empty_regions(graph: Graph) -> None:
    """Drop contexts in which nothing was recorded."""
    for node in graph.nodes:
        if node._target is exit_context and node._op == "call_function":
            opened = node._args[0]
            if node._prev is opened:
                graph.erase_node(node)
                graph.erase_node(opened)


REGION_PATCHES = [patch for cls, arguments_of in _CONTEXTS.items() for patch in _patches_of(cls, arguments_of)]
