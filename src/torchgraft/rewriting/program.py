"""What a caller gives as a pattern or a replacement (a function, a module, a graph), brought to one form: a graph and
the module its attributes live on. What is then done with either lives in `pattern.py` and `replace.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchgraft.capturing.symbolic.tracer import symbolic_trace
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraphError
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node
from torchgraft.ir.verify import find_attribute

ProgramLike = Callable[..., Any] | torch.nn.Module | Graph

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>"})()


class Program:
    """A graph together with the module its `get_attr` and `call_module` targets name, if there is one.

    The module is held here because a graph does not keep its owner alive.
    """

    __slots__ = ("graph", "module")

    def __init__(self, graph: Graph, module: torch.nn.Module | None) -> None:
        self.graph = graph
        self.module = module

    @classmethod
    def of(cls, subject: ProgramLike, role: str) -> Program:
        """Trace what is not traced yet; `role` says in errors what the subject was given as."""
        if isinstance(subject, GraphModule):
            return cls(subject.graph, subject)
        if isinstance(subject, Graph):
            return cls(subject, subject.owning_module)
        if callable(subject):
            traced = symbolic_trace(subject)
            return cls(traced.graph, traced)
        raise GraphError(
            f"cannot use {subject!r} as a {role}: it is {type(subject).__name__}; give a function, a torch.nn.Module, "
            "a GraphModule or a Graph"
        )

    def attribute(self, target: str) -> Any:
        """The module, parameter, buffer or constant that a target names, or MISSING."""
        if self.module is not None:
            value, problem = find_attribute(self.module, target)
            if problem is None:
                return value
        return self.graph._constants.get(target, MISSING)

    def is_constant(self, target: str) -> bool:
        """Whether a target names a value that tracing met and gave a name of its own choice."""
        return target in self.graph._constants

    def attribute_targets(self) -> list[tuple[Node, str]]:
        """The nodes that name something on the module, and what they name."""
        return [(node, node.target) for node in self.graph.nodes if node.op in ("get_attr", "call_module")]
