"""The parameters of a model: example inputs by their names, a placeholder for each, and inputs that cannot be taken at all.
What a run is given for the inputs, and what is checked of them, is in `example.py`.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from torchgraft.capturing.tracer_base import UNCHANGED_TYPES
from torchgraft.errors import TraceError
from torchgraft.ir.input_kinds import parts_of
from torchgraft.ir.node import Node

_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def bind(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """The arguments of a call by the names of the model's parameters."""
    target = function.forward if isinstance(function, torch.nn.Module) and not _has_own_call(function) else function
    try:
        signature = inspect.signature(target)
    except ValueError:  # a function written in C
        names = [
            inspect.Parameter(f"input_{index + 1}", inspect.Parameter.POSITIONAL_ONLY) for index in range(len(args))
        ]
        names += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs]
        signature = inspect.Signature(names)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"the example inputs do not fit {getattr(target, '__qualname__', target)}{signature}: {error}"
        ) from None
    return bound


def default_of(parameter: inspect.Parameter) -> Any:
    """What a parameter is that was not given. The run does not get it either: decorators may tell the difference."""
    empty: dict[Any, Any] = {inspect.Parameter.VAR_POSITIONAL: (), inspect.Parameter.VAR_KEYWORD: {}}
    return empty.get(parameter.kind, parameter.default)


def _has_own_call(module: torch.nn.Module) -> bool:
    """Whether a module's class says by a `__call__` of its own what it takes."""
    call = type(module).__call__
    if call is torch.nn.Module.__call__:
        return False
    return any(item.kind not in _STARS for item in list(inspect.signature(call).parameters.values())[1:])


def refuse_iterators(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if an input can be read only once: then capturing would take it away."""
    if not any(map(_has_iterator, (*args, *kwargs.values()))):
        return
    with contextlib.suppress(TypeError):  # inputs that do not fit; the model itself will say so
        for name, value in bind(function, args, kwargs).arguments.items():
            _refuse_iterators(value, name)


def _has_iterator(value: Any) -> bool:
    if isinstance(value, (tuple, list, dict)):
        return any(map(_has_iterator, parts_of(value).values()))
    return hasattr(type(value), "__next__")


def _refuse_iterators(value: Any, path: str) -> None:
    if isinstance(value, (tuple, list, dict)):
        for key, part in parts_of(value).items():
            _refuse_iterators(part, f"{path}[{key!r}]")
    elif hasattr(type(value), "__next__"):
        raise TraceError(
            f"cannot capture with a {type(value).__name__} as the input '{path}': running the model would take from it, and that "
            "cannot be undone; give a list"
        )


def placeholders(graph: Any, bound: inspect.BoundArguments) -> dict[str, Node]:
    """A placeholder for each parameter; one with a default that code cannot spell is left to the model."""
    nodes = {}
    for name, parameter in bound.signature.parameters.items():
        stars = _STARS.get(parameter.kind, "")
        if stars or parameter.default is inspect.Parameter.empty:
            nodes[name] = graph.placeholder(stars + name)
        elif is_spelled(parameter.default):
            nodes[name] = graph.placeholder(name, default_value=parameter.default)
        elif name in bound.arguments:
            raise TraceError(
                f"cannot capture a model whose parameter '{name}' has the default {parameter.default!r}, which code cannot "
                "spell, and a value; wrap the model in a function that gives the value"
            )
    return nodes


def is_spelled(value: Any) -> bool:
    """Whether a default in the code of a program, its copies and its pickles included, is what it was in the model."""
    if type(value) in (tuple, list, dict):
        return all(map(is_spelled, parts_of(value).values()))
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return value.__name__ != "<lambda>"
    return type(value) in UNCHANGED_TYPES or isinstance(value, (enum.Enum, type, range, slice, frozenset))
