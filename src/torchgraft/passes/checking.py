"""Checking that a pass left the result of a program as it was: one run before, one after, compared value by value.
A closer look at two runs, with gradients and other inputs, is the business of `torchgraft.verify`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchgraft.errors import PassError
from torchgraft.interpreter import Interpreter
from torchgraft.ir.origin import source_of
from torchgraft.ir.structures import parts_of, put_together, take_apart

if TYPE_CHECKING:
    from torchgraft.codegen.graph_module import GraphModule
    from torchgraft.ir.graph import Graph
    from torchgraft.ir.node import Node

# How far apart the same sum in another order may lie, as a part of the largest element.
_RELATIVE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_RELATIVE |= {torch.float16: 1e-2, torch.bfloat16: 5e-2}


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
        text = _difference(self._before.result, found.result)
        if text is not None:
            raise PassError(
                f"the pass {name} changed what the program computes: {text}; "
                f"the first node that differs is {self._first_difference(found)}; leave the pass out, or mend it"
            )
        self._before = found

    def _first_difference(self, found: _Observed) -> str:
        """The first node, in the order of the program, whose value is no longer what the node of that name had."""
        for name, value in found.values.items():
            if name in self._before.values and _difference(self._before.values[name], value) is not None:
                return _described(found.graph, name)
        for name in found.values:
            if name not in self._before.values:
                return f"{_described(found.graph, name)}, which the pass made"
        return "the output itself"


class _Observed:
    """One run: what came out (result, inputs and buffers as they are afterwards), and the value of every node."""

    def __init__(self, program: GraphModule, args: tuple[Any, ...]) -> None:
        self.graph = program.graph
        inputs = _copied(args)
        with restored(program):
            recorder = _Recorder(program)
            result = recorder.run(*inputs)
            buffers = {name: buffer.clone() for name, buffer in program.named_buffers()}
        self.values = recorder.values
        self.result = _Result(_copied(result), inputs, buffers)


class _Result:
    """What a caller can see of a run."""

    def __init__(self, result: Any, inputs: Any, buffers: dict[str, torch.Tensor]) -> None:
        self.result, self.inputs, self.buffers = result, inputs, buffers


class _Recorder(Interpreter):
    """Keeps a copy of every value, because later nodes may write into it."""

    def __init__(self, program: GraphModule) -> None:
        super().__init__(program)
        self.values: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op not in ("placeholder", "output", "get_attr"):
            self.values[n.name] = _copied(value)
        return value


class restored:  # noqa: N801 (reads as a phrase in a with statement)
    """Puts parameters, buffers and the random numbers of torch back, so that every run begins alike."""

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


def _copied(value: Any) -> Any:
    """The same value with copies of its tensors, wherever they are in it."""
    template, tensors = take_apart(value, lambda part: isinstance(part, torch.Tensor))
    return put_together(template, *map(_copied_tensor, tensors))


def _copied_tensor(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    return copied.requires_grad_(tensor.requires_grad) if tensor.is_leaf and tensor.requires_grad else copied


def _difference(expected: Any, found: Any) -> str | None:
    """Where two values differ, in words; None where they do not."""
    if isinstance(expected, _Result):
        shared = expected.buffers.keys() & found.buffers.keys()
        return (
            _difference(expected.result, found.result)
            or _prefixed("an input was written otherwise: ", _difference(expected.inputs, found.inputs))
            or next(
                (
                    text
                    for name in sorted(shared)
                    if (
                        text := _prefixed(
                            f"buffer '{name}': ", _difference(expected.buffers[name], found.buffers[name])
                        )
                    )
                ),
                None,
            )
        )
    return _value_difference(expected, found, ())


def _value_difference(first: Any, second: Any, above: tuple[int, ...]) -> str | None:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return _tensor_difference(first, second)
    parts, others = (None, None) if id(first) in above else (parts_of(first), parts_of(second))
    if parts is None or others is None:
        return None if id(first) in above or _equal(first, second) else f"{first!r} became {second!r}"
    kinds = {tuple if isinstance(value, torch.Size) else type(value) for value in (first, second)}
    if len(kinds) > 1 or list(parts) != list(others):
        return "the structure of the value is another"
    for step, part in parts.items():
        text = _value_difference(part, others[step], (*above, id(first)))
        if text is not None:
            return text
    return None


def _prefixed(prefix: str, text: str | None) -> str | None:
    return None if text is None else prefix + text


def _equal(first: Any, second: Any) -> bool:
    if first is second or type(first) is not type(second):
        return first is second
    try:
        return bool(first == second) or bool(first != first and second != second)
    except Exception:  # an object of the user's own may refuse to be compared; then there is nothing to hold it to
        return True


def _tensor_difference(expected: torch.Tensor, found: torch.Tensor) -> str | None:
    for fact in ("shape", "dtype", "device"):
        if getattr(expected, fact) != getattr(found, fact):
            return f"{fact} {getattr(expected, fact)} became {getattr(found, fact)}"
    if expected.device.type == "meta" or expected.numel() == 0 or torch.equal(expected, found):
        return None
    if not (expected.is_floating_point() or expected.is_complex()):
        return f"{int((expected != found).sum())} of {expected.numel()} values differ"
    scale = torch.nan_to_num(expected.abs(), 0.0, 0.0, 0.0).max()
    allowed = float(scale) * _RELATIVE.get(expected.dtype, 0.0)
    if torch.allclose(expected, found, rtol=0.0, atol=allowed, equal_nan=True):
        return None
    distance = torch.nan_to_num((expected - found).abs(), float("inf"), float("inf")).max()
    return f"values differ by up to {float(distance):.3g}, where {allowed:.1g} is allowed"


def _described(graph: Graph, name: str) -> str:
    node = next(node for node in graph.nodes if node.name == name)
    line = source_of(node)
    return f"'{name}'" + (f" ({line})" if line else "")
