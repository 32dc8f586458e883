"""What the program of a watched run has to check, each question once: values, facts about tensors, lengths, modes.
Which reads come to this is decided by those who read; what a guard does when the program runs is in `ir/guards.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.capturing.flowing.dtypes import FlowingDtype, plain_dtype
from torchgraft.capturing.flowing.sizes import SymbolicNumber
from torchgraft.ir.guards import check_length, check_result, check_training, check_value
from torchgraft.ir.input_kinds import class_name, is_parameter
from torchgraft.ir.node import Node
from torchgraft.ir.origin import current_source_line

if TYPE_CHECKING:
    from torchgraft.capturing.tracer_base import TracerBase

_KINDS = (torch.Tensor, tuple, list, dict)


class Guards:
    """Writes guards into the graph of a tracer, and knows what was asked already."""

    def __init__(self, tracer: TracerBase) -> None:
        self._tracer = tracer
        # Whether nothing is checked, and everything is handed out plain: a run that is only compared with another.
        self.is_plain = False
        self._asked: set[Any] = set()

    def is_asked(self, *key: Any) -> bool:
        """Whether a guard is not needed: nothing is checked in this run, or the same was asked before."""
        if self.is_plain or key in self._asked:
            return True
        self._asked.add(key)
        return False

    def value(self, node: Any, expected: Any, condition: str) -> Node:
        """Have the program check that a value is what it is in this run."""
        if isinstance(node, Node) and node._op == "call_method" and node._target == "item" and not node._users:
            node = node._args[0]  # the guard looks into the tensor itself
        arguments = (node, self._tracer.create_arg(expected), condition, _where())
        return self._tracer.create_node("call_function", check_value, arguments, {})

    # ---- tensors; each of these once ----

    def fact(self, node: Node, name: str, value: Any) -> Any:
        """An attribute of a tensor, or of a plain value."""
        if not self.is_asked(node, name):
            fact = self._tracer.create_node("call_function", getattr, (node, name), {})
            self.value(fact, value, f"{name} of '{node.name}'")
        return value

    def absence(self, node: Node, name: str, value: Any) -> None:
        """Whether a tensor has something (`grad`), which itself cannot be compared."""
        fact = self._tracer.create_node("call_function", getattr, (node, name), {})
        absent = self._tracer.create_node("call_function", operator.is_, (fact, None), {})
        self.value(absent, value is None, f"absence of {name} of '{node.name}'")

    def class_of(self, node: Node, tensor: torch.Tensor) -> None:
        """Whether an input is a parameter; every other class is checked anyway."""
        if not self.is_asked(node, "class"):
            answer = self._tracer.create_node("call_function", is_parameter, (node,), {})
            self.value(answer, type(tensor) is torch.nn.Parameter, f"isinstance('{node.name}', Parameter)")

    # ---- what flows, where Python asked for the plain value: from here on the program is right only for this one ----

    def number(self, number: SymbolicNumber) -> None:
        """A number."""
        node = number.argument()
        if isinstance(node, Node) and not self.is_asked(node, "value"):
            self.value(node, number.value, str(number))

    def dtype(self, dtype: FlowingDtype) -> None:
        """A dtype."""
        if not self.is_asked(dtype.node, "value"):
            self.value(dtype.node, dtype.value, dtype.described())

    def same_dtype(self, one: FlowingDtype, other: Any) -> bool:
        """Whether a dtype equals another."""
        answer = one.value is plain_dtype(other)
        if answer and type(other) is not FlowingDtype:
            self.dtype(one)
        operand = other.node if type(other) is FlowingDtype else other
        is_known = (one.node, "value") in self._asked and (operand is other or (operand, "value") in self._asked)
        if not is_known and not self.is_asked(one.node, operand):
            equal = self._tracer.create_node("call_function", operator.eq, (one.node, operand), {})
            text = other.described() if type(other) is FlowingDtype else str(other)
            self.value(equal, answer, f"({one.described()} == {text})")
        return answer

    def mode(self, module: torch.nn.Module, node: Node | bool, value: bool) -> None:
        """The mode of a module."""
        where = str(current_source_line() or type(module).__name__)
        self._tracer.create_node("call_function", check_training, (node, value, where), {})

    # ---- results of calls ----

    def length(self, node: Node, result: Any, what: str) -> None:
        """How many things there are in a result."""
        arguments = (node, len(result), f"the number of results of {what}", _where())
        self._tracer.create_node("call_function", check_length, arguments, {})

    def container(self, result: Any, make: Callable[[], Node], what: str) -> None:
        """How many things there are in a list or a dict."""
        if isinstance(result, list):
            self.length(make(), result, what)
        elif isinstance(result, dict) and all(isinstance(key, str) for key in result):
            keys = self._tracer.create_node("call_function", list, (make(),), {})
            self.value(keys, list(result), f"the keys of the result of {what}")

    def kind(self, node: Node, result: Any, what: str) -> None:
        """What a call gives that may give something else in another mode: a tuple, say, or None in it."""
        if result is None:
            absent = self._tracer.create_node("call_function", operator.is_, (node, None), {})
            self.value(absent, True, f"the absence of a result of '{what}'")
        kind = next((kind for kind in _KINDS if isinstance(result, kind)), None)
        if kind is None:
            return
        length = len(result) if kind is tuple else None
        self._tracer.create_node("call_function", check_result, (node, class_name(kind), length, what, _where()), {})
        for index, item in enumerate(result if kind is tuple else ()):
            if item is None or isinstance(item, _KINDS):
                part = self._tracer.create_node("call_function", operator.getitem, (node, index), {})
                self.kind(part, item, what)


def _where() -> str:
    return str(current_source_line() or "an unknown line")
