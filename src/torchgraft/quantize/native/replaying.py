"""Runs of integer layers without Python in between: the operators that such a run calls are written down for each shape of its
inputs, and torch's own interpreter (TorchScript's) calls them one after the other. The layers are in `layers.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchgraft.codegen.graph_module import GraphModule, with_own_graph
from torchgraft.ir.guards import is_guard
from torchgraft.ir.node import Node
from torchgraft.ir.verify import find_attribute
from torchgraft.quantize.native.functions import look_up, quantize_fast
from torchgraft.quantize.native.layers import (
    IntegerLayer,
    IntegerLayerWithSum,
    Packing,
    changes_of_layers,
    outside_of_graphs,
)
from torchgraft.splitting.fusing import fuse_by_partitions

_Run = Callable[..., Any]
_aten: Any = torch.ops.aten
# What torch's interpreter calls types of numbers and orders of memory.
_CODES: dict[Any, int] = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int32: 3,
    torch.int64: 4,
    torch.float32: 6,
    torch.bfloat16: 15,
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}


def join_layers(program: GraphModule) -> GraphModule:
    """A native program whose integer layers are called in runs, without Python in between; the given one stays as it is.

    This pays for small batches, where a layer takes little longer than what is around its call. Results are the same bit by bit.
    The program says less: each run is one call, with its layers in a program of its own.

    >>> import torchgraft
    >>> layers = [torch.nn.Conv2d(2, 2, 1), torch.nn.ReLU(), torch.nn.Conv2d(2, 2, 1), torch.nn.ReLU(), torch.nn.Conv2d(2, 2, 1)]
    >>> native = torchgraft.quantize.quantize(torch.nn.Sequential(*layers).eval(), [torch.randn(1, 2, 4, 4)])
    >>> joined, x = join_layers(native), torch.randn(1, 2, 4, 4)
    >>> [node.name for node in joined.graph.nodes if node.op == "call_module"], torch.equal(joined(x), native(x))
    (['integers_0'], True)
    """
    result = with_own_graph(program)
    runs = _runs(result)
    fuse_by_partitions(result, [dict.fromkeys(run) for run in runs], prefix="integers_")
    for number in range(len(runs)):
        path = f"integers_{number}"
        result.add_module(path, Replay(result.get_submodule(path)))
    result.delete_all_unused_submodules()
    return result


def _runs(program: GraphModule) -> list[list[Node]]:
    """Layers, and what stands between them on bytes. What has nothing to do with a run is brought before it."""
    found: list[list[Node]] = [[]]
    for node in list(program.graph.nodes):
        run = found[-1]
        if _is_integer(node, program):
            run.append(node)
        elif run and _may_go_before(node, run):
            run[0].prepend(node)
        elif run:
            found.append([])
    return [run for run in found if sum(node.op == "call_module" for node in run) > 1]


def _may_go_before(node: Node, run: list[Node]) -> bool:
    """Whether a call between layers has nothing to do with them: a check, or a value that comes in from outside."""
    if any(source in run for source in node.all_input_nodes):
        return False
    reads = node.target is getattr and all(is_guard(user.target) for user in node._users)
    return node.op == "get_attr" or node.target is quantize_fast or is_guard(node.target) or reads


def _is_integer(node: Node, program: GraphModule) -> bool:
    if node.op == "call_module":
        return type(find_attribute(program, node.target)[0]) in (IntegerLayer, IntegerLayerWithSum)
    return node.op == "call_function" and node.target in (look_up, torch.cat, _aten.cat.default)


class Replay(Packing):
    """A part of a program, whose operators are called without Python from the second call with inputs of a shape on."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *inputs: torch.Tensor) -> Any:
        """The part on bytes."""
        return outside_of_graphs(self._run, *inputs) if torch.compiler.is_compiling() else self._run(*inputs)

    def _run(self, *inputs: torch.Tensor) -> Any:
        call = self._calls.get(_key(inputs))
        return self._run_anew(inputs) if call is None else call(*inputs)

    def _run_anew(self, inputs: tuple[torch.Tensor, ...]) -> Any:
        """Run layer by layer, and write down what that calls."""
        self.part(*_own(inputs))  # which packs weights, and chooses kernels for this shape
        again, recorder = _own(inputs), _Recorder()
        with recorder:
            result = self.part(*inputs)
        # What cannot be written down, or does not come to the same, stays as it is.
        call: _Run = self.part
        try:
            replayed = _script(recorder.calls, inputs, result)
            if _is_same(result, replayed(*again)):
                call = replayed
        except (_NotPlain, RuntimeError):
            pass
        self._calls.once(_key(again), lambda: call)
        return result


def _key(inputs: tuple[torch.Tensor, ...]) -> Any:
    return changes_of_layers(), *[(value.shape, value.stride()) for value in inputs]


def _own(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Copies laid out alike: layers with sums may write into what they are given."""
    return tuple([torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value) for value in inputs])


def _is_same(expected: Any, found: Any) -> bool:
    pairs = zip(_tuple(expected), _tuple(found), strict=True)
    return all(one.dtype == two.dtype and one.stride() == two.stride() and torch.equal(one, two) for one, two in pairs)


def _tuple(values: Any) -> tuple[torch.Tensor, ...]:
    return values if isinstance(values, tuple) else (values,)


class _NotPlain(Exception):
    """Something that cannot be written down as an operator of tensors and numbers."""


class _Recorder(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


def _script(calls: list[Any], inputs: tuple[torch.Tensor, ...], result: Any) -> _Run:
    """A function of TorchScript that calls these operators."""
    writer = _Writer(inputs)
    for function, args, kwargs, value in calls:
        writer.write(function, args, kwargs, value)
    constants, text = writer.finished(result)
    compiled = torch._C._create_function_from_graph("integers", torch._C.parse_ir(text))
    return lambda *values: compiled(*values, *constants)


class _Writer:
    """The text of a graph of TorchScript."""

    def __init__(self, inputs: tuple[torch.Tensor, ...]) -> None:
        self.names = {id(value): f"%in{place}" for place, value in enumerate(inputs)}
        self.parameters = list(self.names.values())
        self.constants: list[torch.Tensor] = []
        self.known: dict[tuple[str, str], str] = {}
        self.lines: list[str] = []

    def write(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A call."""
        if not isinstance(result, torch.Tensor) or function is _aten._local_scalar_dense.default:
            raise _NotPlain(str(function))
        schema = function._schema
        given = [
            args[place] if place < len(args) else kwargs.get(item.name, item.default_value)
            for place, item in enumerate(schema.arguments)
        ]
        if function is _aten.clone.default:
            # Kernels write into copies without saying so; two copies of a value must not be taken for one.
            source, order = self._value(given[0], "Tensor"), self._value(given[1], "MemoryFormat")
            empty, options = f"%copy{len(self.lines)}", ", ".join([self._value(None, "")] * 4)
            self.lines.append(f"{empty} : Tensor = aten::empty_like({source}, {options}, {order})")
            text = f"aten::copy_({empty}, {source}, {self._value(False, 'bool')})"
        else:
            values = [self._value(value, str(item.type)) for value, item in zip(given, schema.arguments, strict=True)]
            text = f"{schema.name}({', '.join(values)})"
        name = f"%out{len(self.lines)}"
        self.lines.append(f"{name} : Tensor = {text}")
        self.names[id(result)] = name

    def finished(self, result: Any) -> tuple[list[torch.Tensor], str]:
        """The tensors that the graph takes beside its inputs, and its text."""
        results = [self.names.get(id(value), "") for value in _tuple(result)]
        if not all(results):
            raise _NotPlain("a result that no operator made")
        if isinstance(result, tuple):
            kinds = ", ".join(["Tensor"] * len(results))
            self.lines.append(f"%all : ({kinds}) = prim::TupleConstruct({', '.join(results)})")
            results = ["%all"]
        constants = [f"{name} : {kind} = {value}" for (kind, value), name in self.known.items()]
        body = "\n".join(f"  {line}" for line in [*constants, *self.lines])
        parameters = ", ".join(f"{name} : Tensor" for name in self.parameters)
        return self.constants, f"graph({parameters}):\n{body}\n  return ({results[0]})\n"

    def _value(self, value: Any, kind: str) -> str:
        """The name of an argument in the graph."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self.names:
                self.names[id(value)] = f"%constant{len(self.constants)}"
                self.parameters.append(self.names[id(value)])
                self.constants.append(value)
            return self.names[id(value)]
        if value is None:
            return self._constant("NoneType", "prim::Constant()")
        if type(value) is torch.dtype or type(value) is torch.memory_format:
            if value not in _CODES:
                raise _NotPlain(str(value))
            return self._constant("int", f"prim::Constant[value={_CODES[value]}]()")
        if isinstance(value, bool):
            return self._constant("bool", f"prim::Constant[value={int(value)}]()")
        if isinstance(value, str) and re.fullmatch(r"\w*", value):
            return self._constant("str", f'prim::Constant[value="{value}"]()')
        if type(value) is float or (type(value) is int and "float" in kind):
            return self._constant("float", f"prim::Constant[value={_exactly(value)}]()")
        if type(value) is int:
            return self._constant("int", f"prim::Constant[value={value}]()")
        if isinstance(value, (list, tuple)):
            return self._list(value, kind)
        raise _NotPlain(type(value).__name__)

    def _list(self, values: Any, kind: str) -> str:
        if values and all(type(value) is int for value in values):
            return self._constant("int[]", f"prim::Constant[value={list(values)}]()")
        if kind == "List[Tensor]":
            names, name = [self._value(value, "Tensor") for value in values], f"%list{len(self.lines)}"
            self.lines.append(f"{name} : Tensor[] = prim::ListConstruct({', '.join(names)})")
            return name
        if kind == "List[Optional[number]]":
            names = [self._value(value, "float") for value in values]
            return self._constant("Scalar?[]", f"prim::ListConstruct({', '.join(names)})")
        raise _NotPlain(kind)

    def _constant(self, kind: str, value: str) -> str:
        return self.known.setdefault((kind, value), f"%known{len(self.known)}")


def _exactly(value: float) -> str:
    """A number as the text of a graph takes it, which knows neither `1` for a float nor names of numbers."""
    text = repr(float(value))
    if not torch.isfinite(torch.tensor(value, dtype=torch.float64)):
        raise _NotPlain(text)
    return text
