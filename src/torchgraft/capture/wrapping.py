"""Leaf functions: which calls of plain Python functions are recorded whole instead of being traced through.
A function becomes one by `wrap`, by a tracer's autowrap lists, or by torch.fx's own `wrap` where a library used that.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any

import torch

from torchgraft.capture.active import NamespacePatch, Patch, active, shared_patch
from torchgraft.capture.proxy import find_proxy
from torchgraft.codegen.graph_module import GENERATED_MODULE
from torchgraft.errors import TraceError

# (globals of the module that called wrap, name): looked up when a trace begins, because wrap may precede the definition.
_wrapped: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}

_MARKS = "__torchgraft_wrapped__"

# Functions that set or read torch's random state; what they do concerns every later draw of the program.
_TORCH_RANDOM = ("manual_seed", "seed", "get_rng_state", "set_rng_state", "initial_seed")

_PYTHON_RANDOM = {
    id(function): function
    for name in dir(random)
    if not name.startswith("_") and getattr(function := getattr(random, name), "__self__", None) is random._inst  # type: ignore[attr-defined]
}


def wrap(fn_or_name: str | Callable[..., Any]) -> str | Callable[..., Any]:
    """Record calls of a function as one node instead of tracing through it.

    Call it at the top level of a module, with a name (`wrap("len")`) or a function defined there (also as a decorator).
    """
    if not callable(fn_or_name) and not isinstance(fn_or_name, str):
        raise TraceError(
            f"wrap takes a callable or the name of one as a string, not {type(fn_or_name).__name__}"
        )
    if isinstance(fn_or_name, str):
        name = fn_or_name
    else:
        if not hasattr(fn_or_name, "__code__"):
            raise TraceError(f"cannot wrap {fn_or_name!r}: it is no plain function; give its name as a string instead")
        name = fn_or_name.__code__.co_name
    frame = sys._getframe(1)
    if frame.f_code.co_name != "<module>":
        raise NotImplementedError("wrap must be called at the top level of a module")
    register_wrapped(frame.f_globals, name)
    return fn_or_name


def register_wrapped(scope: dict[str, Any], name: str) -> None:
    """Make `name` in the namespace `scope` a leaf function."""
    if scope.get("__name__") == GENERATED_MODULE:
        # Generated code comes and goes; its marks live and die with its namespace.
        scope.setdefault(_MARKS, []).append(name)
    else:
        _wrapped[id(scope), name] = (scope, name)


def recorded_leaf(function: Callable[..., Any]) -> Callable[..., Any]:
    """A leaf function: a call with traced values is one node, and stays one when the generated code is traced again."""

    def record(tracer: Any, args: Any, kwargs: Any) -> Any:
        result = tracer.create_proxy("call_function", function, args, kwargs)
        result.node.meta["is_wrapped"] = True
        return result

    return _replacement(function, record)


def recorded_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch that takes traced values, but does not know how to say so."""
    return _replacement(function, lambda tracer, args, kwargs: tracer.create_proxy("call_function", function, args, kwargs))


def _recorded_always(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose result differs from call to call: recorded whatever its arguments are."""

    @functools.wraps(function, updated=())
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if active.tracer is None:
            return function(*args, **kwargs)
        return active.tracer.create_proxy("call_function", function, args, kwargs)

    replacement.__torchgraft_original__ = function  # type: ignore[attr-defined]
    return replacement


def _replacement(function: Callable[..., Any], record: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function, updated=())
    def replacement(*args: Any, **kwargs: Any) -> Any:
        proxy = find_proxy((args, kwargs))
        return function(*args, **kwargs) if proxy is None else record(proxy.tracer, args, kwargs)

    replacement.__torchgraft_original__ = function  # type: ignore[attr-defined]
    return replacement


def wrapped_patches() -> list[Patch]:
    """Patches for everything that `wrap` of torchgraft or of torch.fx was called on."""
    patches = []
    for scope, name in [*_wrapped.values(), *_wrapped_by_torch_fx()]:
        patch = shared_patch(scope, name, recorded_leaf)
        if patch is not None:
            patches.append(patch)
    return patches


def _wrapped_by_torch_fx() -> Iterable[tuple[dict[str, Any], str]]:
    # Libraries such as torchvision mark their leaf functions with torch.fx.wrap. Reading its table of marks imports nothing.
    tracing = sys.modules.get("torch.fx._symbolic_trace")
    table = getattr(tracing, "_wrapped_fns_to_patch", {})
    return [(scope, key[1]) for key, scope in list(table.items()) if isinstance(scope, dict)]


_library: dict[ModuleType, NamespacePatch] = {}


def _library_patch(module: ModuleType, make: Callable[..., Any], functions: Iterable[Any]) -> NamespacePatch:
    """One patch for all the leaf functions of a module, made when it is first needed."""
    patch = _library.get(module)
    if patch is None:
        wanted = {id(function) for function in functions}
        replacements = {name: make(value) for name, value in vars(module).items() if id(value) in wanted}
        patch = _library[module] = NamespacePatch(vars(module), replacements)
        _originals.update({id(replacements[name]): id(value) for name, value in patch.originals.items()})
        _kept.append(patch)
    return patch


# From the id of a replacement to the id of its original: in a namespace that another thread's trace has patched, the
# replacement is what is found.
_originals: dict[int, int] = {}
_kept: list[Any] = []


def _public_functions(module: ModuleType) -> list[Callable[..., Any]]:
    return [value for name, value in vars(module).items() if not name.startswith("_") and callable(value)]


class Autowrap:
    """Finds leaf functions by identity in the namespaces a trace comes through."""

    def __init__(self, modules: Iterable[ModuleType], functions: Iterable[Callable[..., Any]]) -> None:
        self.modules = list(modules)
        self._functions = {id(function): function for function in functions}
        for module in self.modules:
            patch = _library_patch(module, recorded_leaf, _public_functions(module))
            self._functions.update({id(function): function for function in patch.originals.values()})
        self._random = [
            _library_patch(random, _recorded_always, _PYTHON_RANDOM.values()),
            *[
                _library_patch(module, _recorded_always, [getattr(torch, name) for name in _TORCH_RANDOM])
                for module in (torch, torch.random)
            ],
        ]
        self._wanted = self._functions.keys() | _PYTHON_RANDOM.keys() | _originals.keys()
        self._seen: dict[int, dict[str, Any]] = {}

    def library_patches(self) -> list[NamespacePatch]:
        """Patches in the autowrapped modules themselves, and of Python's random numbers."""
        return [*[_library[module] for module in self.modules], *self._random]

    def patches(self, scope: dict[str, Any]) -> list[Patch]:
        """Patches for the leaf functions named in a namespace not seen before."""
        if self.has_seen(scope):
            return []
        self._seen[id(scope)] = scope
        found = [shared_patch(scope, name, recorded_leaf) for name in scope.get(_MARKS, ())]
        if not self._wanted.isdisjoint(map(id, list(scope.values()))):
            for name, value in list(scope.items()):
                key = _originals.get(id(value), id(value))
                if key in self._functions and not name.startswith("_"):
                    found.append(shared_patch(scope, name, recorded_leaf))
                elif key in _PYTHON_RANDOM:
                    found.append(shared_patch(scope, name, _recorded_always))
        return [patch for patch in found if patch is not None]

    def has_seen(self, scope: dict[str, Any]) -> bool:
        """Whether this trace has looked at a namespace already."""
        return id(scope) in self._seen

    def forget(self) -> None:
        """Look at every namespace anew in the next trace."""
        self._seen.clear()
