"""Reading the reference form: which calls stand between integers, and what their scales are.
Nothing is edited here; what is put in their place is decided in `lowering.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.node import Node
from torchgraft.passes.layer_calls import parameter_of
from torchgraft.quantize.operations import first_input, is_shape_read, parts_of_join
from torchgraft.quantize.operators import dequantize_tensor, quantize_tensor, scale_of_values


class Steps(NamedTuple):
    """A value in bytes: its node, and its scale and zero point as numbers."""

    node: Node
    scale: float
    zero_point: int
    key: tuple[Any, ...]


class Reader:
    """Reads scales and tensors out of a program in its reference form."""

    program: GraphModule

    def is_dynamic(self, source: Node) -> bool:
        """Whether the scale of a `dequantize_tensor` is chosen when the program runs."""
        scale = source.args[1]
        return isinstance(scale, Node) and bool(scale.args) and is_call(scale.args[0], scale_of_values)

    def steps(self, node: Any) -> Steps | None:
        """The bytes behind a `dequantize_tensor` with one scale."""
        if not is_call(node, dequantize_tensor) or node.kwargs or not isinstance(node.args[0], Node):
            return None
        return self.numbers(node.args[0], node.args[1], node.args[2])

    def numbers(self, steps: Node, scale: Any, zero_point: Any) -> Steps | None:
        """A value with its scale and zero point, where they are one buffer each."""
        scale_value, zero_value = parameter_of(scale, self.program), parameter_of(zero_point, self.program)
        if scale_value is None or scale_value.dim() or (zero_point is not None and zero_value is None):
            return None
        zero = 0 if zero_value is None else int(zero_value.item())
        return Steps(steps, float(scale_value.item()), zero, (scale.target, getattr(zero_point, "target", None)))

    def is_byte(self, steps: Steps) -> bool:
        """Whether the steps go from 0 to 255, which is what kernels take."""
        source = steps.node
        return not is_call(source, quantize_tensor) or source.args[5] == torch.uint8


def is_call(node: Any, function: Any) -> bool:
    """Whether a node calls this very function."""
    return isinstance(node, Node) and node.op == "call_function" and node.target is function


def writes_in_place(node: Node) -> bool:
    """Whether a call writes into its first argument, by its name."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "").partition(".")[0]
    return str(name).endswith("_") or str(name) in ("iadd", "imul", "isub") or bool(node.kwargs.get("inplace"))


def only_user(node: Node) -> Node | None:
    """The one call that takes a value; None if there are more, or if others look at more than its sizes."""
    users = [user for user in node._users if not is_shape_read(user)]
    return users[0] if len(users) == 1 and users[0].op != "output" else None


def chain(first: Node, last: Node) -> list[Node]:
    """The calls from one to another, each the only one to take the result of the one before."""
    found = [first]
    while found[-1] is not last:
        user = only_user(found[-1])
        assert user is not None
        found.append(user)
    return found


def all_values(node: Node, sources: list[Node], name: str) -> bool:
    """Whether all the values that a call works on are bytes."""
    if name == "cat":
        parts = parts_of_join(node)
        return bool(parts) and all(part in sources for part in parts)
    return first_input(node) in sources
