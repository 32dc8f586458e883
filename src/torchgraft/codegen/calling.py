"""Example inputs: the one convention in which every function of torchgraft takes them, copies of them that a run may write
into, and how a program receives them. Fakes of inputs are made in `analysis/fake.py`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from torchgraft.codegen.source import CodeGen
from torchgraft.errors import InputError
from torchgraft.ir.structures import take_apart

if TYPE_CHECKING:
    from torchgraft.codegen.graph_module import GraphModule
    from torchgraft.ir.node import Node


def example_inputs(args: Any = (), kwargs: Any = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword inputs of a call: `args` is a tuple of inputs or one tensor, `kwargs` a dict or None.

    A list is refused, because it may be meant as several inputs or as one input that is a list.

    >>> example_inputs(torch.ones(2))
    ((tensor([1., 1.]),), {})
    >>> example_inputs((1, 2), {"scale": 3})
    ((1, 2), {'scale': 3})
    """
    if isinstance(args, torch.Tensor):
        args = (args,)
    elif not isinstance(args, tuple):
        raise InputError(f"expected a tuple of inputs or one tensor for args, got {_kind(args)}\n{_advice(args)}")
    if kwargs is None:
        return args, {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        advice = "give several inputs as a tuple: f(model, (x, y))" if isinstance(kwargs, torch.Tensor) else ""
        raise InputError(f"expected a dict of keyword inputs for kwargs, got {_kind(kwargs)}\n{advice}".rstrip())
    return args, dict(kwargs)


def copied_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], replacements: dict[int, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A copy of inputs, tensors that share memory still sharing it; `replacements` by the identity of the original.

    >>> x = torch.ones(2)
    >>> (first, second), _ = copied_inputs((x, [x]), {})
    >>> first is second[0], first is x
    (True, False)
    """
    memo = dict(replacements or {})
    for tensor in _tensors((args, kwargs)):
        if not tensor.is_leaf and id(tensor) not in memo:  # torch copies no tensor that was computed from others
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    try:
        result = copy.deepcopy((args, kwargs), memo)
    except (TypeError, RuntimeError, NotImplementedError):
        # Something in the inputs cannot be copied (a generator, a lock): the tensors are, the rest is handed on.
        result = pytree.tree_map(lambda leaf: _copied_leaf(leaf, memo), (args, kwargs))
    for tensor in _tensors(result):
        tensor.grad = None
    return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return take_apart(value, lambda part: isinstance(part, torch.Tensor))[1]


def _copied_leaf(leaf: Any, memo: dict[int, Any]) -> Any:
    if id(leaf) not in memo:
        if isinstance(leaf, torch.Tensor):
            memo[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        elif isinstance(leaf, torch.Generator):
            memo[id(leaf)] = leaf.clone_state()
    return memo.get(id(leaf), leaf)


def of_batch(args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of another batch: the first dimension of the first tensor, and of those that share it, is repeated or cut.

    >>> of_batch((torch.ones(2, 3), torch.ones(2)), {}, 5)[0][0].shape
    torch.Size([5, 3])
    """
    old = batch_of(args, kwargs)
    if old is None:
        return args, kwargs
    change = [tensor for tensor in _tensors((args, kwargs)) if tensor.dim() and tensor.shape[0] == old]
    index = torch.arange(batch) % old
    return copied_inputs(args, kwargs, {id(item): item.detach()[index.to(item.device)].clone() for item in change})


def batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The first dimension of the first tensor that has one; None where there is no such tensor.

    >>> batch_of((torch.tensor(1.0), torch.ones(2, 3)), {})
    2
    """
    return next((tensor.shape[0] for tensor in _tensors((args, kwargs)) if tensor.dim()), None)


def placeholder_values(
    program: GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> dict[Node, Any]:
    """The value of each placeholder of a program in a call with these inputs.

    >>> import torchgraft
    >>> placeholder_values(torchgraft.symbolic_trace(lambda x, y, scale=2: (x + y) * scale), (1,), {"y": 5})
    {x: 1, y: 5, scale: 2}
    """
    signature = inspect.signature(program.forward)
    try:
        bound = signature.bind(*args, **(kwargs or {}))
    except TypeError as error:
        raise InputError(f"the program cannot be called with these inputs: {error}\nit takes {signature}") from None
    bound.apply_defaults()
    values = list(bound.arguments.values())
    if type(program.graph._codegen).process_inputs is not CodeGen.process_inputs:
        values = list(program.graph.process_inputs(*values))
    nodes = [node for node in program.graph.nodes if node._op == "placeholder"]
    return dict(zip(nodes, values, strict=True))


def _kind(value: Any) -> str:
    """A value in a few words: `a list of str`, `an int`, `None`."""
    if value is None:
        return "None"
    name = type(value).__name__
    text = f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
    kinds = {type(item).__name__ for item in value} if isinstance(value, (list, set, frozenset)) else set()
    return f"{text} of {kinds.pop()}" if len(kinds) == 1 else text


def _advice(args: Any) -> str:
    if isinstance(args, list):
        return "for several inputs write tuple(inputs); for one input that is a list write (inputs,)"
    if isinstance(args, Mapping):
        return "for keyword inputs write kwargs=inputs; for one input that is a dict write (inputs,)"
    if isinstance(args, str):
        return "a file name is given by its keyword, such as path="
    return "for one input write (value,); for none leave args out"
