"""What torch's own Python functions and modules do, seen on a run with tensors that have no data (the meta device).
Which tensors a run is given is chosen in `examples.py`; only code of torch's is ever run, on copies, and never a user's.
"""

from __future__ import annotations

import contextlib
import itertools
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from torchgraft.analysis.effects.examples import Inputs, argument_trials
from torchgraft.analysis.effects.findings import NO_PLACES, Effects, Findings, Places, joined
from torchgraft.analysis.effects.operators import operator_of_overload
from torchgraft.analysis.schemas import schema_parameters
from torchgraft.ir.arguments import leaves
from torchgraft.ir.modules import has_hooks, hooks_for_all, is_from_torch

# Where functions that compute on tensors live; those of torch.random, torch.serialization and others must not be tried.
_HOMES = frozenset({"torch.nn.functional", "torch.functional", "torch._tensor", "torchgraft.ir.choices"})
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_KEYS = frozenset({int, float, bool, str, type(None)})
NOT_TORCHS = "is Python code that is not torch's; mark it with torchgraft.pure if it only computes"
_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Call(NamedTuple):
    """One run: the arguments, what tensors say when they are asked for a value, and whether torch works out all shapes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answer: bool
    is_exact: bool


# What a run was seen to do, None if it failed; and whether it asked a tensor for its value.
_Seen = tuple[Effects | None, bool]


class NotTorchs(Exception):
    """Ends a description of something that would run a user's code; never leaves this folder."""


def can_be_tried(function: Any) -> bool:
    """Whether a Python function is one of torch's that compute on tensors."""
    return isinstance(function, types.FunctionType) and function.__module__ in _HOMES


def try_function(function: Any, inputs: Inputs) -> Effects | None:
    """The effects of calling a function of torch's; None where no run came to its end."""
    return _union(inputs, function, None, lambda call: _run(function, {}, call))


def try_module(module: torch.nn.Module, inputs: Inputs) -> Effects | None:
    """The effects of calling a module of torch's, state by its path inside the module; None where no run came to its end."""

    def run(call: _Call) -> _Seen:
        state: dict[int, str] = {}
        copies: dict[int, Any] = {}
        copy = _copy(module, "", copies, state)
        kept = {path: dict(vars(inner)) for path, inner in copy.named_modules()}
        found, was_asked = _run(copy, state, call)
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

    return _union(inputs, module.forward, module, run)


def _union(
    inputs: Inputs, function: Any, module: torch.nn.Module | None, run: Callable[[_Call], _Seen]
) -> Effects | None:
    """The effects of the first trial whose variants all come to an end."""
    with _undisturbed():
        for is_exact in (False, True):
            for variants in argument_trials(function, inputs, module):
                found = [_outcomes(run, args, kwargs, is_exact) for args, kwargs in variants]
                if all(found):
                    return joined([effects for outcomes in found for effects in outcomes])
    return None


def _outcomes(run: Callable[[_Call], _Seen], args: Any, kwargs: Any, is_exact: bool) -> list[Effects]:
    """What runs with the same arguments did; none if they failed. A run that is exact may fail because a value is refused."""
    outcomes = []
    for answer in (False, True):
        effects, was_asked = run(_Call(args, kwargs, answer, is_exact))
        if effects is not None:
            outcomes.append(effects)
        elif not is_exact:
            return []
        if not was_asked:
            break
    return outcomes


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Lets a run be seen by nobody else: no mode of a user's, no gradients, no warnings."""
    # Looking for modes to disable costs an import of what they are made of.
    is_alone = not torch._C._len_torch_dispatch_stack()
    others = contextlib.nullcontext() if is_alone else _disable_current_modes()
    with warnings.catch_warnings(), torch._C.DisableTorchFunction(), others, torch.no_grad():
        warnings.simplefilter("ignore")
        yield


# ---- one run ----


class _Watch(TorchDispatchMode):
    """Writes down what operators do to memory that was there before the run."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler to hide the mode from it, which takes a second

    def __init__(self, places: dict[int, Any], answer: bool, is_exact: bool) -> None:
        super().__init__()
        self.findings = Findings()
        self.is_exact = is_exact
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
        findings = Findings()
        operator_of_overload(func).find(findings, args, kwargs, self.memory)
        self.findings.writes |= findings.writes
        self.findings.random |= findings.random
        self.findings.unknown |= findings.unknown
        self.findings.reasons |= findings.reasons
        result = NotImplemented if self.is_exact else _made_up(func, args, kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
        self.alive.append(result)
        if isinstance(result, torch.Tensor) and func._schema.name.endswith(("clone", "_copy")):
            self.copied[_storage(result)] = self.may_share(args)
        return result

    def memory(self, tree: Any) -> Places:
        return frozenset().union(*[self.places.get(_storage(tensor), NO_PLACES) for tensor in _tensors(tree)])

    def may_share(self, tree: Any) -> Places:
        copied = [self.copied.get(_storage(tensor), NO_PLACES) for tensor in _tensors(tree)]
        return self.memory(tree).union(*copied)


def _made_up(func: Any, args: Any, kwargs: Any) -> Any:
    """A result that need not be worked out: the tensor that was written, or new memory of a likely shape.

    Torch works shapes out in Python, for which it imports its compiler, and refuses where they depend on values. For what is
    asked here any shape will do with which the run goes on. NotImplemented where torch must be asked: views, and new tensors.
    """
    schema = func._schema
    if schema.is_mutable:
        parameters = schema_parameters(func)
        bound = {**{parameter.name: value for parameter, value in zip(parameters, args, strict=False)}, **kwargs}
        written = [bound.get(parameter.name) for parameter in parameters if parameter.written]
        return NotImplemented if len(written) != len(schema.returns) else written[0] if len(written) == 1 else written
    tensors = _tensors((args, kwargs))
    is_view = "unsafe_" in schema.name or any(result.alias_info is not None for result in schema.returns)
    if not tensors or is_view or any(str(result.type) != "Tensor" for result in schema.returns):
        return NotImplemented
    if "mm" in schema.name and len(tensors) > 1:
        shape = torch.Size((*tensors[-2].shape[:-1], tensors[-1].shape[-1]))
    elif torch.Tag.pointwise in func.tags:
        shape = _broadcast([tensor.shape for tensor in tensors])
    else:
        shape = tensors[0].shape
    results = [torch.empty(shape, dtype=tensors[0].dtype, device="meta") for _ in schema.returns]
    return results[0] if len(results) == 1 else tuple(results)


def _broadcast(shapes: list[torch.Size]) -> torch.Size:
    # torch.broadcast_shapes imports sympy, which takes most of a second.
    sizes = itertools.zip_longest(*[reversed(shape) for shape in shapes], fillvalue=1)
    return torch.Size([max(column) for column in sizes][::-1])


def _run(function: Any, state: dict[int, str], call: _Call) -> _Seen:
    """Run a call; `state` gives the path of a module's memory by its storage."""
    places: dict[int, Any] = dict(state)
    for tensor in _tensors((call.args, call.kwargs)):
        places[_storage(tensor)] = tensor.torchgraft_place  # type: ignore[attr-defined]
    watch = _Watch(places, call.answer, call.is_exact)
    try:
        with watch:
            result = function(*call.args, **call.kwargs)
        shared = watch.may_share(result)
    except Exception:  # these arguments are not meant, or the result is a tensor of another kind
        return None, watch.was_asked
    findings = watch.findings
    findings.shares |= shared
    if _has_opaque(result):  # the storage of a tensor, say
        findings.shares.update(places.values())
    if result is None:
        findings.write_outside("it returns nothing, so it is called for its effect")
    return findings.effects(), watch.was_asked


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def _has_opaque(tree: Any) -> bool:
    """Whether there is anything that may hold memory besides tensors in containers."""
    return not all(isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in leaves(tree))


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
        raise NotTorchs(f"{cls.__name__} {NOT_TORCHS}")
    attributes = vars(module)
    key: list[Any] = [cls, attributes["training"]]
    for tensors in (attributes["_parameters"], attributes["_buffers"]):
        key += [None if tensor is None else _described(tensor) for tensor in tensors.values()]
    for name, child in attributes["_modules"].items():
        key.append((name, None if child is None else _configuration(child)))
    if has_hooks(module):
        raise NotTorchs(f"{cls.__name__} has hooks, which may do anything")
    for name, value in attributes.items():
        if name not in _OF_EVERY_MODULE:
            kind = type(value)
            key.append((name, kind, value) if kind in _KEYS else (name, _attribute(name, value)))
    return tuple(key)


def _described(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, UninitializedTensorMixin):
        raise NotTorchs("its parameters are made when it is called first")
    return tensor.shape, tensor.dtype


def _attribute(name: str, value: Any) -> Any:
    """The part of a key that an attribute gives: itself if it is plain, what matters of it, or its class."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return _described(value)
    if isinstance(value, (list, tuple)):
        return tuple([_attribute(name, item) for item in value])
    if callable(value) and not isinstance(value, (type, weakref.ref)):
        if not _is_torchs(value):
            raise NotTorchs(f"its attribute '{name}' {NOT_TORCHS}")
        return value if isinstance(value, types.FunctionType | types.BuiltinFunctionType) else type(value)
    return type(value)


def _is_torchs(function: Any) -> bool:
    """Whether a function, or a callable object, is code of torch's."""
    home = getattr(function, "__module__", None) or type(function).__module__
    return home.partition(".")[0] == "torch"
