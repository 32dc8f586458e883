"""The shapes of all values of a program from one run on example inputs, where its metadata does not have them.
The run leaves buffers, inputs and random numbers as they were.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError
from torchgraft.interpreter import Interpreter
from torchgraft.ir.node import Node


class Seen(NamedTuple):
    """What is kept of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Observer(Interpreter):
    def __init__(self, program: GraphModule) -> None:
        super().__init__(program)
        self.seen: dict[str, Any] = {}

    def run_node(self, node: Node) -> Any:
        value = super().run_node(node)
        self.seen[node.name] = pytree.tree_map_only(torch.Tensor, lambda t: Seen(tuple(t.shape), t.dtype), value)
        return value


def observe(program: Any, args: Iterable[Any], kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run a program once and return shape and dtype of every value by the name of its node.

    >>> from torchgraft import symbolic_trace
    >>> observe(symbolic_trace(torch.nn.Linear(2, 3)), (torch.ones(4, 2),))["linear"].shape
    (4, 3)
    """
    if not isinstance(program, GraphModule):
        raise GraftError(
            f"cannot run a {type(program).__name__} to see its shapes: example inputs need a torchgraft program; "
            "convert it with from_fx() or from_export(), or leave args out"
        )
    values = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    if kwargs:
        bound = inspect.signature(program.forward).bind(*values, **kwargs)
        bound.apply_defaults()
        values = (*bound.args, *bound.kwargs.values())
    values = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), values)
    buffers = {name: buffer.detach().clone() for name, buffer in program.named_buffers()}
    observer = _Observer(program)
    devices = sorted({t.device.index or 0 for t in pytree.tree_leaves(values) if getattr(t, "is_cuda", False)})
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        try:
            observer.run(*values)
        finally:
            for name, buffer in program.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
    return observer.seen
