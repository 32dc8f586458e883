"""Writes down the operators that run while a program is lowered: one node each, with the arguments that flow and the sizes that
stay symbolic. Which node of the program above is being run, and how, is decided in `lower.py`.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchgraft.capturing.flowing.sizes import SymbolicNumber, combine, factors, unwrapped, wrapped
from torchgraft.ir.arguments import map_aggregate
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import check_length, check_training, check_value
from torchgraft.ir.names import wish_of
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_line
from torchgraft.lowering.sizes import known_sizes
from torchgraft.lowering.tensors import QUESTIONS, TracedTensor, can_be_traced


class Flow:
    """A value that is neither a tensor nor a whole number (a dtype, a flag, a container), and the node that computes it."""

    __slots__ = ("node", "used", "value")

    def __init__(self, value: Any, node: Node) -> None:
        self.value = value
        self.node = node
        self.used = False


class Recorder:
    """The program that is being written, and what is known about its values."""

    def __init__(self, is_above_autograd: bool, decompositions: dict[Any, Callable[..., Any]] | None = None) -> None:
        self.graph = Graph()
        self.is_above_autograd = is_above_autograd
        # What to compute in the place of operators; where there is such a table, composite operators are taken apart, and writes
        # into memory that nobody else sees become plain computations.
        self.decompositions = decompositions
        self.is_functional = decompositions is not None
        # The node of the program above that is being run: new nodes come from its line.
        self.above: Node | None = None
        # Values handed to the call that is being run, by the position and by the name of the parameter.
        self.flows: dict[int | str, Flow] = {}
        self.is_over = self._is_asking = False
        # The values of numbers, by their nodes.
        self.plain: dict[Node, Any] = {}
        # Whether gradients are being computed.
        self.is_backward = False
        self.before_write: Callable[[torch.Tensor], None] = lambda tensor: None
        self._guarded: set[Any] = set()
        self._constants: dict[int, tuple[Any, Node]] = {}
        # The traced tensors that share a memory, by its address.
        self._sharing: dict[int, list[weakref.ref[TracedTensor]]] = {}
        self._outside: set[int] = set()
        # Arithmetic on sizes that was done before, so that equal sizes are one number.
        self.combined: dict[Any, SymbolicNumber] = {}
        # What an operator in place has changed about traced tensors, in case the call has to be taken back.
        self._changed: list[tuple[TracedTensor, torch.Tensor, Any]] = []

    # ---- nodes ----

    def create_node(
        self, op: str, target: Any, args: Any, kwargs: Any, name: str | None = None, type_expr: Any = None
    ) -> Node:
        """Put a node at the end of the program."""
        node = self.graph._make_node(op, target, args, kwargs, name or wish_of(target), type_expr)
        if self.above is not None:
            node._origin = self.above._origin
            node.meta["from_node"] = self.above.name
        if self.is_backward:
            node.meta["partitioner_tag"] = "is_backward"
        return node

    def argument(self, value: Any) -> Any:
        """A value as an argument of a node."""
        if isinstance(value, (tuple, list, dict, slice)) and not isinstance(value, torch.Size):
            return map_aggregate(value, self._leaf)
        if isinstance(value, torch.Size):
            return tuple([self._leaf(item) for item in value])
        return self._leaf(value)

    def _leaf(self, value: Any) -> Any:
        if type(value) is TracedTensor:
            return value.node
        if type(value) is Flow:
            return value.node
        number = unwrapped(value)
        if number is not None:
            return number.argument()
        if isinstance(value, torch.Tensor):
            return self.constant(value)
        return value

    def constant(self, value: torch.Tensor) -> Node:
        """A node that fetches a tensor kept with the program."""
        known = self._constants.get(id(value))
        if known is None:
            name = f"_lowered_constant{len(self._constants)}"
            self.graph._constants[name] = value
            known = self._constants[id(value)] = (value, self.create_node("get_attr", name, (), {}))
        return known[1]

    def traced(
        self, actual: torch.Tensor, source: Any, is_static: bool = False, is_outside: bool = False
    ) -> TracedTensor:
        """A tensor of the run; one from outside (an input, a parameter) is looked at by others, too."""
        if not can_be_traced(actual):
            raise TypeError(f"a {type(actual).__name__} with layout {actual.layout} cannot be traced")
        result = TracedTensor(self, actual, source, is_static)
        self._note_memory(result, is_outside)
        if isinstance(source, Node):
            self.note_value(source, actual)
        return result

    def _note_memory(self, tensor: TracedTensor, is_outside: bool = False) -> None:
        address = _memory(tensor.actual)
        if address is not None:
            self._sharing.setdefault(address, []).append(weakref.ref(tensor))
            if is_outside:
                self._outside.add(address)

    def _is_alone(self, tensor: TracedTensor) -> bool:
        """Whether nobody else sees the memory of a tensor."""
        address = _memory(tensor.actual)
        if address is None or address in self._outside:
            return False
        others = [
            other for reference in self._sharing[address] if (other := reference()) is not None and other is not tensor
        ]
        return all(_memory(other.actual) != address for other in others)  # one that was written got a memory of its own

    def take_back(self, last: Node) -> None:
        """Forget the nodes after one, and what they were the values of."""
        while self.graph._root._prev is not last:
            self.graph.erase_node(self.graph._root._prev)
        for tensor, actual, source in reversed(self._changed):
            tensor.actual, tensor.source = actual, source
        self._changed.clear()

    def begin(self, above: Node) -> Node:
        """Go on with a node of the program above; the last node that was written."""
        self.above = above
        self._changed.clear()
        return self.graph._root._prev

    def note_value(self, node: Node, value: Any) -> None:
        """Note shapes and types of a value in the metadata of its node."""
        node.meta["val"] = pytree.tree_map(_without_data, value)

    def note_numbers(self) -> None:
        """Note the numbers of this run in the metadata of their nodes, where everybody looks for values."""
        for node, value in self.plain.items():
            node.meta.setdefault("val", value)

    # ---- numbers and guards; the interface that `SymbolicNumber` asks for ----

    def number(self, value: int, make: Callable[[], Node], text: str | Callable[[], str], is_size: bool = True) -> Any:
        """A whole number as torch and Python see it."""
        return wrapped(SymbolicNumber(self, value, make, text, is_size=is_size))

    def guard_number(self, number: SymbolicNumber) -> None:
        """Something was decided by a number: the program checks that it is the same."""
        for part in _questions(number):
            self._guard_part(part)

    def _guard_part(self, number: SymbolicNumber) -> None:
        node = number.argument()
        if isinstance(node, Node) and node not in self._guarded:
            self._guarded.add(node)
            self.guard(node, number.value, str(number))

    def guard(self, node: Node, expected: Any, condition: str) -> None:
        """Have the program check that a value is what it is now."""
        self.create_node("call_function", check_value, (node, expected, condition, self.line()), {})

    def guard_flow(self, flow: Flow) -> None:
        """Something may have been decided by a value."""
        if flow.node not in self._guarded:
            self._guarded.add(flow.node)
            if flow.node.op == "get_attr" and str(flow.node.target).endswith("training"):
                self.create_node("call_function", check_training, (flow.node, flow.value, self.line()), {})
            else:
                self.guard(flow.node, flow.value, f"'{flow.node.name}'")

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """While active, what is read of tensors is checked by the program, unless its first guard speaks of all types."""
        self._is_asking = self.decompositions is None
        try:
            yield
        finally:
            self._is_asking = False

    def note_fact(self, tensor: TracedTensor, name: str) -> None:
        """A property of a tensor is read."""
        if self._is_asking and not tensor.is_static and (tensor.node, name) not in self._guarded:
            self._guarded.add((tensor.node, name))
            value = getattr(tensor.actual, name)
            fact = self.create_node("call_function", getattr, (tensor.node, name), {})
            self.guard(fact, value, f"{name} of '{tensor.node.name}'")

    def line(self) -> str:
        """The user's line that is being lowered."""
        origin = None if self.above is None else self.above._origin
        line = None if origin is None else source_line(origin[0], origin[1])
        return str(line or "an unknown line")

    def before_key(self, number: Any) -> None:
        """A number is the key of a table of torch's; it decides, and that is all."""

    def before_plain(self, name: str) -> None:
        """A number becomes a plain one; it decides, and that is all."""

    # ---- operators ----

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
        """Run an operator on the real tensors and write it down."""
        answer = QUESTIONS.get(function)
        if answer is not None and args and type(args[0]) is TracedTensor:
            return answer(*args, **kwargs)
        decomposition = None if self.decompositions is None else self._decomposition(function)
        if decomposition is not None:
            with mode:
                result = decomposition(*args, **kwargs)
                if result is NotImplemented and decomposition is not function.decompose:
                    result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        written = list(_written(function, args, kwargs))
        plain_args, plain_kwargs = concrete(args), concrete(kwargs)
        if len(written) == 1 and self.is_functional:
            result = self._without_write(function, written[0], args, kwargs, plain_args, plain_kwargs)
            if result is not None:
                return result
        for tensor in written:
            self.before_write(tensor.actual)
        was_asking, self._is_asking = self._is_asking, False
        try:
            value = function(*plain_args, **plain_kwargs)
        finally:
            self._is_asking = was_asking
        node = self.create_node("call_function", function, *self._arguments(function, args, kwargs), _name(function))
        return self._result(function, args, kwargs, node, value)

    def _decomposition(self, function: Any) -> Callable[..., Any] | None:
        assert self.decompositions is not None
        known = self.decompositions.get(function)
        is_composite = known is None and torch._C._dispatch_has_kernel_for_dispatch_key(
            function.name(), torch._C.DispatchKey.CompositeImplicitAutograd
        )
        return function.decompose if is_composite else known

    def _arguments(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if "pin_memory" in kwargs and self.above is not None:
            kwargs = _as_written(self.above, kwargs)
        if not self.flows:
            return tuple([self.argument(value) for value in args]), {k: self.argument(v) for k, v in kwargs.items()}
        parameters = function._schema.arguments
        names = [argument.name for argument in parameters]
        new_args = [self._flowing(index, names[index], value) for index, value in enumerate(args)]
        new_kwargs = {name: self._flowing(names.index(name), name, value) for name, value in kwargs.items()}
        for index, parameter in enumerate(parameters[len(args) :], len(args)):
            # What has the value of its default, torch leaves out.
            if parameter.name not in kwargs and parameter.has_default_value():
                value = self._flowing(index, parameter.name, parameter.default_value)
                if isinstance(value, Node):
                    new_kwargs[parameter.name] = value
        return tuple(new_args), new_kwargs

    def _flowing(self, index: int, name: str, value: Any) -> Any:
        for key in (name, _SPELLED.get(name, name), index):
            flow = self.flows.get(key)
            if flow is not None and type(flow.value) is type(value) and flow.value == value:
                flow.used = True
                return flow.node
        return self.argument(value)

    def _without_write(
        self, function: Any, tensor: TracedTensor, args: Any, kwargs: Any, plain_args: Any, plain_kwargs: Any
    ) -> Any:
        """Write an operator that writes in place down as the one that does not, where nobody else sees that memory."""
        if not self._is_alone(tensor):
            return None
        plain = _functional_form(function)
        if plain is None or tensor is not args[0]:
            return None
        if self.is_above_autograd and plain is torch.ops.aten.copy.default:
            return None  # it has no derivative, and `copy_` has one
        value = plain(*plain_args, **plain_kwargs)
        old = tensor.actual
        if not isinstance(value, torch.Tensor) or (value.dtype, value.shape) != (old.dtype, old.shape):
            return None
        node = self.create_node("call_function", plain, *self._arguments(plain, args, kwargs), _name(plain))
        self._changed.append((tensor, old, tensor.source))
        tensor.actual, tensor.source = value, node
        self._note_memory(tensor)
        self.note_value(node, value)
        return tensor

    def _result(self, function: Any, args: Any, kwargs: Any, node: Node, value: Any) -> Any:
        self.note_value(node, value)
        returns = function._schema.returns
        if len(returns) == 1:
            return self._one_result(function, args, kwargs, node, value, returns[0])
        if isinstance(value, (tuple, list)):
            parts = [
                self._one_result(function, args, kwargs, self._part(node, index), item, returns[index], index)
                for index, item in enumerate(value)
            ]
            return type(value)(parts)
        return value

    def _one_result(
        self, function: Any, args: Any, kwargs: Any, source: Any, value: Any, schema: Any, number: int = 0
    ) -> Any:
        if isinstance(value, torch.Tensor):
            if schema.alias_info is not None and schema.alias_info.is_write:
                for tensor in _written(function, args, kwargs, schema.alias_info.before_set):
                    self._changed.append((tensor, tensor.actual, tensor.source))
                    tensor.source = source
                    return tensor
            result = self.traced(value, source, is_static=_gives_same_sizes(function, (args, kwargs)))
            result.sizes = None if result.is_static else known_sizes(function, args, result, number)
            return result
        if isinstance(value, (tuple, list)):
            node = source if isinstance(source, Node) else source()
            if not _gives_same_sizes(function, (args, kwargs)):
                arguments = (node, len(value), f"the number of results of {_name(function)}()", self.line())
                self.create_node("call_function", check_length, arguments, {})
            parts = [
                self._one_result(function, args, kwargs, self._part(node, index), item, schema)
                for index, item in enumerate(value)
            ]
            return type(value)(parts)
        if type(value) is bool:
            node = source if isinstance(source, Node) else source()
            self.guard(node, value, f"'{node.name}'")
            return value
        if isinstance(value, (int, float)):
            make = (lambda: source) if isinstance(source, Node) else source
            return wrapped(SymbolicNumber(self, value, make, f"'{node_name(source)}'"))
        return value

    def _part(self, node: Any, index: int) -> Callable[[], Node]:
        then = self.above, self.is_backward

        @functools.cache
        def make() -> Node:
            whole = node if isinstance(node, Node) else node()
            # It may be asked for in another module, or after the backward.
            now = self.above, self.is_backward
            self.above, self.is_backward = then
            last = whole
            while last.next.target in (operator.getitem, check_length) and last.next.args[0] is whole:
                last = last.next
            with self.graph.inserting_after(last):
                part = self.create_node("call_function", operator.getitem, (whole, index), {})
            self.above, self.is_backward = now
            value = whole.meta.get("val")
            if isinstance(value, (tuple, list)):
                part.meta["val"] = value[index]
            return part

        return make


def _as_written(above: Node, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options of a factory without those that torch has filled in: the program runs where the default device is another."""
    filled = {"pin_memory": False, "layout": torch.strided}
    if isinstance(above.target, BuiltinFunctionType) and "device" not in above.kwargs:
        filled["device"] = torch.get_default_device()
    return {name: value for name, value in kwargs.items() if name not in filled or value != filled[name]}


def _questions(number: SymbolicNumber) -> list[SymbolicNumber]:
    """What is asked of single sizes where it is asked whether a product of them is 0."""
    if number.operation is None:
        return [number]
    function, operands = number.operation
    is_about_none = function in (operator.eq, operator.ne) and operands[1].is_constant() and operands[1].value == 0
    if not is_about_none or operands[0].value == 0:
        return [number]
    asked = [combine(operator.eq, "==", factor, operands[1]) for factor in factors(operands[0])]
    return [part for part in asked if not part.is_constant()]


def _gives_same_sizes(function: Any, values: Any) -> bool:
    """Whether a result has the same size in every run: nothing that goes in has another one, and no values decide it."""
    if not _SIZES_BY_VALUE.isdisjoint(function.tags):
        return False
    leaves = pytree.tree_leaves(values)
    return not any(
        unwrapped(leaf) is not None or (type(leaf) is TracedTensor and not leaf.is_static) for leaf in leaves
    )


_SIZES_BY_VALUE = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
# Parameters that torch's functions and operators call by different names.
_SPELLED = {"train": "training"}


def node_name(source: Any) -> str:
    """The name of a node, or of one that is yet to be made."""
    return source.name if isinstance(source, Node) else "a result"


@functools.cache
def _name(function: Any) -> str:
    return str(function._schema.name.partition("::")[2])


def concrete(value: Any) -> Any:
    """A value with the real tensors and plain numbers of this run."""
    return (
        map_aggregate(value, _concrete_leaf) if isinstance(value, (tuple, list, dict, slice)) else _concrete_leaf(value)
    )


def _concrete_leaf(value: Any) -> Any:
    if type(value) is TracedTensor:
        return value.actual
    if type(value) is Flow:
        return value.value
    number = unwrapped(value)
    return value if number is None else number.value


def _memory(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a sparse tensor has several
        return None


def _without_data(value: Any) -> Any:
    """A tensor of the same shape and type that holds nothing; None for kinds that there is none of."""
    if isinstance(value, torch.Tensor) and value.is_quantized:
        return None
    return (
        torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
        else value
    )


def _written(function: Any, args: Any, kwargs: Any, names: Any = None) -> Iterator[TracedTensor]:
    """The tensors that an operator writes, by its schema; of these, those known by certain names there."""
    schema = function._schema
    if (
        schema.name in _STATISTICS and args[5] and names is None
    ):  # in training mode, although the schema does not say so
        yield from [item for item in args[3:5] if type(item) is TracedTensor]
    if not schema.is_mutable:
        return
    for index, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is None or not info.is_write or (names is not None and info.before_set != names):
            continue
        value = kwargs.get(argument.name, args[index] if index < len(args) else None)
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if type(item) is TracedTensor:
                yield item


_STATISTICS = frozenset(
    {
        "aten::native_batch_norm",
        "aten::cudnn_batch_norm",
        "aten::miopen_batch_norm",
        "aten::batch_norm",
        "aten::_batch_norm_impl_index",
    }
)


@functools.cache
def _functional_form(function: Any) -> Any:
    """The operator that computes what another writes in place, or None."""
    namespace, _, name = function._schema.name.partition("::")
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    plain = getattr(packet, function._overloadname, None)
    if plain is None or plain._schema.is_mutable:
        return None
    same = [(item.name, str(item.type)) for item in plain._schema.arguments] == [
        (item.name, str(item.type)) for item in function._schema.arguments
    ]
    return plain if same else None
