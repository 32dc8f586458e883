"""What patterns may say beyond plain calls (`call_any`), and what a match shows to conditions and to computed replacements.
How matches are found is in `matching.py` and `meaning_matching.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchgraft.capturing.symbolic.proxy import Proxy
from torchgraft.errors import GraphError
from torchgraft.ir.node import Node
from torchgraft.ir.printing import known_value
from torchgraft.rewriting.matching import InternalMatch
from torchgraft.rewriting.modules import State
from torchgraft.rewriting.pattern import MISSING, Program


def call_any(kinds: Any, *inputs: Any, name: str | None = None) -> Any:
    """In a pattern: a call of any of these functions or of any module of these types, on these values.

    `kinds` is a function, a module type or a tuple of such. What else is given to the call (constants, settings of the module)
    may be anything. `name` is what `Found.modules` and `Found.nodes` call it.

    >>> import torchgraft
    >>> module = torchgraft.symbolic_trace(torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.ReLU()))
    >>> found = torchgraft.rewrite(module, lambda x: call_any(torch.nn.Conv2d, x, name="conv"), lambda x: x * 2)
    >>> found[0].modules["conv"].padding
    (1, 1)
    """
    proxies = [value for value in inputs if isinstance(value, Proxy)]
    if not proxies:
        raise GraphError(
            f"call_any({kinds!r}) was called outside of a pattern, on {inputs!r}\n"
            "  use it in a function that is given to rewrite() as the pattern, on the parameters of that function"
        )
    tracer = proxies[0].tracer
    nodes = [value.node if isinstance(value, Proxy) else value for value in inputs]
    node = tracer.graph.call_function(call_any, (kinds, *nodes), {} if name is None else {"name": name}, name=name)
    return Proxy(node, tracer)


class Found:
    """One occurrence of a pattern: `found["x"]` is what the parameter x of the pattern matched, a node or a constant.

    `nodes` and `modules` are by the names of the pattern's nodes (or by the `name` given to `call_any`). `replacements` are the
    new nodes, once it is replaced.

    >>> import torch, torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: torch.relu(x) + 1)
    >>> [found] = torchgraft.rewrite(program, lambda a: torch.relu(a), lambda a: torch.tanh(a))
    >>> found["a"], found.replacements
    (x, [tanh])
    """

    def __init__(self, program: Program, match: InternalMatch) -> None:
        self._program = program
        self.match = match
        self.replacements: list[Node] = []
        self.modules: dict[str, torch.nn.Module] = {
            pattern_name(node): program.attribute(value.target)
            for node, value in match.nodes_map.items()
            if node.op != "placeholder" and isinstance(value, Node) and value.op == "call_module"
        }

    @property
    def inputs(self) -> dict[str, Any]:
        """What the parameters of the pattern matched."""
        return {node.target: self.match.nodes_map[node] for node in self.match.pattern.placeholders}

    @property
    def nodes(self) -> dict[str, Node]:
        """What the calls of the pattern matched."""
        return {
            pattern_name(node): value
            for node, value in self.match.nodes_map.items()
            if node.op != "placeholder" and isinstance(value, Node)
        }

    def __getitem__(self, name: str) -> Any:
        inputs = self.inputs
        if name in inputs:
            return inputs[name]
        nodes = self.nodes
        if name in nodes:
            return nodes[name]
        raise KeyError(f"the pattern has no '{name}': its inputs are {', '.join(inputs)}, its calls {', '.join(nodes)}")

    def tensor(self, name: str) -> torch.Tensor | None:
        """The parameter, buffer or constant tensor that an input of the pattern matched, or None if it is computed."""
        value = self[name]
        path = value.path if isinstance(value, State) else value.target if is_fetch(value) else None
        found = MISSING if path is None else self._program.attribute(path)
        return found if isinstance(found, torch.Tensor) else None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a value, if a pass has noted it or it is a parameter; None if it is not known."""
        shape = getattr(self._known(name), "shape", None)
        return None if shape is None else tuple(shape)

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype of a value, under the same condition."""
        return getattr(self._known(name), "dtype", None)

    def _known(self, name: str) -> Any:
        """The tensor, or what a pass has noted of the value that is computed."""
        known = self.tensor(name)
        return known_value(self[name]) if known is None and isinstance(self[name], Node) else known

    def __repr__(self) -> str:
        return f"Found(inputs={self.inputs}, nodes={self.nodes})"


Condition = Callable[[Found], bool]


def pattern_name(node: Node) -> str:
    """What a node of a pattern is called."""
    return node.kwargs.get("name") or node.name if node.target is call_any else node.name


def is_fetch(value: Any) -> bool:
    """Whether a value is a node that fetches an attribute."""
    return isinstance(value, Node) and value.op == "get_attr"
