"""Calls of plain Python functions that are recorded whole instead of being traced through.
A function is such a leaf by `wrap` (`ir/leaf_functions.py`), by a tracer's autowrap lists, or by torch.fx's own `wrap`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch

from torchgraft.capturing.patching.active import NamespacePatch, Patch, active, shared_patch
from torchgraft.capturing.patching.remote_calls import remote_call_patches
from torchgraft.capturing.refusals import LEAF, in_lines
from torchgraft.capturing.symbolic.proxy import find_proxy
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import TraceError
from torchgraft.ir.leaf_functions import (
    chooses_when_compiled,
    functions_that_choose,
    marked_functions,
    marks_in,
    wrapped_methods,
)
from torchgraft.ir.origin import current_source_line

# Functions that set or read torch's random state; what they do concerns every later draw of the program.
_TORCH_RANDOM = ("manual_seed", "seed", "get_rng_state", "set_rng_state", "initial_seed")

_PYTHON_RANDOM = {
    id(function): function
    for name in dir(random)
    if not name.startswith("_") and getattr(function := getattr(random, name), "__self__", None) is random._inst
}


@functools.cache
def _numpy_random() -> tuple[ModuleType, dict[int, Callable[..., Any]]]:
    """The module of numpy's random numbers, and its functions that draw from the state that all share."""
    module = importlib.import_module("numpy.random")
    state = module.rand.__self__
    functions = [value for value in vars(module).values() if getattr(value, "__self__", None) is state]
    return module, {id(function): function for function in functions}


def recorded_leaf(function: Callable[..., Any], always: bool = False) -> Callable[..., Any]:
    """A leaf function: a call with traced values, or any, is one node, and stays one when the generated code is traced again."""

    def record(tracer: Any, args: Any, kwargs: Any) -> Any:
        result = tracer.create_proxy("call_function", function, args, kwargs)
        result.node.meta["is_wrapped"] = True
        return result

    return _replacement(function, record, always=always)


def recorded_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch that takes traced values, but does not know how to say so."""

    def record(tracer: Any, args: Any, kwargs: Any) -> Any:
        return tracer.create_proxy("call_function", function, args, kwargs)

    return _replacement(function, record, is_leaf=False)


def recorded_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method of real tensors that takes sizes one by one, of which some may be traced."""

    def record(tracer: Any, args: Any, kwargs: Any) -> Any:
        return tracer.create_proxy("call_method", function.__name__, args, kwargs)

    return _replacement(function, record, is_leaf=False)


def _recorded_always(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose result differs from call to call: recorded whatever its arguments are."""
    is_numpy = id(function) not in _PYTHON_RANDOM and getattr(function, "__module__", "") == "numpy.random"

    @functools.wraps(function, updated=())
    def replacement(*args: Any, **kwargs: Any) -> Any:
        tracer = active.tracer
        if tracer is None or (is_numpy and tracer._runs_for_real):
            return fallback[0](*args, **kwargs)
        if tracer._runs_for_real:
            return tracer.calls.random(function, args, kwargs)
        if function.__name__ == "shuffle":
            raise tracer._remembered(_shuffle_error())
        return tracer.create_proxy("call_function", function, args, kwargs)

    fallback = [function]
    return marked(replacement, function, fallback)


def _shuffle_error() -> TraceError:
    text = in_lines(
        "cannot trace shuffle(): it changes a list while tracing, and every run would find that one order",
        current_source_line(),
        f"use random.sample(items, len(items)) or torch.randperm, or {LEAF}",
    )
    return TraceError(text)


def marked(replacement: Any, function: Callable[..., Any], fallback: list[Any]) -> Callable[..., Any]:
    """`fallback` holds what is called where nobody traces; a patch puts there what it found in its place."""
    replacement.__name__ = function.__name__
    replacement.__torchgraft_original__ = function
    replacement.__torchgraft_fallback__ = fallback
    return replacement


def _replacement(
    function: Callable[..., Any], record: Callable[..., Any], is_leaf: bool = True, always: bool = False
) -> Callable[..., Any]:
    @functools.wraps(function, updated=())
    def replacement(*args: Any, **kwargs: Any) -> Any:
        tracer = active.tracer
        if is_leaf and tracer is not None and tracer._runs_for_real:
            return tracer.calls.leaf(function, function, args, kwargs, always=always)
        proxy = find_proxy((args, kwargs))
        tracer = tracer if proxy is None and always else getattr(proxy, "tracer", None)
        return fallback[0](*args, **kwargs) if tracer is None else record(tracer, args, kwargs)

    fallback = [function]
    return marked(replacement, function, fallback)


_looks_inside: ContextVar[bool] = ContextVar("looks_inside", default=False)


@contextlib.contextmanager
def looking_inside() -> Iterator[None]:
    """Capture what functions that were wrapped do, too: a mark for people who read programs is none for a backend."""
    token = _looks_inside.set(True)
    try:
        yield
    finally:
        _looks_inside.reset(token)


def wrapped_patches() -> list[Any]:
    """Patches for all leaf functions, and for calls of other processes."""
    if _looks_inside.get():
        return _leaf_patches(functions_that_choose())
    methods = [shared_patch(cls, name, recorded_method) for cls, name in wrapped_methods]
    return [*remote_call_patches(), *_leaf_patches(leaf_functions()), *[one for one in methods if one is not None]]


def program_patches(model: Any) -> list[Any]:
    """Patches for the leaf functions of the programs in a model, whose generated code says which they are."""
    programs = (
        [one for one in model.modules() if isinstance(one, GraphModule)] if isinstance(model, torch.nn.Module) else []
    )
    scopes = [type(program).forward.__globals__ for program in programs]
    marks = [(scope, name) for scope in scopes for name in marks_in(scope)]
    return _leaf_patches(
        [(scope, name) for scope, name in marks if not _looks_inside.get() or chooses_when_compiled(scope.get(name))]
    )


def _leaf_patches(functions: Iterable[tuple[dict[str, Any], str]]) -> list[Any]:
    patches = [shared_patch(scope, name, recorded_leaf) for scope, name in functions]
    return [patch for patch in patches if patch is not None]


def leaf_functions() -> list[tuple[dict[str, Any], str]]:
    """What `wrap` of torchgraft or of torch.fx was called on, and what asks whether it is compiled, as (namespace, name)."""
    return [*functions_that_choose(), *marked_functions(), *_wrapped_by_torch_fx()]


def _wrapped_by_torch_fx() -> Iterable[tuple[dict[str, Any], str]]:
    # Libraries such as torchvision mark their leaf functions with torch.fx.wrap. Reading its table of marks imports nothing.
    tracing = sys.modules.get("torch.fx._symbolic_trace")
    table = getattr(tracing, "_wrapped_fns_to_patch", {})
    return [(scope, key[1]) for key, scope in list(table.items()) if isinstance(scope, dict)]


def _call_script(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of a compiled function, which torch's override protocol does not see."""
    tracer = active.tracer
    if tracer is None or not tracer._runs_for_real:
        return _script_call(function, *args, **kwargs)
    run = functools.partial(_script_call, function)
    return tracer.calls.leaf(function, run, args, kwargs, function.name)


_script_call = torch.jit.ScriptFunction.__call__
SCRIPT_PATCH = Patch(torch.jit.ScriptFunction, "__call__", _call_script)

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


@functools.cache
def seed_patches() -> list[NamespacePatch]:
    """Patches of what sets or reads torch's random state."""
    functions = [getattr(torch, name) for name in _TORCH_RANDOM]
    return [_library_patch(module, _recorded_always, functions) for module in (torch, torch.random)]


@functools.cache
def _chance(with_numpy: bool) -> tuple[list[NamespacePatch], dict[int, Callable[..., Any]]]:
    """Patches of everything that draws random numbers outside of torch or sets torch's random state; and what draws."""
    patches = [_library_patch(random, _recorded_always, _PYTHON_RANDOM.values()), *seed_patches()]
    if not with_numpy:
        return patches, _PYTHON_RANDOM
    numpy_random, functions = _numpy_random()
    patches.append(_library_patch(numpy_random, _recorded_always, functions.values()))
    return patches, _PYTHON_RANDOM | functions


class Autowrap:
    """Finds leaf functions by identity in the namespaces a trace comes through."""

    def __init__(self, modules: Iterable[ModuleType], functions: Iterable[Callable[..., Any]]) -> None:
        self.modules = list(modules)
        self._functions = list(functions)  # held, so that their ids stay theirs
        # A subclass of Tracer may add to these.
        self.function_ids = set(map(id, self._functions))
        for module in self.modules:
            patch = _library.get(module) or _library_patch(module, recorded_leaf, _public_functions(module))
            self.function_ids.update(map(id, patch.originals.values()))
        self._random, self._chance = _chance("numpy" in sys.modules)
        self._seen: dict[int, dict[str, Any]] = {}

    def library_patches(self) -> list[NamespacePatch]:
        """Patches in the autowrapped modules themselves, and of Python's random numbers."""
        return [*[_library[module] for module in self.modules], *self._random]

    def patches(self, scope: dict[str, Any]) -> list[Patch]:
        """Patches for the leaf functions named in a namespace not seen before."""
        if self.has_seen(scope):
            return []
        self._seen[id(scope)] = scope
        found = [shared_patch(scope, name, recorded_leaf) for name in marks_in(scope)]
        present = set(map(id, list(scope.values())))
        if any(not present.isdisjoint(wanted) for wanted in (self.function_ids, self._chance, _originals)):
            for name, value in list(scope.items()):
                key = _originals.get(id(value), id(value))
                if key in self.function_ids and not name.startswith("_"):
                    found.append(shared_patch(scope, name, recorded_leaf))
                elif key in self._chance:
                    found.append(shared_patch(scope, name, _recorded_always))
        return [patch for patch in found if patch is not None]

    def has_seen(self, scope: dict[str, Any]) -> bool:
        """Whether this trace has looked at a namespace already."""
        return id(scope) in self._seen

    def forget(self) -> None:
        """Look at every namespace anew in the next trace."""
        self._seen.clear()


# Made now, while nobody traces and the functions there are the original ones.
_library_patch(math, recorded_leaf, _public_functions(math))
_chance(with_numpy=False)
