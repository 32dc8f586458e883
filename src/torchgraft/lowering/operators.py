"""How an operator that torch runs becomes a node: its arguments, what it writes, and the traced tensors that are its results.
The program that is being written, its numbers and guards are in `recorder.py`; sizes of results in `sizes.py`.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType
from typing import Any

import torch

from torchgraft.analysis.schemas import schema_parameters
from torchgraft.capturing.flowing.sizes import SymbolicNumber, unwrapped, wrapped
from torchgraft.ir.arguments import leaves
from torchgraft.ir.guards import check_length, is_told_length
from torchgraft.ir.node import Node
from torchgraft.lowering.layouts import expanded, viewable
from torchgraft.lowering.recorder import Recorder
from torchgraft.lowering.sizes import known_sizes
from torchgraft.lowering.tensors import QUESTIONS, TracedTensor
from torchgraft.lowering.values import concrete

_SIZES_BY_VALUE = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
# Parameters that torch's functions and operators call by different names.
_SPELLED = {"train": "training"}
# Operators that write statistics in training mode, although their schemas do not say so.
_STATISTICS = frozenset(
    f"aten::{name}"
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm", "_batch_norm_impl_index")
)


def record(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
    """Run an operator on the real tensors and write it down."""
    answer = QUESTIONS.get(function)
    if answer is not None and args and type(args[0]) is TracedTensor:
        return answer(*args, **kwargs)
    if function is torch.ops.aten.lift_fresh.default:  # of a constant, which is made anew in every run
        function = torch.ops.aten.lift_fresh_copy.default
    result = _recorded(recorder, function, args, kwargs, mode)
    if recorder.decompositions is not None and _has_default_dtype((args, kwargs), result):
        recorder.guard_default_dtype()
    return result


def _has_default_dtype(given: Any, result: Any) -> bool:
    """Whether an operator gives floating-point numbers, and nothing that it is given says of which dtype."""
    floats = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor) and _is_rounded(leaf.dtype)]
    return bool(floats) and not any(
        isinstance(leaf, torch.dtype) or (isinstance(leaf, torch.Tensor) and _is_rounded(leaf.dtype))
        for leaf in leaves(given)
    )


def _is_rounded(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _recorded(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
    written = list(_written(function, args, kwargs))
    if torch.Tag.inplace_view not in function.tags:
        for tensor in written:
            recorder.guard_copies(tensor)
    if len(written) == 1 and recorder.decompositions is not None and torch.Tag.inplace_view not in function.tags:
        result = _without_write(recorder, function, written[0], args, kwargs, mode)
        if result is not None:
            return result
    decomposition = _decomposition(recorder, function)
    if decomposition is not None:
        with mode:
            result = decomposition(*args, **kwargs)
            if result is NotImplemented and decomposition is not function.decompose:
                result = function.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if recorder.may_take_usual_case:
        _note_broadcasts(recorder, function, args)
    if function is torch.ops.aten.view.default and recorder.decides_views():
        with mode:
            args = (viewable(*args), args[1])
    if len(written) == 1 and torch.Tag.inplace_view in function.tags:
        result = _as_view(recorder, function, written[0], args, kwargs)
        if result is not None:
            return result
    for tensor in written:
        recorder.before_write(tensor.actual)
    with recorder.silent():
        value = function(*concrete(args), **concrete(kwargs))
        if function is torch.ops.aten.expand.default and recorder.decompositions is not None:
            value = expanded(args[0], args[1], value)
    node = _node(recorder, function, args, kwargs)
    recorder.note_value(node, value)
    returns = function._schema.returns
    results = _Results(recorder, function, args, kwargs)
    if len(returns) == 1:
        return results.one(node, value, returns[0])
    return results.parts(node, value, returns) if isinstance(value, (tuple, list)) else value


def _note_broadcasts(recorder: Recorder, function: Any, args: tuple[Any, ...]) -> None:
    """Note the sizes of 1 that an operator broadcasts; of operators that are not known here, the backward finds out."""
    tensors = [item for item in args if type(item) is TracedTensor]
    if function is torch.ops.aten.expand.default:
        sizes = list(concrete(args[1]))
    elif len(tensors) > 1 and (torch.Tag.pointwise in function.tags or function is torch.ops.aten.copy_.default):
        shapes = [reversed(item.actual.size()) for item in tensors]
        sizes = [max(items) for items in itertools.zip_longest(*shapes, fillvalue=1)][::-1]
    else:
        return
    for tensor in tensors:
        recorder.note_broadcast(tensor, sizes)


def _decomposition(recorder: Recorder, function: Any) -> Callable[..., Any] | None:
    if recorder.decompositions is None:
        return None
    if function in recorder.decompositions:
        return recorder.decompositions[function]
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        function.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    )
    return function.decompose if is_composite else None


# ---- arguments ----


def _node(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    return recorder.create_node(
        "call_function", function, *_arguments(recorder, function, args, kwargs), _name(function)
    )


def _arguments(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    if "pin_memory" in kwargs and recorder.above is not None:
        kwargs = _as_written(recorder.above, kwargs)
    argument = recorder.argument
    if not recorder.flows:
        return tuple([argument(value) for value in args]), {name: argument(value) for name, value in kwargs.items()}
    parameters = function._schema.arguments
    names = [parameter.name for parameter in parameters]
    new_args = [_flowing(recorder, index, names[index], value) for index, value in enumerate(args)]
    new_kwargs = {name: _flowing(recorder, names.index(name), name, value) for name, value in kwargs.items()}
    for index, parameter in enumerate(parameters[len(args) :], len(args)):
        # What has the value of its default, torch leaves out.
        if parameter.name not in kwargs and parameter.has_default_value():
            value = _flowing(recorder, index, parameter.name, parameter.default_value)
            if isinstance(value, Node):
                new_kwargs[parameter.name] = value
    return tuple(new_args), new_kwargs


def _flowing(recorder: Recorder, index: int, name: str, value: Any) -> Any:
    for key in (name, _SPELLED.get(name, name), index):
        flow = recorder.flows.get(key)
        if flow is not None and type(flow.value) is type(value) and flow.value == value:
            flow.used = True
            return flow.node
    return recorder.argument(value)


def _as_written(above: Node, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options of a factory without those that torch has filled in: the program runs where the default device is another."""
    filled = {"pin_memory": False, "layout": torch.strided}
    if isinstance(above.target, BuiltinFunctionType) and "device" not in above.kwargs:
        filled["device"] = torch.get_default_device()
    return {name: value for name, value in kwargs.items() if name not in filled or value != filled[name]}


# ---- writes ----


def _without_write(recorder: Recorder, function: Any, tensor: TracedTensor, args: Any, kwargs: Any, mode: Any) -> Any:
    """Write an operator that writes in place down as the one that does not, or what that is made of, where nobody else sees that
    memory."""
    plain = _functional_form(function)
    if plain is None or tensor is not args[0] or not recorder.is_alone(tensor):
        return None
    if recorder.is_above_autograd and plain is torch.ops.aten.copy.default:
        return None  # it has no derivative, and `copy_` has one
    decomposition = _decomposition(recorder, plain)
    if decomposition is not None:
        with mode:
            made = decomposition(*args, **kwargs)
        if type(made) is not TracedTensor or (made.dtype, made.actual.shape) != (tensor.dtype, tensor.actual.shape):
            return None
        recorder.change(tensor, made.source, made.actual)
        return tensor
    value = plain(*concrete(args), **concrete(kwargs))
    old = tensor.actual
    if not isinstance(value, torch.Tensor) or (value.dtype, value.shape) != (old.dtype, old.shape):
        return None
    node = _node(recorder, plain, args, kwargs)
    recorder.change(tensor, node, value)
    recorder.note_value(node, value)
    return tensor


def _as_view(recorder: Recorder, function: Any, tensor: TracedTensor, args: Any, kwargs: Any) -> Any:
    """Write `transpose_` and its like, which give a tensor other sizes, down as the view that they make of its memory."""
    plain = _functional_form(function)
    if plain is None or tensor is not args[0] or tensor.node.op in ("placeholder", "get_attr"):
        return None
    for size in tensor.symbolic_sizes():
        recorder.argument(size)  # the sizes so far are those of the node so far
    value = plain(*concrete(args), **concrete(kwargs))
    node = _node(recorder, plain, args, kwargs)
    recorder.change(tensor, node, value)
    recorder.note_value(node, value)
    tensor.sizes = None
    return tensor


def _written(function: Any, args: Any, kwargs: Any, names: Any = None) -> Iterator[TracedTensor]:
    """The tensors that an operator writes, by its schema; of these, those known by certain names there."""
    schema = function._schema
    if schema.name in _STATISTICS and args[5] and names is None:
        yield from [item for item in args[3:5] if type(item) is TracedTensor]
    if not schema.is_mutable:
        return
    for index, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is None or not info.is_write or (names is not None and info.before_set != names):
            continue
        value = kwargs.get(argument.name, args[index] if index < len(args) else None)
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if type(item) is TracedTensor:
                yield item


@functools.cache
def _functional_form(function: Any) -> Any:
    """The operator that computes what another writes in place, or None."""
    namespace, _, name = function._schema.name.partition("::")
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    for overload in [] if packet is None else packet.overloads():  # `transpose_` is called `transpose.int` there
        plain = getattr(packet, overload)
        if not plain._schema.is_mutable and _parameters(plain) == _parameters(function):
            return plain
    return None


def _parameters(function: Any) -> list[Any]:
    return [(item.name, item.type, item.has_default) for item in schema_parameters(function)]


# ---- results ----


class _Results:
    """The results of one operator, as the run goes on with them."""

    def __init__(self, recorder: Recorder, function: Any, args: Any, kwargs: Any) -> None:
        self.recorder, self.function, self.args, self.kwargs = recorder, function, args, kwargs
        self.has_same_sizes = _gives_same_sizes(function, (args, kwargs))

    def one(self, source: Any, value: Any, schema: Any, number: int = 0) -> Any:
        """The value of a node, or of one that is made when it is needed; of several results, the one with this number."""
        recorder = self.recorder
        if isinstance(value, torch.Tensor):
            if schema.alias_info is not None and schema.alias_info.is_write:
                for tensor in _written(self.function, self.args, self.kwargs, schema.alias_info.before_set):
                    recorder.change(tensor, source)
                    return tensor
            result = recorder.traced(value, source, is_static=self.has_same_sizes)
            result.sizes = None if result.is_static else known_sizes(self.function, self.args, result, number)
            return result
        if isinstance(value, (tuple, list)):
            node = _made(source)
            name = _name(self.function)
            if not (self.has_same_sizes or is_told_length(name, self.args, self.kwargs)):
                arguments = (node, len(value), f"the number of results of {name}()", recorder.line())
                recorder.create_node("call_function", check_length, arguments, {})
            return self.parts(node, value, [schema] * len(value), is_numbered=False)
        if type(value) is bool:
            node = _made(source)
            recorder.guard(node, value, f"'{node.name}'")
            return value
        if isinstance(value, (int, float)):
            name = source.name if isinstance(source, Node) else "a result"
            return wrapped(SymbolicNumber(recorder, value, functools.partial(_made, source), f"'{name}'"))
        return value

    def parts(self, node: Node, values: Any, schemas: Any, is_numbered: bool = True) -> Any:
        """The items of a result that is a tuple or a list."""
        items = zip(values, schemas, strict=True)
        return type(values)(
            [
                self.one(part_of(self.recorder, node, index), item, schema, index if is_numbered else 0)
                for index, (item, schema) in enumerate(items)
            ]
        )


def part_of(recorder: Recorder, whole: Node, index: int) -> Callable[[], Node]:
    """What makes the node of one part of a result, when it is first needed; behind the result, wherever that is."""
    then = recorder.above, recorder.is_backward
    part: Node | None = None

    def make() -> Node:
        nonlocal part
        if part is not None and not part._erased:  # with a call that was taken back
            return part
        # It may be asked for in another module, or after the backward.
        now = recorder.above, recorder.is_backward
        recorder.above, recorder.is_backward = then
        last = whole
        while last.next.target in (operator.getitem, check_length) and last.next.args[0] is whole:
            last = last.next
        with recorder.graph.inserting_after(last):
            part = recorder.create_node("call_function", operator.getitem, (whole, index), {})
        recorder.above, recorder.is_backward = now
        value = whole.meta.get("val")
        if isinstance(value, (tuple, list)):
            part.meta["val"] = value[index]
        return part

    return make


def _made(source: Any) -> Node:
    return source if isinstance(source, Node) else source()


def _gives_same_sizes(function: Any, values: Any) -> bool:
    """Whether a result has the same size in every run: nothing that goes in has another one, and no values decide it."""
    if not _SIZES_BY_VALUE.isdisjoint(function.tags):
        return False
    return not any(
        unwrapped(leaf) is not None or (type(leaf) is TracedTensor and not leaf.is_static) for leaf in leaves(values)
    )


@functools.cache
def _name(function: Any) -> str:
    return str(function._schema.name.partition("::")[2])
