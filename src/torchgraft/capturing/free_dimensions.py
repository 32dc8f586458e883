"""Dimensions of inputs that must stay free (`capture(..., dynamic={"x": [0]})`): whether the model fixed one after all.
How sizes become guards in the first place is in `reads.py` and `sizes.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torchgraft.capturing.watching.signatures import bind
from torchgraft.capturing.whole import eager_error
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GuardError, TraceError
from torchgraft.ir.guards import Guard
from torchgraft.ir.node import Node


def check_free(
    program: GraphModule, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: dict[str, Iterable[int]]
) -> None:
    """Refuse a program in which a dimension that must stay free was fixed to a number."""
    bound = bind(model, args, kwargs)
    free = dict(
        _dimensions(bound.arguments, [str(node.target) for node in program.graph.find_nodes(op="placeholder")], dynamic)
    )
    for name, dimensions in free.items():
        for dimension in dimensions:
            for guard in program.guards:
                if _is_fixing(guard) and _sources(guard.node.args[0]) == {(name, dimension)}:
                    _refuse(f"dimension {dimension} of '{name}' was to stay free, but the model fixed it", guard)
    # The size of something on the way may be that of an input; larger inputs tell.
    for name, dimensions in free.items():
        for dimension in dimensions:
            bound.arguments[name] = _larger(bound.arguments[name], dimension)
    error = eager_error(program, program, bound.args, bound.kwargs)
    for guard in program.guards if isinstance(error, GuardError) else ():
        if _is_fixing(guard) and guard.condition in str(error) and guard.where in str(error):
            names = ", ".join([f"{name!r} {dimensions}" for name, dimensions in free.items()])
            _refuse(f"the dimensions of {names} were to stay free, but the model fixed a size that comes of one", guard)


def _dimensions(
    arguments: dict[str, Any], names: list[str], dynamic: dict[str, Iterable[int]]
) -> Iterator[tuple[str, list[int]]]:
    """The dimensions by name, counted from the front."""
    for name, dimensions in dynamic.items():
        if name not in names:
            raise ValueError(f"dynamic names '{name}', but the inputs are {', '.join(map(repr, names))}")
        value = arguments.get(name)
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"dynamic names '{name}', which is no tensor here but a {type(value).__name__}")
        found = list(dimensions)
        wrong = [item for item in found if not -value.ndim <= item < value.ndim]
        if wrong:
            raise ValueError(f"dynamic names dimension {wrong[0]} of '{name}', which has {value.ndim}")
        yield name, [item % value.ndim for item in found]


def _size_of(node: Any) -> tuple[str, int] | None:
    """The input and its dimension that a node reads the size of."""
    is_size = isinstance(node, Node) and node.target == "size" and len(node.args) == 2
    if not is_size or not isinstance(node.args[0], Node) or node.args[0].op != "placeholder":
        return None
    return str(node.args[0].target), node.args[1]


def _sources(value: Any) -> set[tuple[str, int] | None]:
    """The sizes of inputs that a number is computed from; None means anything else."""
    if not isinstance(value, Node):
        return set()
    size = _size_of(value)
    if size is not None or value.op != "call_function" or value.target is getattr or not value.all_input_nodes:
        return {size}
    return {source for node in value.all_input_nodes for source in _sources(node)}


def _is_fixing(guard: Guard) -> bool:
    """Whether a guard holds for one number only: it is compared with that, or must be equal to another."""
    found = guard.node.args[0]
    target = found.target if isinstance(found, Node) else None
    return (
        type(guard.expected) is int
        or (target is operator.eq and guard.expected is True)
        or (target is operator.ne and guard.expected is False)
    )


def _larger(tensor: torch.Tensor, dimension: int) -> torch.Tensor:
    tensor = tensor.detach()
    return torch.cat([tensor, tensor.narrow(dimension, 0, min(1, tensor.shape[dimension]))], dimension)


def _refuse(what: str, guard: Guard) -> None:
    to = f" to {guard.expected}" if type(guard.expected) is int else f": {guard.condition} is {guard.expected}"
    raise TraceError(f"{what}{to} at {guard.where}; rewrite that line so that the size only flows into other calls")
