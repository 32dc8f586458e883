"""Which node each value of a watched run is: tensors, objects, and their parts. What is asked of a tensor is answered in
`reads.py`; how values are written as arguments is in `arguments.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.capturing.tracer_base import UNCHANGED_TYPES
from torchgraft.capturing.watching.flow import Flow
from torchgraft.capturing.watching.parts import parts_now, same_parts, with_parts
from torchgraft.capturing.watching.tensors import version_of
from torchgraft.ir.arguments import rebuild_tuple
from torchgraft.ir.modules import names_of_tensors
from torchgraft.ir.node import Node

if TYPE_CHECKING:
    from torchgraft.capturing.watching.watcher import Watcher

# The attribute of a tensor that says whose node it is the value of: a pair of a run's `Values` and the node.
MARK = "_torchgraft_value"
MakeNode = Callable[[], Node]


class Objects:
    """Containers and objects that are values of nodes, each with what was in it when it became one."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, dict[Any, Any]]] = {}

    def add(self, value: Any) -> None:
        """Say that an object of the run is the value of a node."""
        self._known[id(value)] = (value, dict(parts_now(value)))

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._known

    def writable(self) -> list[Any]:
        """Those that could be written into."""
        return [value for value, _ in self._known.values() if not isinstance(value, tuple)]

    def changed(self) -> list[tuple[Any, dict[Any, Any], dict[Any, Any]]]:
        """Those that were changed since, with what was in them then and is now."""
        found = [(value, before, parts_now(value)) for value, before in self._known.values()]
        return [entry for entry in found if list(entry[1]) != list(entry[2]) or not same_parts(entry[2], entry[1])]


class Values:
    """Knows the nodes of the values of one run."""

    def __init__(self, watcher: Watcher, flow: Flow) -> None:
        self._watcher, self._flow, self._guards = watcher, flow, flow.guards
        # The paths of the model's parameters and buffers, and once they were looked for, of other tensors in its attributes.
        self.names = names_of_tensors(watcher.paths)
        self._found_attributes = False
        # What came from outside the run, by identity: the object itself (so that the identity stays its own) and its node.
        self.outside: dict[int, tuple[Any, Node | MakeNode]] = {}
        self.objects = Objects()
        self._inputs: set[int] = set()
        self._constants: dict[int, tuple[Any, Node]] = {}

    # ---- the node of a value ----

    def node_of(self, tensor: torch.Tensor) -> Node:
        """The node whose value a tensor is."""
        mark = tensor.__dict__.get(MARK)
        if mark is not None and mark[0] is self:
            node = mark[1]
            if type(node) is not Node:
                node = node()
                tensor.__dict__[MARK] = (self, node)
            return node
        return self.outside_node(tensor) or self._watcher.unwatched(self._fetch, tensor)

    def outside_node(self, value: Any) -> Node | None:
        """The node of something that came from outside the run, or was added by name."""
        known = self.outside.get(id(value))
        if known is None:
            return None
        node = known[1]
        if type(node) is not Node:
            node = node()  # type: ignore[operator]
            self.outside[id(value)] = (known[0], node)
        return node

    def _fetch(self, tensor: torch.Tensor) -> Node:
        """The node of a tensor that no call of this run has made."""
        name = self.attribute_name(tensor)
        if name is not None:
            node = self._watcher.create_node("get_attr", name, (), {})
        elif tensor.grad_fn is not None or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise self._watcher.refusal("a tensor was made in a way that cannot be watched")
        else:
            node = self.constant("_tensor_constant", tensor)
            self._watcher.state.tensors.know(tensor)
        self.outside[id(tensor)] = (tensor, node)
        return node

    def attribute_name(self, value: Any) -> str | None:
        """The path of a parameter, a buffer, or (looked for when first needed) a plain attribute of the model."""
        name = self.names.get(id(value))
        if name is None and not self._found_attributes:
            self._found_attributes = True
            self._watcher.unwatched(self._find_attributes)
            name = self.names.get(id(value))
        return name

    def _find_attributes(self) -> None:
        for module, path in self._watcher.paths.items():
            for key, item in vars(module).items():
                is_tensor = isinstance(item, torch.Tensor)
                is_of_run = is_tensor and MARK in item.__dict__  # written just now
                if (is_tensor or isinstance(item, torch.Generator)) and key.isidentifier() and not is_of_run:
                    self.names.setdefault(id(item), f"{path}.{key}" if path else key)
                    if is_tensor:
                        self._watcher.state.tensors.know(item)

    def constant(self, prefix: str, value: Any) -> Node:
        """A node that fetches a value kept with the program."""
        known = self._constants.get(id(value))
        if known is None:
            constants, root = self._watcher.graph._constants, self._watcher.root
            number = len(constants)
            while f"{prefix}{number}" in constants or hasattr(root, f"{prefix}{number}"):
                number += 1
            constants[f"{prefix}{number}"] = value
            node = self._watcher.create_node("get_attr", f"{prefix}{number}", (), {})
            known = self._constants[id(value)] = (value, node)
        return known[1]

    def part(self, node: Node | MakeNode, key: Any, by_attribute: bool = False) -> MakeNode:
        """What makes the node of a part of a value: an item, or an attribute."""
        made: list[Node] = []

        def make() -> Node:
            if not made or made[0]._erased:
                whole = node if isinstance(node, Node) else node()
                function = getattr if by_attribute else operator.getitem
                made[:] = [self._watcher.create_node("call_function", function, (whole, key), {})]
            return made[0]

        return make

    # ---- inputs ----

    def add_input(self, tensor: torch.Tensor, node: Node | MakeNode) -> None:
        """Say that a tensor is (part of) an input of the model."""
        self.outside[id(tensor)] = (tensor, node)
        self._inputs.add(id(tensor))

    def add_object(self, value: Any, node: Node | MakeNode) -> None:
        """Say that an object of the run is the value of a node."""
        self.outside[id(value)] = (value, node)
        self.objects.add(value)

    def is_input(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is (part of) an input of the model."""
        return id(tensor) in self._inputs

    def guard_class(self, tensor: torch.Tensor) -> None:
        """Have the program check whether an input is a parameter, because the model asks."""
        if id(tensor) in self._inputs and not self._guards.is_plain:
            self._guards.class_of(self.node_of(tensor), tensor)

    def is_made(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was made by a call of this run."""
        mark = tensor.__dict__.get(MARK)
        return mark is not None and mark[0] is self

    def is_static(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the same size in every run: parameters, buffers and constants."""
        return not self.is_made(tensor) and id(tensor) not in self._inputs

    # ---- results ----

    def register(self, result: Any, node: Node | MakeNode, given: dict[int, int]) -> Any:
        """Note that a result is the value of a node; containers are taken apart when a part is used.

        `given` has the version of every tensor the call received. A call that hands one of them through unchanged is not
        the same as no call (dropout in evaluation mode), so its result gets an identity of its own.
        """
        if isinstance(result, torch.Tensor):
            address = id(result)
            if address in given and given[address] == version_of(result):
                result = self._watcher.unwatched(result.view_as, result)  # a fake tensor sets attributes on the way
                address = id(result)
            if address in self.outside:
                self.outside[address] = (result, node)
            else:
                result.__dict__[MARK] = (self, node)
            return result
        if isinstance(result, (tuple, list)):
            items = [self.register(item, self.part(node, index), given) for index, item in enumerate(result)]
            if all(new is old for new, old in zip(items, result, strict=True)):
                return result
            return rebuild_tuple(result, items) if isinstance(result, tuple) else type(result)(items)
        if isinstance(result, dict):
            for key, item in result.items():
                new = self.register(item, self.part(node, key), given)
                if new is not item:
                    result[key] = new
        return result

    def register_anything(self, result: Any, node: Node | MakeNode, given: dict[int, int], what: str) -> Any:
        """The same for what a leaf returned, which may hold numbers and objects: numbers flow on, plain values are checked."""
        if isinstance(result, torch.Tensor):
            return self.register(result, node, given)
        make = node if not isinstance(node, Node) else lambda: node
        if type(result) in (int, float) and self._flow.sizes_are_symbolic:
            return self._flow.symbol(result, make, f"the result of {what}")
        if type(result) is torch.dtype and self._flow.dtypes_flow:
            return self._flow.new_dtype(make(), result)
        is_plain = self._guards.is_plain
        if result is None or type(result) in UNCHANGED_TYPES:
            if result is not None and not is_plain:
                self._guards.value(make(), result, f"the result of {what}")
            return result
        is_container = isinstance(result, (tuple, list, dict))
        if not is_plain:
            self._guards.container(result, make, what)
        parts = result if isinstance(result, dict) else dict(enumerate(result)) if is_container else parts_now(result)
        new = {
            key: self.register_anything(item, self.part(node, key, not is_container), given, what)
            for key, item in parts.items()
        }
        if any(new[key] is not item for key, item in parts.items()):
            result = with_parts(result, new)
        self.add_object(result, make)
        return result
