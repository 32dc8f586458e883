"""Checking that a pass left the result of a program as it was: one run before, one after, compared value by value.
A closer look at two runs, with gradients and other inputs, is the business of `torchgraft.verify`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchgraft.analysis.comparison import Tolerance, compare, frozen_leaves
from torchgraft.codegen.calling import copied_inputs
from torchgraft.errors import PassError
from torchgraft.interpreter import Interpreter
from torchgraft.ir.origin import source_of

if TYPE_CHECKING:
    from torchgraft.codegen.graph_module import GraphModule
    from torchgraft.ir.graph import Graph
    from torchgraft.ir.node import Node

# A pass may compute the same in another order: twice as far apart as two runs of the same operations, and some more.
_TOLERANCE = Tolerance(factor=4.0)
_SIDES = ("program before the pass", "program after it")


class Checker:
    """Compares a program with what it was before the last pass; the model's state is the same before every run."""

    def __init__(self, program: GraphModule, args: tuple[Any, ...]) -> None:
        self._program = program
        self._args = args
        self._before = _Observed(program, args)

    def after(self, name: str) -> None:
        """Raise PassError if the result is no longer what it was; what is right becomes what the next pass is held to."""
        try:
            found = _Observed(self._program, self._args)
        except Exception as error:  # whatever a program can raise
            raise PassError(
                f"the pass {name} broke the program: it ran before, and now it raises {type(error).__name__}: {error}"
            ) from error
        difference = _difference(self._before.seen, found.seen)
        if difference is not None:
            raise PassError(
                f"the pass {name} changed what the program computes\n{difference}\n"
                f"first node that differs: {self._first_difference(found)}\nleave the pass out, or fix it"
            )
        self._before = found

    def _first_difference(self, found: _Observed) -> str:
        """The first node, in the order of the program, whose value is no longer what the node of that name had."""
        for name, leaves in found.values.items():
            if name in self._before.values and _difference(self._before.values[name], leaves) is not None:
                return _described(found.graph, name)
        for name in found.values:
            if name not in self._before.values:
                return f"{_described(found.graph, name)}, which the pass made"
        return "the output itself"


class _Observed:
    """One run: what a caller can see of it (result, inputs and buffers as they are afterwards), and the value of every node."""

    def __init__(self, program: GraphModule, args: tuple[Any, ...]) -> None:
        self.graph = program.graph
        inputs, _ = copied_inputs(args, {})
        with restored(program):
            recorder = _Recorder(program)
            self.seen = frozen_leaves(recorder.run(*inputs), "result")
            for name, buffer in program.named_buffers():
                self.seen |= frozen_leaves(buffer, f"buffer '{name}'")
        self.seen |= frozen_leaves(inputs, "inputs")
        self.values = recorder.values


def _difference(expected: dict[str, Any], found: dict[str, Any]) -> str | None:
    """The first difference in words. A buffer may come and go: a pass may put a module beside one, or remove it."""
    shared = {path: leaf for path, leaf in expected.items() if path in found or not path.startswith("buffer ")}
    known = {path: leaf for path, leaf in found.items() if path in expected or not path.startswith("buffer ")}
    differences = compare(shared, known, _TOLERANCE, sides=_SIDES).differences
    return str(differences[0]) if differences else None


class _Recorder(Interpreter):
    """Keeps a copy of every value, because later nodes may write into it."""

    def __init__(self, program: GraphModule) -> None:
        super().__init__(program)
        self.values: dict[str, dict[str, Any]] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op not in ("placeholder", "output", "get_attr"):
            self.values[n.name] = frozen_leaves(value, n.name)
        return value


class restored:  # noqa: N801 (reads as a phrase in a with statement)
    """Restores parameters, buffers and the random numbers of torch, so that every run begins alike."""

    def __init__(self, program: GraphModule) -> None:
        tensors = [*program.parameters(), *program.buffers()]
        self._saved = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._random = torch.random.fork_rng(devices=())

    def __enter__(self) -> None:
        self._random.__enter__()
        torch.manual_seed(0)

    def __exit__(self, *details: Any) -> None:
        self._random.__exit__(*details)
        for tensor, content in self._saved:
            # Not by the version of the tensor, which writes through `.data` leave alone.
            if tensor.device.type != "meta" and not torch.equal(tensor, content):
                tensor.data.copy_(content)


def _described(graph: Graph, name: str) -> str:
    node = next(node for node in graph.nodes if node.name == name)
    line = source_of(node)
    return f"'{name}'" + (f" ({line})" if line else "")
