"""The example inputs of a watched run: a placeholder for each parameter of the model, copies that the run may write into, and
what the program has to check of its inputs. What happens to the copies during the run is in `watcher.py`.
"""

from __future__ import annotations

import copy
import enum
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.capturing.tracer_base import UNCHANGED_TYPES
from torchgraft.capturing.watching.reruns import KeepWhole
from torchgraft.capturing.watching.signatures import bind, default_of, is_spelled, placeholders
from torchgraft.ir.arguments import rebuild_tuple
from torchgraft.ir.guards import are_different, check_inputs, check_value
from torchgraft.ir.input_kinds import object_kind, parts_of, stands_in, tensor_attributes
from torchgraft.ir.node import Node
from torchgraft.ir.structures import attributes_of, has_attributes, remade, set_attributes

if TYPE_CHECKING:
    from torchgraft.capturing.watching.watcher import Watcher

MakeNode = Callable[[], Node]
_Parameter = torch.nn.Parameter
_MISSING = object()
# Objects that are handed to the model as they are.
_OPAQUE = (torch.nn.Module, type, torch.Generator, enum.Enum)


class ExampleInputs:
    """The inputs of one watched run."""

    def __init__(
        self, watcher: Watcher, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._watcher = watcher
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor, MakeNode, str]] = {}
        # Containers and objects that were seen, with what the run gets and what is expected once that is known.
        self._objects: dict[int, tuple[Any, tuple[Any, Any] | None, MakeNode, str]] = {}
        self._same: list[tuple[str, MakeNode, MakeNode]] = []
        # Values that no description can spell (a function, a module), which are kept with the program and compared with.
        self._kept: list[tuple[str, MakeNode, Any]] = []
        # The tensors among the inputs, each once.
        self._tensors: list[MakeNode] = []
        self.bound = bind(function, args, kwargs)
        self._positional = len(args)
        self.nodes = placeholders(watcher.graph, self.bound)
        self._where = f"the inputs of {getattr(function, '__qualname__', type(function).__name__)}"
        expected = {}
        for name, node in self.nodes.items():
            if name in self.bound.arguments:
                value, expected[name] = self._take_in(self.bound.arguments[name], lambda node=node: node, name)  # type: ignore[misc]
                self.bound.arguments[name] = value
            else:
                default = default_of(self.bound.signature.parameters[name])
                expected[name] = self._fixed(default, lambda node=node: node, name)  # type: ignore[misc]
        self._check(expected)

    def _check(self, expected: dict[str, Any]) -> None:
        watcher = self._watcher
        if not expected or watcher.is_plain:
            return
        found = dict(self.nodes.items())
        self._checked = watcher.create_node("call_function", check_inputs, (found, expected, self._where), {})
        self._checked._origin = None  # no line of the model, but the one that called capture
        for path, make, value in self._kept:
            arguments = (make(), watcher.values.constant("_input", value), f"the argument '{path}'", self._where)
            self._checked = watcher.create_node("call_function", check_value, arguments, {})
            self._checked._origin = None
        for question, make_first, make_second in self._same:
            same = watcher.create_node("call_function", operator.is_, (make_first(), make_second()), {})
            watcher.guards.value(same, True, question)

    def call(self, function: Callable[..., Any]) -> Any:
        """Call the model as it was called: decorators may tell what is given by name from what is not."""
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for name, value in self.bound.arguments.items():
            kind = self.bound.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                positional += value
            elif kind is inspect.Parameter.VAR_KEYWORD:
                named |= value
            elif kind is inspect.Parameter.POSITIONAL_ONLY or len(positional) < self._positional:
                positional.append(value)
            else:
                named[name] = value
        return function(*positional, **named)

    def guard_identities(self, where: str) -> None:
        """Have the program check that no two inputs are one tensor: the model may ask for that (`query is key`).

        Before anything else: later, what was given in a list may have been replaced, and buffers may have been written.
        """
        if len(self._tensors) < 2:
            return
        graph, place = self._watcher.graph, self._checked
        nodes = [make() for make in self._tensors]
        for read in sorted(_made_of(nodes)):
            place.append(read)
            place = read
        with graph.inserting_after(place):
            answer = graph.create_node("call_function", are_different, tuple(nodes))
        with graph.inserting_after(answer):
            graph.create_node("call_function", check_value, (answer, True, "no two inputs being one tensor", where))

    def _take_in(self, value: Any, make: MakeNode, path: str) -> tuple[Any, Any]:
        """What the run gets for an input, and what is expected of it; see `check_inputs`."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, make, path)
        if type(value) in (int, float):
            return self._number(value, make, path)
        if type(value) in UNCHANGED_TYPES or isinstance(value, _OPAQUE):
            return value, self._fixed(value, make, path)
        if isinstance(value, (tuple, list, dict)) or (has_attributes(value) and not callable(value)):
            return self._parts(value, make, path)
        is_open = type(value).__hash__ is None or isinstance(value, Mapping)
        if is_open and not (isinstance(value, set) and all(map(is_spelled, value))):
            raise KeepWhole(None, f"the input {path} is a {type(value).__name__}, which cannot be looked into")
        return value, self._fixed(value, make, path)

    def _fixed(self, value: Any, make: MakeNode, path: str) -> Any:
        """The description of an input that must have this value."""
        if type(value) is str:
            return "=", value
        if type(value) in UNCHANGED_TYPES:
            return value
        if type(value) in (tuple, list):
            parts = [
                self._fixed(part, self._watcher.values.part(make, key), f"{path}[{key}]")
                for key, part in enumerate(value)
            ]
            return type(value).__name__, *parts
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return {
                key: self._fixed(part, self._watcher.values.part(make, key), f"{path}[{key!r}]")
                for key, part in value.items()
            }
        self._kept.append((path, make, value))
        return "any"

    def _tensor(self, value: torch.Tensor, make: MakeNode, path: str) -> tuple[torch.Tensor, Any]:
        known = self._copies.get(id(value))
        if known is not None:
            self._same.append((f"({path} is {known[3]})", known[2], make))
            return known[1], "tensor"
        copied = _copied(value)
        self._copies[id(value)] = (value, copied, make, path)
        self._tensors.append(make)
        self._watcher.values.add_input(copied, make)
        expected: dict[str, Any] = {}
        for name, part in tensor_attributes(value).items():
            make_part = self._watcher.values.part(make, name, by_attribute=True)
            copied.__dict__[name], expected[name] = self._take_in(part, make_part, f"{path}.{name}")
        is_usual = type(value) is torch.Tensor or stands_in(type(value))
        return copied, "tensor" if is_usual and not expected else object_kind(type(value), expected)

    def _number(self, value: Any, make: MakeNode, path: str) -> tuple[Any, Any]:
        if not self._watcher.flow.sizes_are_symbolic:
            return value, value
        return self._watcher.flow.symbol(value, make, path), type(value).__name__

    def _parts(self, value: Any, make: MakeNode, path: str) -> tuple[Any, Any]:
        by_attribute = not isinstance(value, (tuple, list, dict))
        known = self._objects.get(id(value))
        if known is not None:
            if known[1] is None:
                raise KeepWhole(None, f"the input {path} refers to itself")
            self._same.append((f"({path} is {known[3]})", known[2], make))
            return known[1]
        if not by_attribute and (name := _beside_items(value)):
            raise KeepWhole(
                None, f"the input {path} is a {type(value).__name__} that has the attribute {name} beside its items"
            )
        if not isinstance(value, tuple):
            self._objects[id(value)] = (value, None, make, path)
        new: dict[Any, Any] = {}
        expected: dict[Any, Any] = {}
        for key, part in parts_of(value).items():
            make_part = self._watcher.values.part(make, key, by_attribute)
            new[key], expected[key] = self._take_in(
                part, make_part, f"{path}.{key}" if by_attribute else f"{path}[{key!r}]"
            )
        result = rebuilt(value, new)
        self._watcher.values.add_object(result, make)
        template: Any = (type(value).__name__, *expected.values())
        if type(value) is dict and all(isinstance(key, str) for key in expected):
            template = expected
        elif type(value) not in (tuple, list):
            if not all(map(is_spelled, expected)):
                raise KeepWhole(None, f"the input {path} has keys that code cannot spell")
            template = object_kind(type(value), expected)
        if not isinstance(value, tuple):
            self._objects[id(value)] = (value, (result, template), make, path)
        return result, template


def _made_of(nodes: Iterable[Node]) -> set[Node]:
    """The nodes that fetch parts of inputs, and those that they fetch them of."""
    found: set[Node] = set()
    pending = [node for node in nodes if node.op != "placeholder"]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [source for source in node.all_input_nodes if source.op != "placeholder"]
    return found


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same values and layout, which a run may write into."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            return tensor.clone()
    if type(tensor) is _Parameter:
        return _Parameter(tensor.detach().clone(), tensor.requires_grad)
    if not tensor.requires_grad:
        return tensor.detach().clone()
    if tensor.is_leaf:
        return tensor.detach().clone().requires_grad_()
    with torch.enable_grad():  # what was computed may be written into, which a leaf may not
        return tensor.detach().requires_grad_().clone()


def copied_input(value: Any, copies: dict[int, Any]) -> Any:
    """An input with copies of the tensors in it; `copies` keeps one tensor given twice one."""
    if isinstance(value, torch.Tensor):
        if id(value) not in copies:
            copies[id(value)] = _copied(value)
            copies[id(value)].__dict__.update(tensor_attributes(value))
        return copies[id(value)]
    if type(value) in UNCHANGED_TYPES or isinstance(value, _OPAQUE):
        return value
    if isinstance(value, (tuple, list, dict)) or (has_attributes(value) and not callable(value)):
        return rebuilt(value, {key: copied_input(part, copies) for key, part in parts_of(value).items()})
    return value


def rebuilt(value: Any, parts: dict[Any, Any]) -> Any:
    """An object like `value` with other parts: items of a container, attributes of an object."""
    if type(value) in (tuple, list):
        return type(value)(parts.values())
    if type(value) is dict:
        return parts
    if isinstance(value, tuple):
        return rebuild_tuple(value, list(parts.values()))
    if isinstance(value, (list, dict)):
        result = remade(value, parts if isinstance(value, dict) else list(parts.values()))
        set_attributes(result, {name: parts[name] for name in _mirrored(value)})
        return result
    result = copy.copy(value)
    set_attributes(result, parts)
    return result


def _mirrored(value: Any) -> list[str]:
    """The attributes of a dict that are its items, too; transformers' results have them."""
    return [
        name
        for name, item in attributes_of(value).items()
        if isinstance(value, dict) and value.get(name, _MISSING) is item
    ]


def _beside_items(value: Any) -> str | None:
    """The first attribute of a container that says something which its items do not."""
    attributes = attributes_of(value) if type(value) not in (tuple, list, dict) else {}
    mirrored = _mirrored(value) if attributes else []
    return next((name for name, item in attributes.items() if item is not None and name not in mirrored), None)
