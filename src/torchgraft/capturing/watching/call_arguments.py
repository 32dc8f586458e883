"""The arguments of a call in a watched run: as arguments of a node, and as what torch is given, where symbolic numbers, modes and
dtypes are plain. Which node a value is, is known in `values.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from torchgraft.capturing.flowing.dtypes import FlowingDtype
from torchgraft.capturing.flowing.sizes import unwrapped
from torchgraft.capturing.patching.module_patches import TrainingFlag
from torchgraft.capturing.tracer_base import UNCHANGED_TYPES
from torchgraft.capturing.watching.parts import concrete
from torchgraft.capturing.watching.reads import KeepWhole, at_line
from torchgraft.capturing.watching.tensors import version_of, versions_in
from torchgraft.capturing.watching.values import MARK, Values
from torchgraft.errors import TraceError
from torchgraft.ir.arguments import EMPTY_DICT
from torchgraft.ir.node import Node

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_SIMPLE = UNCHANGED_TYPES - {torch.device}


class CallArguments(Values):
    """The part of a watcher that takes in what a call is given."""

    def _simple(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, Any] | None, dict[int, int]]:
        """What `_lowered` and `versions_in` say of the arguments of most calls: tensors and plain values."""
        given: dict[int, int] = {}
        positional: list[Any] = []
        try:
            for value in args:
                kind = type(value)
                if kind is _Tensor or kind is _Parameter:
                    given[id(value)] = value._version
                    mark = value.__dict__.get(MARK)
                    is_usual = mark is not None and mark[0] is self and type(mark[1]) is Node
                    positional.append(mark[1] if is_usual else self.node_of(value))
                elif kind in _SIMPLE:
                    positional.append(value)
                else:
                    return None, given
            if not kwargs:
                return (tuple(positional), EMPTY_DICT), given
            named: dict[str, Any] = {}
            for name, value in kwargs.items():
                kind = type(value)
                if kind is _Tensor or kind is _Parameter:
                    given[id(value)] = value._version
                    named[name] = self.node_of(value)
                elif kind in _SIMPLE:
                    named[name] = value
                else:
                    return None, given
        except RuntimeError:  # made in inference mode, where nobody counts versions
            return None, given
        return (tuple(positional), named), given

    def _taken(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[int, int]) -> tuple[Any, Any, Any]:
        """The arguments of a call as arguments of a node, and as what torch is given; `given` takes the versions of tensors."""
        lowered: list[Any] = []
        plain: list[Any] = []
        try:
            for value in args:
                if type(value) in _SIMPLE:
                    lowered.append(value)
                    plain.append(value)
                else:
                    argument, value = self._taken_part(value, given)
                    lowered.append(argument)
                    plain.append(value)
            named = {name: self._taken_part(value, given) for name, value in kwargs.items()} if kwargs else {}
        except (TypeError, ValueError, TraceError, AttributeError) as error:
            raise KeepWhole(self._modules[-1], f"{error}{at_line()}") from error
        if not named:
            return (tuple(lowered), EMPTY_DICT), tuple(plain), EMPTY_DICT
        lowered_names = {name: pair[0] for name, pair in named.items()}
        return (tuple(lowered), lowered_names), tuple(plain), {name: pair[1] for name, pair in named.items()}

    def _taken_part(self, value: Any, given: dict[int, int]) -> tuple[Any, Any]:
        """In one walk what `create_arg`, `concrete` and `versions_in` say."""
        kind = type(value)
        if kind in _SIMPLE:
            return value, value
        if kind is _Tensor or kind is _Parameter:
            given[id(value)] = version_of(value)
            return self.node_of(value), value
        if kind is slice:
            if type(value.start) in _SIMPLE and type(value.stop) in _SIMPLE and type(value.step) in _SIMPLE:
                return value, value
            ends = [self._taken_part(end, given) for end in (value.start, value.stop, value.step)]
            return slice(*[end[0] for end in ends]), slice(*[end[1] for end in ends])
        if kind is tuple or (kind is list and id(value) not in self._outside):
            pairs = [self._taken_part(item, given) for item in value]
            return kind([pair[0] for pair in pairs]), kind([pair[1] for pair in pairs])
        number = unwrapped(value)
        if number is not None:
            return number.argument(), number.value
        if kind is TrainingFlag or kind is FlowingDtype:
            return value.__fx_create_arg__(self), concrete(value)
        given.update(versions_in(((value,), {})))
        return self.create_arg(value), concrete(value)

    def _lowered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments of a call as arguments of a node."""
        try:
            return self.create_arg(tuple(args)), self.create_arg(dict(kwargs)) if kwargs else {}
        except (TypeError, ValueError, TraceError, AttributeError) as error:
            raise KeepWhole(self._modules[-1], f"{error}{at_line()}") from error
