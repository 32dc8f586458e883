"""An exported program beside its model on the example it was made from: what torch.export shows a model is not quite what it sees
in eager (the classes of tensors, errors that it recovers from, torch.compiler.is_compiling()), and may have led it elsewhere.
Other inputs are the business of the conditions in `input_guards.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchgraft.bridge.model_watch import OutsideWatch, PlainTensors, forward_of
from torchgraft.bridge.refusals import title
from torchgraft.capturing.example import copied_input
from torchgraft.capturing.model_state import ModelState
from torchgraft.capturing.surroundings import Surroundings
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import BridgeError
from torchgraft.ir.guards import tensor_attributes
from torchgraft.ir.modules import paths_of_modules

_MOST_BYTES = 2**31
# How far results may be apart that were computed in another order, by the precision of their numbers.
_TOLERANCES = {torch.float64: 1e-6, torch.complex128: 1e-6, torch.float16: 5e-2, torch.bfloat16: 1e-1}


def check_on_example(
    module: torch.nn.Module, program: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise BridgeError if a program gives something else than the model on the example; both are left as they were.

    Programs that draw random numbers are not run, nor are those of tensors without data, nor those of very large models: what
    a run changes is put back from copies.
    """
    if not can_be_tried(module, program, (args, kwargs)):
        return
    expected, error = _result(module, module, args, kwargs)
    if error is not None:
        return  # then there is nothing to compare with
    found, error = _result(program, module, args, kwargs)
    problem = f"it raises {type(error).__name__}: {error}" if error is not None else _difference(expected, found)
    if problem is not None:
        raise BridgeError(
            f"cannot capture {title(module)}: on the example the exported program does not do what the model does: {problem}; "
            "the model looks at something that is different while torch.export runs it (the class of a tensor, an error that it "
            "recovers from, torch.compiler.is_compiling()); capture it at level 'function', which runs the model as it is"
        )


def can_be_tried(module: torch.nn.Module, program: GraphModule, inputs: Any) -> bool:
    """Whether a model and its program can be run beside one another."""
    held = [*module.parameters(), *module.buffers()]
    tensors = [value for value in (*held, *pytree.tree_leaves(inputs)) if isinstance(value, torch.Tensor)]
    is_large = sum(tensor.nbytes for tensor in held) > _MOST_BYTES
    return not is_large and all(map(_has_data, tensors)) and not _draws(program)


def _has_data(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "meta" and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _draws(program: GraphModule) -> bool:
    return any(
        torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        for part in program.modules()
        if isinstance(part, GraphModule)
        for node in part.graph.nodes
    )


def _result(
    callee: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Exception | None]:
    """What a model or its program gives in two calls one after the other, what it leaves in inputs and buffers, or what it
    raises; with everything put back that it changed."""
    found: dict[str, Any] = {}
    with put_back(module):
        try:
            for number in ("", " of a second call"):
                given = copied_inputs((args, kwargs))
                found[f"result{number}"] = _taken(callee(*given[0], **given[1]))
                found[f"input{number}"] = _taken(given)
            found["tensor of the model"] = _taken([*module.parameters(), *module.buffers()])
            return found, None
        except Exception as error:
            return None, error


@contextmanager
def put_back(module: torch.nn.Module) -> Iterator[None]:
    """Undo afterwards what is done to a model and to what it keeps outside."""
    paths = paths_of_modules(module)
    state, surroundings = ModelState(paths), Surroundings(paths)
    outside, plain = OutsideWatch(module, forward_of(module)), PlainTensors(module)
    for inner in paths:
        state.watch(inner)
    for parameter in module.parameters():
        surroundings.save(parameter)
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    places = [(tensor, tensor.data) for tensor in (*module.parameters(), *module.buffers()) if _has_data(tensor)]
    try:
        yield
    finally:
        for tensor, place in places:
            if tensor.shape != place.shape or tensor.data_ptr() != place.data_ptr():
                tensor.data = place
        plain.restore()
        state.restore()
        surroundings.restore()
        outside.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient


def copied_inputs(inputs: Any) -> Any:
    """Inputs with copies of the tensors in them; a tensor that is given twice stays one."""
    copies: dict[int, Any] = {}
    return pytree.tree_map(functools.partial(copied_input, copies=copies), inputs)


def _taken(tree: Any) -> list[Any]:
    """The leaves as they are now: later calls may write into them."""
    return [_copy(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in pytree.tree_leaves(tree)]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    result = tensor.detach().clone() if _has_data(tensor) else tensor
    if result is not tensor:
        result.requires_grad_(tensor.requires_grad)
        result.__dict__.update(tensor_attributes(tensor))
    return result


def _difference(expected: dict[str, list[Any]], found: dict[str, list[Any]]) -> str | None:
    """The first thing in which two runs differ, in words."""
    for kind, first in expected.items():
        second = found[kind]
        name, _, call = kind.partition(" of a second")
        if len(first) != len(second):
            return f"it gives {len(second)} values instead of {len(first)}"
        for number, (one, other) in enumerate(zip(first, second, strict=True), 1):
            text = f"{name} {number}{' of a second' if call else ''}{call}"
            if isinstance(one, torch.Tensor) != isinstance(other, torch.Tensor):
                return f"{text} is a {type(other).__name__} instead of a {type(one).__name__}"
            if isinstance(one, torch.Tensor) and not is_same(one, other):
                return f"{text} is {in_short(other)} instead of {in_short(one)}"
    return None


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same, up to the precision of their numbers."""
    if (one.shape, one.dtype, one.requires_grad) != (other.shape, other.dtype, other.requires_grad):
        return False
    if tensor_attributes(one).keys() != tensor_attributes(other).keys():
        return False
    if one.layout is not torch.strided or not _has_data(one):
        return True
    if not _has_data(other):
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    tolerance = _TOLERANCES.get(one.dtype, 1e-3)
    scale = one.detach().abs().nan_to_num(posinf=0.0).max().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * max(scale, 1e-6), equal_nan=True)


def in_short(tensor: torch.Tensor) -> str:
    """A tensor in a few words."""
    values = tensor.detach().flatten()[:3].tolist() if _has_data(tensor) else []
    numbers = ", ".join([f"{value:.4g}" for value in values if not isinstance(value, complex)])
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    return (
        f"{kind} [{numbers}{', ...' if tensor.numel() > 3 else ''}]{' with a gradient' if tensor.requires_grad else ''}"
    )
