"""The arguments of a call in a watched run: as arguments of a node, and as what torch is given, where symbolic numbers, modes and
dtypes are plain. Which node a value is, is known in `values.py`.
"""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.capturing.flowing.dtypes import FlowingDtype
from torchgraft.capturing.flowing.sizes import unwrapped
from torchgraft.capturing.patching.module_patches import TrainingFlag
from torchgraft.capturing.tracer_base import UNCHANGED_TYPES
from torchgraft.capturing.watching.parts import closed_over, concrete
from torchgraft.capturing.watching.tensors import version_of, versions_in
from torchgraft.capturing.watching.values import MARK, Values
from torchgraft.errors import TraceError
from torchgraft.ir.arguments import EMPTY_DICT
from torchgraft.ir.node import Node
from torchgraft.ir.origin import is_user_code
from torchgraft.ir.structures import Template, attributes_of, has_attributes, put_together, take_apart

if TYPE_CHECKING:
    from torchgraft.capturing.watching.watcher import Watcher

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_SIMPLE = UNCHANGED_TYPES - {torch.device}


class Arguments:
    """Takes in what a call is given."""

    def __init__(self, watcher: Watcher, values: Values) -> None:
        self._watcher, self._values = watcher, values

    def simple(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, Any] | None, dict[int, int]]:
        """What `lowered` and `versions_in` say of the arguments of most calls: tensors and plain values."""
        given: dict[int, int] = {}
        positional: list[Any] = []
        values = self._values
        try:
            for value in args:
                kind = type(value)
                if kind is _Tensor or kind is _Parameter:
                    given[id(value)] = value._version
                    mark = value.__dict__.get(MARK)
                    is_usual = mark is not None and mark[0] is values and type(mark[1]) is Node
                    positional.append(mark[1] if is_usual else values.node_of(value))
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
                    named[name] = values.node_of(value)
                elif kind in _SIMPLE:
                    named[name] = value
                else:
                    return None, given
        except RuntimeError:  # made in inference mode, where nobody counts versions
            return None, given
        return (tuple(positional), named), given

    def taken(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[int, int]) -> tuple[Any, Any, Any]:
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
            raise self._watcher.refusal(str(error)) from error
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
            return self._values.node_of(value), value
        if kind is slice:
            if type(value.start) in _SIMPLE and type(value.stop) in _SIMPLE and type(value.step) in _SIMPLE:
                return value, value
            ends = [self._taken_part(end, given) for end in (value.start, value.stop, value.step)]
            return slice(*[end[0] for end in ends]), slice(*[end[1] for end in ends])
        if kind is tuple or (kind is list and id(value) not in self._values.outside):
            pairs = [self._taken_part(item, given) for item in value]
            return kind([pair[0] for pair in pairs]), kind([pair[1] for pair in pairs])
        number = unwrapped(value)
        if number is not None:
            return number.argument(), number.value
        if kind is TrainingFlag or kind is FlowingDtype:
            return value.__fx_create_arg__(self._watcher), concrete(value)
        given.update(versions_in(((value,), {})))
        return self._watcher.create_arg(value), concrete(value)

    def lowered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments of a call as arguments of a node."""
        create = self._watcher.create_arg
        try:
            return create(tuple(args)), create(dict(kwargs)) if kwargs else {}
        except (TypeError, ValueError, TraceError, AttributeError) as error:
            raise self._watcher.refusal(str(error)) from error

    # ---- objects that code cannot spell ----

    def opaque(self, a: Any) -> Node:
        """The node of an object that code cannot spell."""
        watcher = self._watcher
        if isinstance(a, torch.Generator):
            name = self._values.attribute_name(a)
            if name is not None:
                return watcher.create_node("get_attr", name, (), {})
        template, parts = take_apart(a, is_of_run)
        if parts and not callable(a):
            constant = self._values.constant("_template", Template(template))
            arguments = (constant, *[watcher.create_arg(part) for part in parts])
            return watcher.create_node("call_function", put_together, arguments, {})
        is_state = type(a).__module__ == "numpy" or isinstance(a, torch.Generator)
        if parts or is_state or self.closes_over(a):
            raise watcher.refusal(f"a {type(a).__name__} made on the way cannot be written down")
        return self._values.constant("_object_constant", a)

    def closes_over(self, function: Any) -> bool:
        """Whether a callable has values of this run with it: in its closure, its defaults, its attributes, or what it is bound
        to."""
        if isinstance(function, MethodType):
            return not isinstance(function.__self__, torch.nn.Module) or function.__self__ not in self._watcher.paths
        if isinstance(function, FunctionType):
            if "<locals>" in function.__qualname__ and is_user_code(function.__code__):
                return True  # made by this run, and a program with it could not be pickled
            held = [*closed_over(function).values(), *(function.__defaults__ or ())]
        else:
            held = [*getattr(function, "args", ()), *(getattr(function, "keywords", None) or {}).values()]
            if not isinstance(function, (torch.nn.Module, type)) and has_attributes(function):
                held += attributes_of(function).values()
        return any(take_apart(value, is_of_run)[1] or isinstance(value, list) for value in held) or any(
            self.closes_over(value) for value in held if isinstance(value, FunctionType)
        )


def is_of_run(value: Any) -> bool:
    """Whether a value was computed by a run."""
    return isinstance(value, torch.Tensor) or unwrapped(value) is not None or type(value) is FlowingDtype
