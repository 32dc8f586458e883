"""`lower`: a captured program in ATen or core ATen operators, with the same guards, free sizes, regions and calls kept whole.
How an operator becomes a node is in `recorder.py`; forward and backward as one program are in `joint.py`.
"""

from __future__ import annotations

import inspect
import math
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchgraft.capturing.flowing.sizes import SymbolicNumber, combine, unwrapped, wrapped
from torchgraft.capturing.state.model_state import ModelState
from torchgraft.codegen.calling import copied_inputs, example_inputs, placeholder_values
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import is_guard
from torchgraft.ir.modules import paths_of_modules
from torchgraft.ir.node import Node, map_arg
from torchgraft.ir.verify import find_attribute
from torchgraft.lowering.decompositions import core_decompositions
from torchgraft.lowering.guards import guard_tensors
from torchgraft.lowering.indexing import indexed, is_simple_index
from torchgraft.lowering.modes import recording
from torchgraft.lowering.recorder import Flow, Recorder, concrete
from torchgraft.lowering.tensors import TracedTensor, can_be_traced


def lower(
    program: GraphModule, args: Any = (), kwargs: dict[str, Any] | None = None, *, level: str = "aten"
) -> GraphModule:
    """The program in torch's operators, at level "aten" or "core_aten".

    It is run once, node by node, on copies of the inputs, which have to pass its guards; the operators that torch runs for a
    node take its place. It should be a program at level "function": modules that it calls stay calls. Guards, sizes, regions
    and calls that were kept whole stay the nodes they are, and each new node has the name of the node it comes from in
    `meta["from_node"]`, with its source line and module path.

    >>> import torchgraft
    >>> program = torchgraft.capture(torch.nn.Linear(2, 3), (torch.ones(4, 2),), level="function")
    >>> lowered = lower(program, (torch.ones(4, 2),))
    >>> [str(node.target) for node in lowered.graph.nodes if "aten" in str(node.target)]
    ['aten.linear.default']
    >>> lowered(torch.ones(7, 2)).shape
    torch.Size([7, 3])
    """
    if level not in ("aten", "core_aten"):
        raise ValueError(f'level must be "aten" or "core_aten", not "{level}"')
    if not isinstance(program, GraphModule):
        raise TypeError(
            f"expected a captured program, got a {type(program).__name__}\n  capture(model, args, level={level!r}) takes a model"
        )
    if "" in program.meta.get("kept_whole", {}):
        return program  # one call, at every level
    is_core = level == "core_aten"
    recorder = Recorder(is_above_autograd=True, decompositions=core_decompositions() if is_core else None)
    walk = Walk(program, recorder, placeholder_values(program, *copied_inputs(*example_inputs(args, kwargs))))
    walk.run()
    recorder.note_numbers()
    recorder.graph.set_codegen(program.graph._codegen)
    result = GraphModule(program, recorder.graph, type(program).__name__)
    result._adopt_state(program)
    result.meta.update(program.meta)
    result.meta["kept_calls"] = walk.kept
    drop_unused(result)
    return result


def inputs_text(program: GraphModule) -> str:
    """Where a guard on inputs stands."""
    return f"the inputs of {type(program).__name__}"


class Walk:
    """One run of a program on traced tensors."""

    def __init__(self, program: GraphModule, recorder: Recorder, inputs: dict[Node, Any]) -> None:
        self.program = program
        self.recorder = recorder
        self.inputs = inputs
        self.env: dict[Node, Any] = {}
        # Calls of torch that could not be taken apart, by the name of the node, and why.
        self.kept: dict[str, str] = {}
        self._attributes: dict[str, Any] = {}
        self._placeholders: dict[Node, Any] = {}
        self._contexts: list[Any] = []

    def run(self) -> None:
        """Write down the whole program; the model, its tensors and the random numbers are restored afterwards."""
        recorder, program = self.recorder, self.program
        self._state = state = ModelState(paths_of_modules(program))
        recorder.before_write = state.tensors.save_if_known
        for module in state.paths:
            state.watch(module)
        try:
            self.begin()
            for node in program.graph.nodes:
                recorder.begin(node)
                self.env[node] = self.node(node)
        finally:
            for context in reversed(self._contexts):
                context.__exit__(None, None, None)
            state.restore_all()

    def begin(self) -> None:
        """Make the inputs, and have the program check what the operators are going to be chosen by."""
        inputs, held = {}, {}
        for node, value in self.inputs.items():
            new = self.recorder.create_node("placeholder", node.target, node.args, {}, node.name, node.type)
            new._origin = node._origin
            self._placeholders[node] = known = self._known(value, new, is_outside=True)
            if type(known) is TracedTensor:
                inputs[node.name] = known
        if self.recorder.decompositions is not None:
            targets = dict.fromkeys(str(node.target) for node in self.program.graph.find_nodes(op="get_attr"))
            held = {name: value for name in targets if type(value := self._attribute(name)) is TracedTensor}
        guard_tensors(self.recorder, inputs, held, inputs_text(self.program))

    def node(self, node: Node) -> Any:
        """Write down one node of the program; its value."""
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        args, kwargs = map_arg(node.args, self.env.__getitem__), map_arg(node.kwargs, self.env.__getitem__)
        if node.op == "output":
            output = self.recorder.create_node("output", "output", self.recorder.argument(args), {})
            output.meta["val"] = map_arg(output.args[0], lambda result: result.meta.get("val"))
            return output
        if is_guard(node.target):
            # A guard on what turned out to be the same in every run says nothing.
            return None if not _has_nodes((args, kwargs)) else self._copied(node, args, kwargs)
        number = _arithmetic(self.recorder, node, args, kwargs)
        if number is not None:
            return number
        if node.op == "call_module" and node.target not in self.program.meta.get("kept_whole", {}):
            self.kept[node.name] = "the program calls a module; capture it at level 'function' to see inside"
        if node.op == "call_module" or _is_opaque(node, args, kwargs):
            return self._kept(node, args, kwargs)
        last = self.recorder.begin(node)
        try:
            return self._traced(node, args, kwargs)
        except Exception as error:  # what torch cannot do with traced tensors, a program can still call
            self.recorder.take_back(last)
            self.kept[node.name] = f"{type(error).__name__}: {error}"
            return self._kept(node, args, kwargs)

    # ---- where values come from ----

    def _placeholder(self, node: Node) -> Any:
        return self._placeholders[node]

    def _attribute(self, target: str) -> Any:
        if target not in self._attributes:
            value, problem = find_attribute(self.program, target)
            assert problem is None, problem
            node = self.recorder.create_node("get_attr", target, (), {})
            if isinstance(value, torch.Tensor) and can_be_traced(value):
                actual = value if self.recorder.is_above_autograd else value.detach()
                self._attributes[target] = self.recorder.traced(actual, node, is_static=True, is_outside=True)
            else:
                self._attributes[target] = Flow(value, node)
        return self._attributes[target]

    def _known(self, value: Any, node: Node, is_outside: bool = False) -> Any:
        """A value of this run that is the value of a node."""
        if isinstance(value, torch.Tensor) and can_be_traced(value):
            actual = value if self.recorder.is_above_autograd else value.detach()
            return self.recorder.traced(actual, node, is_outside=is_outside)
        if type(value) is int:
            return wrapped(SymbolicNumber(self.recorder, value, lambda: node, node.name))
        return Flow(value, node)

    # ---- what becomes of a call ----

    def _copied(self, node: Node, args: Any, kwargs: Any) -> Node:
        argument = self.recorder.argument
        return self.recorder.create_node(node.op, node.target, argument(args), argument(kwargs), node.name, node.type)

    def _kept(self, node: Node, args: Any, kwargs: Any) -> Any:
        """The same call in the new program; run on the real tensors."""
        plain_args, plain_kwargs = concrete(args), concrete(kwargs)
        if node.op == "call_module":
            module = self.program.get_submodule(str(node.target))
            self._state.tensors.save_all(module)
            function: Callable[..., Any] = module
        elif node.op == "call_method":
            function = getattr(plain_args[0], str(node.target))
            plain_args = plain_args[1:]
        else:
            function = node.target
        if node.target in _MOVING:
            for tensor in _traced_in((args, kwargs)):
                self._state.tensors.save_if_known(tensor.actual)
                self._state.tensors.keep_place(tensor.actual)
        value = function(*plain_args, **plain_kwargs)
        if node.target is enter_context:
            self._contexts.append(value)
        elif node.target is exit_context:
            self._contexts.pop()
        new = self._copied(node, args, kwargs)
        for tensor in _traced_in((args, kwargs)):
            if self.recorder.is_above_autograd:
                tensor.requires_grad_(tensor.actual.requires_grad)
            if tensor.actual is value:  # it was written, or a flag of it was set
                tensor.source = new
                return tensor
        # It may be, or share memory with, what others hold.
        return self._known(value, new, is_outside=True)

    def _traced(self, node: Node, args: Any, kwargs: Any) -> Any:
        """The operators that a call of torch runs, in its place."""
        recorder = self.recorder
        if node.target is torch.tensor:
            node, args, kwargs = _constant(recorder, node, args, kwargs)
        recorder.flows = flows = _flows(node, args, kwargs)
        before = recorder.graph._root._prev
        try:
            with recording(recorder), recorder.asking():
                value = _call(node, plain_values(args), plain_values(kwargs))
        finally:
            recorder.flows = {}
        if _is_constant_size(node, value):
            return value
        is_written = recorder.graph._root._prev is not before
        if not _is_traced(value) and not (value is None and is_written):
            recorder.take_back(before)
            return self._kept(node, args, kwargs)
        for flow in (*flows.values(), *_nested_flows(args), *_nested_flows(tuple(kwargs.values()))):
            if not flow.used:
                recorder.guard_flow(flow)
            flow.used = False
        return value


_FULL, _TO = Graph().call_function(torch.full), Graph().call_method("to")


def _constant(recorder: Recorder, node: Node, args: Any, kwargs: Any) -> tuple[Node, Any, Any]:
    """`torch.tensor(...)` as a call of which the dtype and the device are arguments of an operator."""
    if isinstance(concrete(args[0]), (int, float)):
        return _FULL, ((), *args), {"dtype": torch.tensor(concrete(args[0])).dtype, **kwargs}
    if kwargs.keys() <= {"dtype", "device"} and not _has_nodes(args):
        value = torch.tensor(concrete(args[0]))
        return _TO, (recorder.traced(value, recorder.constant(value), is_static=True, is_outside=True),), kwargs
    return node, args, kwargs


def _flows_in(values: Any) -> list[Flow]:
    args, kwargs = values
    given = (*args, *kwargs.values())
    return [*[item for item in given if type(item) is Flow], *_nested_flows(given)]


def _nested_flows(values: tuple[Any, ...]) -> Iterator[Flow]:
    """Values that flow inside of containers, where no operator takes them as they are."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from [item for item in value if type(item) is Flow]
            yield from _nested_flows(tuple(value))
        elif isinstance(value, dict):
            yield from _nested_flows((tuple(value.values()),))


def _is_constant_size(node: Node, value: Any) -> bool:
    """Whether a call asks for a size that is known to be the same in every run."""
    is_size = node.target in ("size", "numel") or (node.target is getattr and node.args[1] == "shape")
    return is_size and all(type(item) is int for item in (value if isinstance(value, tuple) else (value,)))


def _has_nodes(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_nodes, value))
    if isinstance(value, dict):
        return any(map(_has_nodes, value.values()))
    return type(value) in (TracedTensor, Flow) or unwrapped(value) is not None


def _arithmetic(recorder: Recorder, node: Node, args: Any, kwargs: Any) -> Any:
    """The result of arithmetic on numbers, itself symbolic; None where a call is anything else."""
    is_known = node.op == "call_function" and node.target in _ARITHMETIC and not kwargs
    if not is_known or not all(type(value) in (int, float) or unwrapped(value) is not None for value in args):
        return None
    operands = [unwrapped(value) or SymbolicNumber(recorder, value, None) for value in args]
    name = node.target.__name__
    result = combine(node.target, _SIGNS.get(name, name), *operands)
    return wrapped(result)


_SIGNS = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "truediv": "/", "mod": "%", "pow": "**"}
_SIGNS |= {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_ARITHMETIC = frozenset(
    {*[getattr(operator, name) for name in _SIGNS], operator.neg, min, max, int, math.ceil, math.floor}
)

_PLAIN_MODULES = frozenset({"builtins", "_operator", "operator", "math"})


# Attributes of a tensor that are tensors computed from it, or its sizes; all others are asked of the real tensor.
_COMPUTED = frozenset({"shape", "T", "mT", "H", "mH", "real", "imag"})
# What may give a tensor another memory.
_MOVING = frozenset({setattr, "set_", "resize_", "resize_as_"})
# Methods that take memory out of torch or speak to autograd, which traced tensors know nothing of.
_LEAVING = frozenset(
    {"tolist", "numpy", "data_ptr", "requires_grad_", "backward", "register_hook", "retain_grad", "set_"}
)


def _is_opaque(node: Node, args: Any, kwargs: Any) -> bool:
    """Whether a call is not torch's, computes no tensors, or does what only real tensors can: it stays the call it is."""
    target: Any = node.target
    if target is torch.tensor and _has_nodes(args[0]) and not isinstance(concrete(args[0]), (int, float)):
        return True
    if any(isinstance(item.value, torch.Tensor) for item in _flows_in((args, kwargs))):
        return True  # a tensor of a kind that is not traced
    if node.op == "call_method":
        return target in _LEAVING or not has_traced((args, kwargs))
    if target is getattr or target is setattr:
        return target is setattr or args[1] not in _COMPUTED or not has_traced(args)
    home = getattr(target, "__module__", None) or ""
    if home in _PLAIN_MODULES and isinstance(target, (types.BuiltinFunctionType, type)):
        return not has_traced((args, kwargs))
    if isinstance(target, type) or isinstance(getattr(target, "__self__", None), type):
        return True  # a class, or a method of one: Parameter(...), Function.apply
    return not (home == "torch" or home.startswith("torch.") or not home) or home.startswith(_ABOUT_GRADIENTS)


_ABOUT_GRADIENTS = ("torch.autograd", "torch.func", "torch._functorch", "torch.utils")


def has_traced(value: Any) -> bool:
    """Whether there is a traced tensor in a tree of arguments."""
    return next(_traced_in(value), None) is not None


def _traced_in(value: Any) -> Iterator[TracedTensor]:
    """The traced tensors in a tree of arguments."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _traced_in(item)
    elif isinstance(value, dict):
        yield from _traced_in(tuple(value.values()))
    elif isinstance(value, slice):
        yield from _traced_in((value.start, value.stop, value.step))
    elif type(value) is TracedTensor:
        yield value


def _is_traced(value: Any) -> bool:
    """Whether all of a result is known to the recorder."""
    if isinstance(value, (tuple, list)):
        return bool(value) and all(map(_is_traced, value))
    return type(value) is TracedTensor or unwrapped(value) is not None


def plain_values(value: Any) -> Any:
    """Values as torch takes them: traced tensors and symbolic numbers stay, all else is plain, containers are new."""
    if isinstance(value, tuple):
        items = [plain_values(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [plain_values(item) for item in value]
    if isinstance(value, dict):
        return {key: plain_values(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(plain_values(value.start), plain_values(value.stop), plain_values(value.step))
    return value.value if type(value) is Flow else value


def _flows(node: Node, args: Any, kwargs: Any) -> dict[int | str, Flow]:
    """The values among the arguments that flow, by position and name."""
    found: dict[int | str, Flow] = {name: value for name, value in kwargs.items() if type(value) is Flow}
    names = _parameters(node.target) if node.op == "call_function" else []
    for index, value in enumerate(args):
        if type(value) is Flow and node.target == "to" and type(value.value) in _MOVED_BY:
            found[_MOVED_BY[type(value.value)]] = value
        elif type(value) is Flow:
            found[names[index] if index < len(names) else index] = value
    return found


def _parameters(function: Any) -> list[str]:
    """The names of a function's parameters, where it is written in Python."""
    return list(inspect.signature(function).parameters) if isinstance(function, types.FunctionType) else []


_MOVED_BY = {torch.device: "device", torch.dtype: "dtype"}


def _moved(method: str, args: Any, kwargs: Any) -> Any:
    """`x.to(...)`, `x.cpu()`: torch's methods read the dtype of the tensor, and the dtype and device of another, before any
    operator is asked."""
    tensor, *rest = args
    if method == "to" and rest and type(rest[0]) is TracedTensor:
        return torch.ops.aten.to.other(*args, **kwargs)
    is_alone = len(rest) == 1 and not kwargs and isinstance(rest[0], (str, int, torch.device))
    device = rest[0] if is_alone else kwargs["device"] if not rest and kwargs.keys() == {"device"} else None
    if method != "to" and not rest and not kwargs:
        device = method
    if device is None:
        return getattr(tensor, method)(*rest, **kwargs)
    return torch.ops.aten.to.dtype_layout(tensor, device=torch.device(device))


def _call(node: Node, args: Any, kwargs: Any) -> Any:
    if node.target is operator.getitem and is_simple_index(*args):
        return indexed(*args)
    if node.target in ("to", "cpu", "cuda"):
        return _moved(str(node.target), args, kwargs)
    if node.target == "contiguous":  # torch's method gives a contiguous tensor back before any operator is asked
        layout = args[1] if len(args) > 1 else kwargs.get("memory_format", torch.contiguous_format)
        return torch.ops.aten.contiguous.default(args[0], memory_format=layout)
    if node.target is operator.setitem and not isinstance(args[2], torch.Tensor):
        args[0].recorder.note_fact(args[0], "dtype")  # torch makes a tensor of the value, with this dtype
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


def drop_unused(program: GraphModule) -> None:
    """Drop what was fetched and never used, and sizes that nobody needed after all."""
    for node in reversed(program.graph.nodes):
        is_read = node.op == "get_attr" or node.target in _READS
        if is_read and not node.users:
            program.graph.erase_node(node)


_READS = frozenset(
    {
        "size",
        "stride",
        torch.ops.aten.detach.default,
        getattr,
        operator.getitem,
    }
)
