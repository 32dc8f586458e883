"""Which node each value of a watched run is: tensors, objects, numbers and their parts, and how they are written as arguments.
What is asked of a tensor is answered in `reads.py`; what the run calls is written down in `watcher.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from torchgraft.capturing.flowing.dtypes import FlowingDtype
from torchgraft.capturing.flowing.sizes import SymbolicNumber, unwrapped, wrapped
from torchgraft.capturing.patching.active import active
from torchgraft.capturing.state.model_state import ModelState
from torchgraft.capturing.tracer_base import UNCHANGED_TYPES
from torchgraft.capturing.watching.parts import closed_over, parts_now, same_parts, with_parts
from torchgraft.capturing.watching.reads import KeepWhole, Reads, at_line
from torchgraft.capturing.watching.tensors import version_of
from torchgraft.ir.arguments import rebuild_tuple
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import check_length
from torchgraft.ir.modules import names_of_tensors
from torchgraft.ir.names import wish_of
from torchgraft.ir.node import Argument, Node
from torchgraft.ir.origin import current_source_line, is_user_code, user_instruction
from torchgraft.ir.structures import Template, attributes_of, has_attributes, put_together, take_apart

# The attribute of a tensor that says whose node it is the value of.
MARK = "_torchgraft_value"
MakeNode = Callable[[], Node]


class Values(Reads):
    """The part of a watcher that knows the nodes of values."""

    def __init__(self, root: torch.nn.Module, state: ModelState, sizes_are_symbolic: bool) -> None:
        super().__init__()
        self.state = state
        paths = state.paths
        self.graph = Graph()
        self.root = root
        self.paths = paths
        self.sizes_are_symbolic = sizes_are_symbolic
        self._names = names_of_tensors(paths)
        self._switching = False
        # The user's instruction that is running, while that is known: looking for it takes longer than making a node.
        self._instruction: tuple[CodeType | None, int] | None = None
        self._modules: list[torch.nn.Module] = [root]
        # What came from outside the run, by identity: the object itself (so that the identity stays its own) and its node.
        self._outside: dict[int, tuple[Any, Node | MakeNode]] = {}
        # Objects among them, with what was in them.
        self._objects: dict[int, tuple[Any, dict[Any, Any]]] = {}
        self._inputs: set[int] = set()
        self._found_attributes = False
        self._constants: dict[int, tuple[Any, Node]] = {}
        # Tensors made by this run onto which somebody wrote an attribute, by identity.
        self.with_attributes: dict[int, torch.Tensor] = {}
        # The nodes of calls, in order; all others fetch, compute numbers, or check.
        self.calls: list[Node] = []

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None, type_expr: Any = None
    ) -> Node:
        """Put a node in the graph."""
        graph = self.graph
        node = graph._make_node(kind, target, args, kwargs, name or wish_of(target), type_expr)
        node._origin = (*(self._instruction or user_instruction(2)), self._scope_chain)
        if target is enter_context or target is exit_context:
            self.calls.append(node)
        return node

    def create_call(self, kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None) -> Node:
        """Put the node of a call in the graph, which every run of the model has to make."""
        node = self.create_node(kind, target, args, kwargs, name)
        self.calls.append(node)
        return node

    # ---- tensors, objects and their nodes ----

    def node_of(self, tensor: torch.Tensor) -> Node:
        mark = tensor.__dict__.get(MARK)
        if mark is not None and mark[0] is self:
            node = mark[1]
            if type(node) is not Node:
                node = node()
                tensor.__dict__[MARK] = (self, node)
            return node
        return self._outside_node(tensor) or self.unwatched(self._fetch, tensor)

    def _outside_node(self, value: Any) -> Node | None:
        known = self._outside.get(id(value))
        if known is None:
            return None
        node = known[1]
        if type(node) is not Node:
            node = node()  # type: ignore[operator]
            self._outside[id(value)] = (known[0], node)
        return node

    def _fetch(self, tensor: torch.Tensor) -> Node:
        """The node of a tensor that no call of this run has made."""
        name = self._attribute_name(tensor)
        if name is not None:
            node = self.create_node("get_attr", name, (), {})
        elif tensor.grad_fn is not None or _is_wrapped(tensor):
            raise KeepWhole(self._modules[-1], f"a tensor was made in a way that cannot be watched{at_line()}")
        else:
            node = self.constant("_tensor_constant", tensor)
            self.state.tensors.know(tensor)
        self._outside[id(tensor)] = (tensor, node)
        return node

    def _attribute_name(self, value: Any) -> str | None:
        """The path of a parameter, a buffer, or (looked for when first needed) a plain attribute of the model."""
        name = self._names.get(id(value))
        if name is None and not self._found_attributes:
            self._found_attributes = True
            for module, path in self.paths.items():
                for key, item in vars(module).items():
                    is_of_run = isinstance(item, torch.Tensor) and MARK in item.__dict__  # written just now
                    if isinstance(item, (torch.Tensor, torch.Generator)) and key.isidentifier() and not is_of_run:
                        self._names.setdefault(id(item), f"{path}.{key}" if path else key)
                        if isinstance(item, torch.Tensor):
                            self.unwatched(self.state.tensors.know, item)
            name = self._names.get(id(value))
        return name

    def constant(self, prefix: str, value: Any) -> Node:
        """A node that fetches a value kept with the program."""
        known = self._constants.get(id(value))
        if known is None:
            number = len(self.graph._constants)
            while f"{prefix}{number}" in self.graph._constants or hasattr(self.root, f"{prefix}{number}"):
                number += 1
            self.graph._constants[f"{prefix}{number}"] = value
            known = self._constants[id(value)] = (value, self.create_node("get_attr", f"{prefix}{number}", (), {}))
        return known[1]

    def add_input(self, tensor: torch.Tensor, node: Node | MakeNode) -> None:
        """Say that a tensor is (part of) an input of the model."""
        self._outside[id(tensor)] = (tensor, node)
        self._inputs.add(id(tensor))

    def add_object(self, value: Any, node: Node | MakeNode) -> None:
        """Say that an object of the run is the value of a node."""
        self._outside[id(value)] = (value, node)
        self._objects[id(value)] = (value, dict(parts_now(value)))

    def is_known(self, value: Any) -> bool:
        """Whether an object is the value of a node, as it is and not only as it looks."""
        return id(value) in self._objects

    def known_objects(self) -> list[Any]:
        """Containers and objects that are values of nodes, and could be written into."""
        return [value for value, _ in self._objects.values() if not isinstance(value, tuple)]

    def changed_objects(self) -> list[tuple[Any, dict[Any, Any], dict[Any, Any]]]:
        """Objects that are values of nodes and were changed since, with what was in them then and is now."""
        found = [(value, before, parts_now(value)) for value, before in self._objects.values()]
        return [entry for entry in found if list(entry[1]) != list(entry[2]) or not same_parts(entry[2], entry[1])]

    def is_static(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the same size in every run: parameters, buffers and constants."""
        mark = tensor.__dict__.get(MARK)
        if mark is not None and mark[0] is self:
            return False
        return id(tensor) not in self._inputs

    def part(self, node: Node | MakeNode, key: Any, by_attribute: bool = False) -> MakeNode:
        """What makes the node of a part of a value: an item, or an attribute."""
        made: list[Node] = []

        def make() -> Node:
            if not made or made[0]._erased:
                whole = node if isinstance(node, Node) else node()
                function = getattr if by_attribute else operator.getitem
                made[:] = [self.create_node("call_function", function, (whole, key), {})]
            return made[0]

        return make

    def register(self, result: Any, node: Node | MakeNode, given: dict[int, int]) -> Any:
        """Note that a result is the value of a node; containers are taken apart when a part is used.

        `given` has the version of every tensor the call received. A call that hands one of them through unchanged is not
        the same as no call (dropout in evaluation mode), so its result gets an identity of its own.
        """
        if isinstance(result, torch.Tensor):
            address = id(result)
            if address in given and given[address] == version_of(result):
                result = result.view_as(result)
                address = id(result)
            if address in self._outside:
                self._outside[address] = (result, node)
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
        if type(result) in (int, float) and self.sizes_are_symbolic:
            return wrapped(SymbolicNumber(self, result, make, f"the result of {what}"))
        if type(result) is torch.dtype and self.dtypes_flow:
            self._has_stand_ins = True
            return FlowingDtype(self, result, make())
        if result is None or type(result) in UNCHANGED_TYPES:
            if result is not None and not self.is_plain:
                self.guard(make(), result, f"the result of {what}")
            return result
        is_container = isinstance(result, (tuple, list, dict))
        if not self.is_plain:
            self._guard_container(result, make, what)
        parts = result if isinstance(result, dict) else dict(enumerate(result)) if is_container else parts_now(result)
        new = {
            key: self.register_anything(item, self.part(node, key, not is_container), given, what)
            for key, item in parts.items()
        }
        if any(new[key] is not item for key, item in parts.items()):
            result = with_parts(result, new)
        self.add_object(result, make)
        return result

    def _guard_container(self, result: Any, make: MakeNode, what: str) -> None:
        """Have the program check how many things there are in a list or a dict."""
        if isinstance(result, list):
            self._guard_length(make(), result, what)
        elif isinstance(result, dict) and all(isinstance(key, str) for key in result):
            keys = self.create_node("call_function", list, (make(),), {})
            self.guard(keys, list(result), f"the keys of the result of {what}")

    def _guard_length(self, node: Node, result: Any, what: str) -> None:
        where = str(current_source_line() or "an unknown line")
        arguments = (node, len(result), f"the number of results of {what}", where)
        self.create_node("call_function", check_length, arguments, {})

    # ---- arguments ----

    def create_arg(self, a: Any) -> Argument:
        """Turn a value of the run into an argument."""
        cls = type(a)
        if cls is torch.Tensor or cls is torch.nn.Parameter or isinstance(a, torch.Tensor):
            return self.node_of(a)
        if cls in UNCHANGED_TYPES:
            known = self.device_node(a) if cls is torch.device else None
            return a if known is None else known
        number = unwrapped(a)
        if number is not None:
            return number.argument()
        if cls is not tuple:
            known = self._outside_node(a)
            if known is not None:
                if self.is_known(a) and self.changed_objects():
                    # The program writes into objects at its end, and this call would see them as they were.
                    raise KeepWhole(None, f"it changes a {cls.__name__} and hands it on{at_line()}")
                return known
        if isinstance(a, tuple) and "__new__" in vars(cls) and "_fields" not in vars(cls) and hasattr(a, "_fields"):
            return self._opaque(a)  # a named tuple with a constructor of its own, which may want tensors
        if isinstance(a, torch.nn.Module) and a in self.paths and self.paths[a]:
            return self.create_node("get_attr", self.paths[a], (), {})
        try:
            return super().create_arg(a)
        except NotImplementedError:
            return self._opaque(a)

    def _opaque(self, a: Any) -> Node:
        """The node of an object that code cannot spell."""
        if isinstance(a, torch.Generator):
            name = self._attribute_name(a)
            if name is not None:
                return self.create_node("get_attr", name, (), {})
        template, parts = take_apart(a, self.is_of_this_run)
        if parts and not callable(a):
            arguments = (self.constant("_template", Template(template)), *[self.create_arg(part) for part in parts])
            return self.create_node("call_function", put_together, arguments, {})
        known = type(a).__module__ == "numpy" or isinstance(a, torch.Generator)
        if parts or known or self.closes_over(a):
            raise KeepWhole(
                self._modules[-1], f"a {type(a).__name__} made on the way cannot be written down{at_line()}"
            )
        return self.constant("_object_constant", a)

    def is_of_this_run(self, value: Any) -> bool:
        """Whether a value was computed by this run."""
        return isinstance(value, torch.Tensor) or unwrapped(value) is not None or type(value) is FlowingDtype

    def closes_over(self, function: Any) -> bool:
        """Whether a callable has values of this run with it: in its closure, its defaults, its attributes, or what it is bound
        to."""
        if isinstance(function, MethodType):
            return not isinstance(function.__self__, torch.nn.Module) or function.__self__ not in self.paths
        if isinstance(function, FunctionType):
            if "<locals>" in function.__qualname__ and is_user_code(function.__code__):
                return True  # made by this run, and a program with it could not be pickled
            held = [*closed_over(function).values(), *(function.__defaults__ or ())]
        else:
            held = [*getattr(function, "args", ()), *(getattr(function, "keywords", None) or {}).values()]
            if not isinstance(function, (torch.nn.Module, type)) and has_attributes(function):
                held += attributes_of(function).values()
        return any(take_apart(value, self.is_of_this_run)[1] or isinstance(value, list) for value in held) or any(
            self.closes_over(value) for value in held if isinstance(value, FunctionType)
        )

    def unwatched(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run something without writing it down."""
        previous = active.tracer, self._switching
        active.tracer, self._switching = None, True
        try:
            return function(*args, **kwargs)
        finally:
            active.tracer, self._switching = previous


def _is_wrapped(tensor: torch.Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)
