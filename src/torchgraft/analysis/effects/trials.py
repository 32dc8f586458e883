"""What torch's own Python functions and modules do, seen on a run with tensors that have no data (the meta device).
Which tensors a run is given is chosen in `examples.py`; only code of torch's is ever run, on copies, and never a user's.
"""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from torchgraft.analysis.effects.examples import Inputs, argument_trials, module_sizes
from torchgraft.analysis.effects.findings import NO_PLACES, Effects, Findings, Places, joined
from torchgraft.analysis.effects.operators import operator_of_overload
from torchgraft.ir.modules import hooks_for_all, is_from_torch

# The homes of the functions that compute on tensors, unlike those of torch.random, torch.serialization, … which must not be tried.
_HOMES = frozenset({"torch.nn.functional", "torch.functional", "torch._tensor", "torch.nn.init", "torchgraft.ir.choices"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


# What a run was seen to do, None if it failed; and whether it asked a tensor for its value.
_Seen = tuple[Effects | None, bool]


class NotTorchs(Exception):
    """Ends a description of something that would run a user's code; never leaves this folder."""


def can_be_tried(function: Any) -> bool:
    """Whether a Python function is one of torch's that compute on tensors."""
    return isinstance(function, types.FunctionType) and function.__module__ in _HOMES


def try_function(function: Any, inputs: Inputs) -> Effects | None:
    """The effects of calling a function of torch's; None where no run came to its end."""
    return _union(
        argument_trials(function, inputs, []), lambda args, kwargs, answer: _run(function, args, kwargs, {}, answer)
    )


def try_module(module: torch.nn.Module, inputs: Inputs) -> Effects | None:
    """The effects of calling a module of torch's, state by its path inside the module; None where no run came to its end."""

    def run(args: Any, kwargs: Any, answer: bool) -> _Seen:
        state: dict[int, str] = {}
        copies: dict[int, Any] = {}
        copy = _copy(module, "", copies, state)
        kept = {path: dict(vars(inner)) for path, inner in copy.named_modules()}
        found, was_asked = _run(copy, args, kwargs, state, answer)
        changed = [
            f"{path}.{name}".removeprefix(".")
            for path, inner in copy.named_modules()
            for name, value in vars(inner).items()
            if kept.get(path, {}).get(name, kept) is not value
        ]
        if changed and found is not None:
            reason = f"{type(module).__name__} sets its attribute '{changed[0]}'"
            found = joined([found, Effects(frozenset(changed), reasons=(reason,))])
        return found, was_asked

    return _union(argument_trials(type(module).forward, inputs, module_sizes(module)), run)


def _union(trials: Iterator[list[tuple[Any, Any]]], run: Callable[[Any, Any, bool], _Seen]) -> Effects | None:
    """The effects of the first trial of which a run comes to its end; all runs of one trial count."""
    for variants in trials:
        found: list[Effects] = []
        for args, kwargs in variants:
            for answer in (False, True):
                effects, was_asked = run(args, kwargs, answer)
                found += [] if effects is None else [effects]
                if not was_asked:
                    break
        if found:
            return joined(found)
    return None


# ---- one run ----


class _Watch(TorchDispatchMode):
    """Writes down what operators do to memory that was there before the run."""

    def __init__(self, places: dict[int, Any], answer: bool) -> None:
        super().__init__()
        self.findings = Findings()
        self.answer, self.was_asked = answer, False
        self.places: dict[int, Places] = {key: frozenset((place,)) for key, place in places.items()}
        # Copies of such memory. Whether reshape, contiguous or to copy depends on layouts, so their results may share it.
        self.copied: dict[int, Places] = {}
        self.alive: list[Any] = []  # a storage that is gone gives its identity to another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            self.was_asked = True
            return self.answer  # what a tensor without data would say is made up, and both are tried
        try:
            result = func(*args, **kwargs)
        except NotImplementedError:
            result = _made_up(func, args)
        findings = Findings()
        operator_of_overload(func).find(findings, args, kwargs, self.memory)
        self.findings.writes |= findings.writes
        self.findings.random |= findings.random
        self.findings.unknown |= findings.unknown
        self.findings.reasons |= findings.reasons
        self.alive.append(result)
        if isinstance(result, torch.Tensor) and func._schema.name.endswith(("clone", "_copy")):
            self.copied[_storage(result)] = self.may_share(args)
        return result

    def memory(self, tree: Any) -> Places:
        return frozenset().union(*[self.places.get(_storage(tensor), NO_PLACES) for tensor in _tensors(tree)])

    def may_share(self, tree: Any) -> Places:
        copied = [self.copied.get(_storage(tensor), NO_PLACES) for tensor in _tensors(tree)]
        return self.memory(tree).union(*copied)


def _made_up(func: Any, args: Any) -> Any:
    """Results of an operator that needs values (unique, …); their shapes are wrong, but their memory is new."""
    returns = func._schema.returns
    if any(result.alias_info is not None or str(result.type) != "Tensor" for result in returns):
        raise NotImplementedError
    results = [torch.empty_like(next(_tensors(args))) for _ in returns]
    return results[0] if len(results) == 1 else tuple(results)


def _run(function: Any, args: Any, kwargs: Any, places: dict[int, Any], answer: bool) -> _Seen:
    """Run a call; `places` says which memory is whose, by storage, besides that of the arguments."""
    places = dict(places)
    for tensor in _tensors((args, kwargs)):
        places[_storage(tensor)] = tensor.torchgraft_place  # type: ignore[attr-defined]
    watch = _Watch(places, answer)
    with (
        warnings.catch_warnings(),
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.no_grad(),
        watch,
    ):
        warnings.simplefilter("ignore")
        try:
            result = function(*args, **kwargs)
        except Exception:  # these arguments are not meant
            return None, watch.was_asked
    findings = watch.findings
    findings.shares |= watch.may_share(result)
    if result is None:
        findings.write_outside("it returns nothing, so it is called for its effect")
    return findings.effects(), watch.was_asked


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
    elif isinstance(tree, torch.nn.utils.rnn.PackedSequence):
        yield from _tensors(tuple(tree))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


# ---- copies of modules ----


def _copy(module: torch.nn.Module, path: str, copies: dict[int, Any], state: dict[int, str]) -> torch.nn.Module:
    """A copy of a module of torch's with meta tensors in the place of its own; `state` gets the path of each by its storage."""
    if id(module) in copies:
        return copies[id(module)]
    result = copies[id(module)] = object.__new__(type(module))
    attributes = dict(vars(module))
    for table in ("_parameters", "_buffers"):
        attributes[table] = {
            name: _meta(value, f"{path}{name}", copies, state) for name, value in attributes[table].items()
        }
    attributes["_modules"] = {
        name: None if child is None else _copy(child, f"{path}{name}.", copies, state)
        for name, child in attributes["_modules"].items()
    }
    for name, value in attributes.items():
        if isinstance(value, (list, torch.Tensor)):  # the flat weights of an RNN
            attributes[name] = _replaced(value, f"{path}{name}", copies, state)
    result.__dict__.update(attributes)
    return result


def _replaced(value: Any, path: str, copies: dict[int, Any], state: dict[int, str]) -> Any:
    if isinstance(value, list):
        return [_replaced(item, path, copies, state) for item in value]
    if isinstance(value, weakref.ref):
        return weakref.ref(copies.get(id(value()), value()))
    return _meta(value, path, copies, state) if isinstance(value, torch.Tensor) else value


def _meta(tensor: Any, path: str, copies: dict[int, Any], state: dict[int, str]) -> Any:
    if tensor is None:
        return None
    if id(tensor) not in copies:
        if tensor.dim():
            plain = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        else:  # a counter, which torch may read
            plain = torch.ones((), dtype=tensor.dtype)
        copy = torch.nn.Parameter(plain, False) if isinstance(tensor, torch.nn.Parameter) else plain
        copies[id(tensor)] = copy
        state[_storage(copy)] = path
    return copies[id(tensor)]


# ---- what decides what a module does ----


def configuration(module: torch.nn.Module) -> Any:
    """A key that modules which do the same have in common; NotTorchs where a user's code would run."""
    if hooks_for_all():
        raise NotTorchs("there are hooks that run whenever a module is called")
    return _configuration(module)


def _configuration(module: torch.nn.Module) -> Any:
    cls = type(module)
    if not is_from_torch(cls):
        raise NotTorchs(f"calls {cls.__name__}, which is not torch's")
    key: list[Any] = [cls]
    for name, value in vars(module).items():
        kind = type(value)
        if name in _TABLES:
            for inner, item in value.items():
                if item is not None:
                    described = _configuration(item) if name == "_modules" else _described(item)
                    key.append((inner, described))
        elif kind in (int, float, bool, str):
            key.append((name, kind, value))
        elif name in _HOOKS:
            if value and not all(_is_torchs_hook(hook) for hook in value.values()):
                raise NotTorchs(f"{cls.__name__} has hooks")
        elif value is None or kind is dict or kind is set:
            continue
        elif isinstance(value, _PLAIN) or kind is tuple:
            key.append((name, value if _is_plain(value) else _opaque(name, value)))
        else:
            key.append((name, _opaque(name, value)))
    return tuple(key)


def _described(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, UninitializedTensorMixin):
        raise NotTorchs("its parameters are made when it is called first")
    return tensor.shape, tensor.dtype


def _opaque(name: str, value: Any) -> Any:
    """The part of a key that an attribute without a value of its own gives."""
    if isinstance(value, torch.Tensor):
        return _described(value)
    if isinstance(value, (list, tuple)):
        return tuple([item if _is_plain(item) else _opaque(name, item) for item in value])
    if callable(value) and not isinstance(value, type):
        home = getattr(value, "__module__", None) or type(value).__module__
        if home.partition(".")[0] not in ("torch", "weakref"):
            raise NotTorchs(f"calls its attribute '{name}', which is not torch's")
        return getattr(value, "__qualname__", "") if isinstance(value, types.BuiltinFunctionType) else id(value)
    return type(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(_is_plain, value)))


def _is_torchs_hook(hook: Any) -> bool:
    home = getattr(hook, "__module__", None) or ""
    return home.startswith("torch.nn.utils")
