"""How far a quantized program is from the floats: signal over noise and cosine, for results and for the values on the way.
What is made of the figures is in `reporting.py` and `searching.py`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from torchgraft.analysis.aliases import Aliases
from torchgraft.analysis.comparison import tensors_in
from torchgraft.capturing.state.model_state import kept_state
from torchgraft.codegen.calling import placeholder_values
from torchgraft.codegen.graph_module import GraphModule, with_own_graph
from torchgraft.errors import QuantizeError
from torchgraft.interpreter import Interpreter
from torchgraft.ir.node import Node, map_arg
from torchgraft.ir.verify import find_attribute
from torchgraft.quantize.calibrating import inputs_of
from torchgraft.quantize.observers import Observer
from torchgraft.quantize.operators import dequantize_tensor, quantize_tensor, scale_of_values
from torchgraft.quantize.plan import KEY

_BETWEEN = (dequantize_tensor, quantize_tensor, scale_of_values, operator.getitem)


class Error(NamedTuple):
    """The energy of a signal, of its noise, and what their cosine is made of; adds up over batches."""

    signal: float = 0.0
    noise: float = 0.0
    found: float = 0.0
    product: float = 0.0

    @classmethod
    def between(cls, expected: Any, found: Any) -> Error:
        """The error of the floating-point tensors in a value."""
        total = cls()
        for one, two in zip(tensors_in(expected), tensors_in(found), strict=True):
            if one.is_floating_point() and one.shape == two.shape:
                first, second = one.detach().double(), two.detach().double()
                parts = ((first**2).sum(), ((first - second) ** 2).sum(), (second**2).sum(), (first * second).sum())
                total = total.plus(cls(*[float(part) for part in parts]))
        return total

    def plus(self, other: Error) -> Error:
        """The error of both together."""
        return Error(*[one + two for one, two in zip(self, other, strict=True)])

    @property
    def sqnr(self) -> float:
        """The signal over the noise, in decibels."""
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    @property
    def cosine(self) -> float:
        """The cosine of the two."""
        return self.product / math.sqrt(self.signal * self.found) if self.signal and self.found else 1.0


def sqnr(model: Any, program: Any, data: Iterable[Any]) -> float:
    """The signal over the noise of a program's results, in decibels, over batches of data.

    >>> import torchgraft
    >>> model = torchgraft.zoo.create("mlp").eval()
    >>> sqnr(model, model, [torch.randn(4, 16)])
    inf
    """
    return error_of(model, program, data).sqnr


def error_of(model: Any, program: Any, data: Iterable[Any]) -> Error:
    """The error of a program's results over batches of data. Where runs change state that both share, it is put back."""
    total = Error()
    keeps, is_empty = changes_state(program), True
    with torch.no_grad():
        for batch in data:
            args, kwargs = inputs_of(batch)
            with kept_state(model) if keeps else nullcontext():
                expected = model(*args, **kwargs)
            with kept_state(program) if keeps else nullcontext():
                total = total.plus(Error.between(expected, program(*args, **kwargs)))
            is_empty = False
    if is_empty:
        raise QuantizeError(
            "there is no data to compare with\n"
            "give an iterable of batches such as [x1, x2]; an iterator has none left after it was used"
        )
    return total


def changes_state(program: Any) -> bool:
    """Whether a program writes tensors that it may share with the model it was made from."""
    if not isinstance(program, GraphModule):
        return False
    memory = Aliases(program.graph)
    tensors = [find_attribute(program, node.target)[0] for node in program.graph.find_nodes(op="get_attr")]
    return any(isinstance(tensor, torch.Tensor) and memory.is_known_to_be_written(tensor) for tensor in tensors)


def float_of(prepared: GraphModule) -> GraphModule:
    """A prepared program without its observers: what is computed in floats, norms folded."""
    result = with_own_graph(prepared)
    result.meta.pop(KEY, None)
    for node in list(result.graph.nodes):
        if node.op == "call_module" and isinstance(getattr(result, node.target, None), Observer):
            node.replace_all_uses_with(node.args[0])
            result.graph.erase_node(node)
    for name in [name for name, module in result.named_children() if isinstance(module, Observer)]:
        del result._modules[name]
    return result


class NodeErrors(NamedTuple):
    """For each node that both programs have: all of its error, and the part that arises in it."""

    total: dict[str, Error]
    own: dict[str, Error]


def node_errors(floats: GraphModule, quantized: GraphModule, data: Iterable[Any], layers: Iterable[str]) -> NodeErrors:
    """Run both programs and compare them node by node; for `layers` also what each does to inputs that are exact."""
    total: dict[str, Error] = {}
    own: dict[str, Error] = {}
    nodes = {node.name: node for node in quantized.graph.nodes}
    with torch.no_grad():
        for batch in data:
            exact, found = _values(floats, batch), _values(quantized, batch)
            for name, value in exact.items():
                if name in found and name in nodes and nodes[name].op.startswith("call_"):
                    total[name] = total.get(name, Error()).plus(Error.between(value, found[name]))
            alone = _Alone(quantized, exact)
            for name in layers:
                if name in nodes and name in exact:
                    own[name] = own.get(name, Error()).plus(Error.between(exact[name], alone.value_of(nodes[name])))
    return NodeErrors(total, own)


def _values(program: GraphModule, batch: Any) -> dict[str, Any]:
    args, kwargs = inputs_of(batch)
    running = Interpreter(program, garbage_collect_values=False)
    with kept_state(program) if changes_state(program) else nullcontext():
        running.run(initial_env=dict(placeholder_values(program, args, kwargs)))
    return {
        node.name: value
        for node, value in running.env.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }


class _Alone(Interpreter):
    """Computes one layer of a quantized program on the exact values of its inputs."""

    def __init__(self, program: GraphModule, exact: dict[str, Any]) -> None:
        super().__init__(program)
        self.exact = exact

    def value_of(self, node: Node) -> Any:
        """The value of a node whose inputs were exact."""
        args = map_arg(node.args, self._input)
        kwargs = map_arg(node.kwargs, self._input)
        return getattr(self, node.op)(node.target, args, kwargs)

    def _input(self, node: Node) -> Any:
        if node.op == "get_attr":
            return self.fetch_attr(node.target)
        is_between = node.target in _BETWEEN or (node.op == "call_method" and node.target == "to")
        if node.name in self.exact and not is_between:
            return self.exact[node.name]
        return self.value_of(node)
