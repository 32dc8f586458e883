"""The program that is being written while another is lowered: its nodes, the sizes that stay symbolic, its guards, and who shares
which memory. Operators become nodes in `operators.py`; which node of the program above is being run is decided in `lower.py`.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchgraft.capturing.flowing.sizes import SymbolicNumber, combine, factors, unwrapped, wrapped
from torchgraft.ir.arguments import map_aggregate
from torchgraft.ir.copying import inherit_origin
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import check_value
from torchgraft.ir.names import wish_of
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_line
from torchgraft.lowering.guards import check_mode
from torchgraft.lowering.tensors import TracedTensor, can_be_traced
from torchgraft.lowering.values import Flow


class ViewWritten(BaseException):
    """What was copied, because it is no view where a size of 1 is larger, is written. No Exception: torch catches those."""


class Recorder:
    """The program that is being written, and what is known about its values."""

    def __init__(self, is_above_autograd: bool, decompositions: dict[Any, Any] | None = None) -> None:
        self.graph = Graph()
        self.is_above_autograd = is_above_autograd
        # What to compute in the place of operators; where there is such a table, composite operators are taken apart, and writes
        # into memory that nobody else sees become plain computations.
        self.decompositions = decompositions
        # The node of the program above that is being run: new nodes come from its line.
        self.above: Node | None = None
        # Values handed to the call that is being run, by the position and by the name of the parameter.
        self.flows: dict[int | str, Flow] = {}
        self.is_over = self._is_asking = False
        # Whether torch may be told that a size is not 1 where that is right for 1, too, and whether it was. Where a size of 1 is
        # broadcast, its gradient is a sum, and nothing else is right.
        self.may_take_usual_case = self.took_usual_case = False
        self._broadcast: set[SymbolicNumber] = set()
        # The values of numbers, by their nodes.
        self.plain: dict[Node, Any] = {}
        # Whether gradients are being computed.
        self.is_backward = False
        self.before_write: Callable[[torch.Tensor], object] = lambda tensor: None
        # What is checked already, by the node that checks it: taking a call back may erase that node again.
        self._guarded: dict[Any, Node] = {}
        # Where guards on attributes go: before everything that the program writes.
        self._front: Node | None = None
        self._constants: dict[int, tuple[Any, Node]] = {}
        # The traced tensors that share a memory, by its address.
        self._sharing: dict[int, list[weakref.ref[TracedTensor]]] = {}
        self._outside: set[int] = set()
        # Whether what is a view because a size is 1 stays one, and the program is for that size.
        self.keeps_views = False
        # By the memory of a tensor that of its copy, and the other way round, where both are one if certain sizes are 1.
        self._copies: dict[int, list[tuple[int, list[SymbolicNumber]]]] = {}
        # How many numbers the program is tied to, and how often Python has decided something by comparing some.
        self.fixed = self.decisions = 0
        # Arithmetic on sizes that was done before, so that equal sizes are one number.
        self.combined: dict[Any, SymbolicNumber] = {}
        # What an operator in place has changed about traced tensors, in case the call has to be taken back.
        self._changed: list[tuple[TracedTensor, torch.Tensor, Any, Any]] = []

    # ---- nodes ----

    def create_node(
        self, op: str, target: Any, args: Any, kwargs: Any, name: str | None = None, type_expr: Any = None
    ) -> Node:
        """Put a node at the end of the program."""
        node = self.graph._make_node(op, target, args, kwargs, name or wish_of(target), type_expr)
        if self.above is not None:
            inherit_origin(node, self.above)
            node.meta["from_node"] = self.above.name
            if target is self.above._target and "is_wrapped" in self.above.meta:
                node.meta["is_wrapped"] = True
        if self.is_backward:
            node.meta["partitioner_tag"] = "is_backward"
        return node

    def argument(self, value: Any) -> Any:
        """A value as an argument of a node."""
        return tuple(map(self._leaf, value)) if isinstance(value, torch.Size) else map_aggregate(value, self._leaf)

    def _leaf(self, value: Any) -> Any:
        if type(value) is TracedTensor or type(value) is Flow:
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
            if value.requires_grad and not self.is_above_autograd:
                raise RuntimeError(
                    "it uses a tensor that requires a gradient and is no parameter or input of the program"
                )
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

    def is_alone(self, tensor: TracedTensor) -> bool:
        """Whether nobody else sees the memory of a tensor."""
        address = _memory(tensor.actual)
        if address is None or address in self._outside:
            return False
        return all(other is tensor for other in self._seen_by(address))

    def _seen_by(self, address: int) -> Iterator[TracedTensor]:
        """The tensors that share a memory; one that was written got a memory of its own."""
        others = [other for reference in self._sharing.get(address, ()) if (other := reference()) is not None]
        return (other for other in others if _memory(other.actual) == address)

    def note_copy(self, tensor: TracedTensor, copy: TracedTensor, numbers: list[SymbolicNumber]) -> None:
        """A tensor was copied that would not have been if one of these sizes was 1, or not 1."""
        first, second = _memory(tensor.actual), _memory(copy.actual)
        if numbers and first is not None and second is not None:
            self._copies.setdefault(first, []).append((second, numbers))
            self._copies.setdefault(second, []).append((first, numbers))

    def guard_copies(self, tensor: TracedTensor) -> None:
        """A tensor is written: whether a copy of it, or what it is a copy of, has to change with it, the program checks."""
        for other, numbers in self._copies.get(_memory(tensor.actual) or 0, ()):
            if other in self._outside or next(self._seen_by(other), None) is not None:
                if any(number.value == 1 for number in numbers):
                    raise ViewWritten
                self.guard_ones(numbers)

    def decides_views(self) -> bool:
        """Whether it is torch that asks for a view, because it can be one in this run."""
        asks = self.is_backward or (self.above is not None and self.above.target != "view")
        return asks and self.decompositions is not None

    def guard_ones(self, numbers: list[SymbolicNumber]) -> None:
        """Have the program check that of some sizes those are 1 that are now."""
        for number in numbers:
            self.guard_number(combine(operator.eq, "==", number, SymbolicNumber(self, 1, None)))

    def change(self, tensor: TracedTensor, source: Any, actual: torch.Tensor | None = None) -> None:
        """A tensor was written: it is the value of another node now, and may have its data elsewhere."""
        self._changed.append((tensor, tensor.actual, tensor.source, tensor.sizes))
        tensor.source = source
        if actual is not None:
            tensor.actual = actual
            self._note_memory(tensor)

    def take_back(self, last: Node) -> None:
        """Forget the nodes after one, and what they were the values of."""
        while self.graph._root._prev is not last:
            self.graph.erase_node(self.graph._root._prev)
        for tensor, actual, source, sizes in reversed(self._changed):
            tensor.actual, tensor.source, tensor.sizes = actual, source, sizes
        self._changed.clear()

    def has_written(self, last: Node) -> bool:
        """Whether the call that is being run, since this node, has changed a tensor that was there before."""
        return any(not isinstance(source, Node) or not last < source for _, _, source, _ in self._changed)

    def begin(self, above: Node) -> Node:
        """Go on with a node of the program above; the last node that was written."""
        self.above = above
        self._changed.clear()
        return self.graph._root._prev

    def note_value(self, node: Node, value: Any) -> None:
        """Note shapes and types of a value in the metadata of its node."""
        node.meta["val"] = without_data(value)

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
        self.decisions += number.is_branch
        for part in _questions(number):
            self._guard_part(part)

    def takes_usual_case(self, number: SymbolicNumber) -> bool:
        """Whether torch, which asks if a size is 1 and would do without an answer, is told that it is not."""
        if not self.may_take_usual_case or number.operation is None:
            return False
        operands = number.operation[1]
        is_about_one = any(operand.is_constant() and operand.value == 1 for operand in operands)
        takes = is_about_one and self._broadcast.isdisjoint(operands)
        self.took_usual_case |= takes
        return takes

    def note_broadcast(self, tensor: TracedTensor, sizes: Sequence[int]) -> None:
        """A tensor is broadcast to these sizes."""
        if tensor.is_static:
            return
        for place, size in enumerate(reversed(tensor.actual.size()), 1):
            number = unwrapped(tensor.symbolic_sizes()[-place]) if size == 1 and sizes[-place] not in (1, -1) else None
            if number is not None:
                self._broadcast.add(number)

    def _guard_part(self, number: SymbolicNumber) -> None:
        node = number.argument()
        if isinstance(node, Node) and not self._is_guarded(node):
            self._guarded[node] = self.guard(node, number.value, str(number))
            self.fixed += type(number.value) is not bool

    def _is_guarded(self, key: Any) -> bool:
        return key in self._guarded and not self._guarded[key]._erased

    def guard(self, node: Node, expected: Any, condition: str) -> Node:
        """Have the program check that a value is what it is now."""
        return self.create_node("call_function", check_value, (node, expected, condition, self.line()), {})

    def end_of_inputs(self) -> None:
        """All that the program begins with is written."""
        self._front = self.graph._root._prev

    def guard_flow(self, flow: Flow) -> None:
        """Something may have been decided by a value."""
        node = flow.node
        if self._is_guarded(node):
            return
        if node.op != "get_attr":
            self._guarded[node] = self.guard(node, flow.value, f"'{node.name}'")
            return
        with self.before_effects(node):
            if str(node.target).endswith("training"):
                guard = self.create_node("call_function", check_mode, (node, flow.value, self.line()), {})
            else:
                guard = self.guard(node, flow.value, f"'{node.name}'")
        self._guarded[node] = guard

    def guard_default_dtype(self) -> None:
        """Something has torch's default dtype because nothing says another."""
        if self._is_guarded(torch.get_default_dtype):
            return
        asked = self.create_node("call_function", torch.get_default_dtype, (), {})
        with self.before_effects(asked):
            guard = self.guard(asked, torch.get_default_dtype(), "torch.get_default_dtype()")
        self._guarded[torch.get_default_dtype] = guard

    @contextlib.contextmanager
    def before_effects(self, attribute: Node) -> Iterator[None]:
        """While active, nodes go where an attribute is checked: behind the inputs, before anything that the program writes."""
        assert self._front is not None
        if self._front < attribute:
            self._front.append(attribute)
            self._front = attribute
        with self.graph.inserting_after(self._front):
            yield
            self._front = self._front.next

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """While active, what is read of tensors is checked by the program, unless its first guard speaks of all types."""
        self._is_asking = self.decompositions is None
        try:
            yield
        finally:
            self._is_asking = False

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """While active, what kernels read of tensors is not checked."""
        was_asking, self._is_asking = self._is_asking, False
        try:
            yield
        finally:
            self._is_asking = was_asking

    def note_fact(self, tensor: TracedTensor, name: str) -> None:
        """A property of a tensor is read."""
        if self._is_asking and not tensor.is_static and not self._is_guarded((tensor.node, name)):
            value = getattr(tensor.actual, name)
            fact = self.create_node("call_function", getattr, (tensor.node, name), {})
            self._guarded[tensor.node, name] = self.guard(fact, value, f"{name} of '{tensor.node.name}'")

    def line(self) -> str:
        """The user's line that is being lowered."""
        origin = None if self.above is None else self.above._origin
        line = None if origin is None else source_line(origin[0], origin[1])
        return str(line or "an unknown line")

    def before_key(self, number: Any) -> None:
        """A number is the key of a table of torch's; it decides, and that is all."""

    def before_plain(self, name: str) -> None:
        """A number becomes a plain one; it decides, and that is all."""


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


def _memory(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a sparse tensor has several
        return None


def without_data(value: Any) -> Any:
    """A value with tensors of the same shape and type that hold nothing; None for kinds that there is none of."""
    return pytree.tree_map(_empty, value)


def _empty(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_quantized:
        return None
    return (
        torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
        else value
    )
