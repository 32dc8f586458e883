"""Code in which attributes and submodules are bound: they are what they were when it was made, without gradients. Nothing is
looked up. Who uses it has to notice that a model has changed; see `backends/watch.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from torchgraft.codegen.source import CodeGen, _Function
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import is_guard
from torchgraft.ir.node import Node
from torchgraft.ir.verify import find_attribute


class _BoundFunction(_Function):
    """Attributes and modules are globals of the code."""

    def _frees(self) -> dict[Node, list[Node]]:
        found = super()._frees()
        return {node: [item for item in items if item._op != "get_attr"] for node, items in found.items()}

    def _statement(self, node: Node) -> str | None:
        if node._op != "get_attr":
            return super()._statement(node)
        assert self.graph.owning_module is not None
        value = find_attribute(self.graph.owning_module, node._target)[0]
        # Autograd costs a little even where it is off.
        self.globals.values[node._name] = value.detach() if isinstance(value, torch.nn.Parameter) else value
        return None

    def _callee(self, target: Any) -> str:
        """A plain name, which is quicker to find than `torch._C._nn.linear`; and a check without what traces it."""
        text = super()._callee(target)
        if text[-1] != "(":
            return text
        name = text[:-1].rpartition(".")[2]
        return f"{self._bound(name, target.__wrapped__ if is_guard(target) else target)}("

    def _bound(self, name: str, value: Any) -> str:
        found = self.globals._names.create_name(name, None)
        self.globals.values[found] = value
        return found

    def _path(self, path: str) -> str:
        text = self._paths.get(path)
        if text is None:
            assert self.graph.owning_module is not None
            module = find_attribute(self.graph.owning_module, path)[0]
            # A module that only stands for a function says so, and is left out.
            function = getattr(module, "__torchgraft_function__", module)
            text = self._paths[path] = self._bound(path.replace(".", "_"), function)
        return text


class BoundCodeGen(CodeGen):
    """Generates code that is quicker to run, because it looks nothing up in the module.

    >>> import torch, torchgraft
    >>> program = torchgraft.capture(torch.nn.Linear(2, 2), torch.ones(1, 2), level="function")
    >>> program.graph.set_codegen(BoundCodeGen())
    >>> "self." in program.code, program(torch.ones(1, 2)).shape
    (False, torch.Size([1, 2]))
    """

    def _function(self, graph: Graph, root_module: str) -> _Function:
        return _BoundFunction(graph, root_module, self)
