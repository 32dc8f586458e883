"""What a model asks torch about the situation it runs in (gradients on or off, default types), and what it may not switch.
An answer decides what the program is, so it becomes a guard. Regions such as `torch.no_grad` are in `regions.py`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchgraft.capturing.patching.active import NamespacePatch, Patch, active
from torchgraft.capturing.patching.wrapping import marked
from torchgraft.capturing.refusals import LEAF, in_lines
from torchgraft.errors import TraceError
from torchgraft.ir.guards import check_value
from torchgraft.ir.modules import hooks_for_all
from torchgraft.ir.origin import current_source_line

_ASKED = (
    "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_autocast_cache_enabled",
    "get_autocast_dtype", "get_default_dtype", "are_deterministic_algorithms_enabled",
)  # fmt: skip
_SET = ("set_default_dtype", "set_default_device", "set_default_tensor_type", "use_deterministic_algorithms")
# The context managers of torch ask for what they will put back, and are recorded themselves.
_REGION_FILES = (os.path.join("autograd", "grad_mode.py"), os.path.join("amp", "autocast_mode.py"))


def _asked(function: Callable[..., Any]) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        result = fallback[0](*args, **kwargs)
        tracer = active.tracer
        if tracer is None or tracer._switching or (tracer._runs_for_real and tracer.is_plain):
            return result
        if sys._getframe(1).f_code.co_filename.endswith(_REGION_FILES):
            return result
        asked = tracer.create_node("call_function", function, args, kwargs)
        what = f"torch.{function.__name__}({', '.join(map(repr, args))})"
        where = str(current_source_line() or "an unknown line")
        tracer.create_node("call_function", check_value, (asked, result, what, where), {})
        return result

    fallback = [function]
    return marked(ask, function, fallback)


def _refused(function: Callable[..., Any]) -> Callable[..., Any]:
    def switch(*args: Any, **kwargs: Any) -> Any:
        tracer = active.tracer
        if tracer is not None and not tracer._switching:
            _refuse(tracer, f"torch.{function.__name__}()", "it switches torch for everything that runs afterwards")
        return fallback[0](*args, **kwargs)

    fallback = [function]
    return marked(switch, function, fallback)


def _refuse(tracer: Any, what: str, reason: str) -> None:
    fix = f"do it before tracing and outside of the model, or {LEAF}"
    raise tracer._remembered(TraceError(in_lines(f"cannot trace {what}: {reason}", current_source_line(), fix)))


def _refused_in_forward(holder: Any, name: str, reason: str) -> Patch:
    """A patch of something that no program can repeat: refused while tracing."""
    original = getattr(holder, name)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        tracer = active.tracer
        what = f"{getattr(original, '__qualname__', name)}()"
        if tracer is not None and not tracer._switching and _is_users(args):
            _refuse(tracer, what, reason)
        return original(*args, **kwargs)

    return Patch(holder, name, refuse)


def _is_users(args: tuple[Any, ...]) -> bool:
    """Not what torch does for purposes of its own: a checkpoint has hooks on saved tensors too."""
    return not (args and isinstance(args[0], saved_tensors_hooks)) or (
        type(args[0]) is saved_tensors_hooks or not type(args[0]).__module__.startswith("torch.")
    )


def refuse_hooks_for_all_modules() -> None:
    """Raise if hooks are registered that run around every module: those that are traced through are no modules any more."""
    if hooks_for_all():
        raise TraceError(
            "cannot trace while hooks for all modules are registered\n"
            "  torch.nn.modules.module.register_module_forward_hook and its like: the program would run them around leaf modules "
            "only\n"
            "  remove them and register them again afterwards, or keep all modules as leaves (Tracer.is_leaf_module)"
        )


_enter_mode = TorchFunctionMode.__enter__


def _enter_function_mode(mode: TorchFunctionMode) -> Any:
    """A mode of the user's would see proxies; a watched run sees what the mode makes of a call."""
    tracer = active.tracer
    is_own = type(mode).__module__.startswith(("torch.", "torchgraft."))
    if tracer is not None and not tracer._runs_for_real and not tracer._switching and not is_own:
        _refuse(tracer, f"the mode {type(mode).__name__}", "it changes what torch's functions do")
    return _enter_mode(mode)


def _handed_to_thread(holder: Any, name: str) -> Patch:
    """A patch of what gives work to another thread, which nobody watches."""
    original = getattr(holder, name)

    def hand_over(*args: Any, **kwargs: Any) -> Any:
        # A progress bar, torch's own among them, has one to see whether it is still alive.
        if type(args[0]).__module__.startswith("tqdm."):
            return original(*args, **kwargs)
        tracer = active.tracer
        if tracer is not None and not tracer._switching:
            _refuse(tracer, f"{holder.__name__}.{name}()", "what another thread does is not seen")
        return original(*args, **kwargs)

    return Patch(holder, name, hand_over)


_modules = torch.nn.modules.module
SWITCH_PATCHES = [
    NamespacePatch(
        vars(torch),
        {name: _asked(getattr(torch, name)) for name in _ASKED}
        | {name: _refused(getattr(torch, name)) for name in _SET},
    ),
    _handed_to_thread(threading.Thread, "start"),
    _handed_to_thread(ThreadPoolExecutor, "submit"),
    Patch(TorchFunctionMode, "__enter__", _enter_function_mode),
    _refused_in_forward(torch.utils, "swap_tensors", "it makes one tensor of another"),
    _refused_in_forward(TorchDispatchMode, "__enter__", "it changes what operators do"),
    _refused_in_forward(saved_tensors_hooks, "__enter__", "what it does to saved tensors happens in the backward"),
    *[
        _refused_in_forward(_modules, name, "it registers a hook that runs around every module")
        for name in dir(_modules)
        if name.startswith("register_module_") and "ward_" in name
    ],
]
