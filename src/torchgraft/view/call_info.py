"""`node_call_info`: the arguments of a node under the names that the signature of what it calls gives them, defaults included.
Binding itself is done in `analysis/signatures.py`; here it is asked so that every node gets an answer, if only by position.
"""

from __future__ import annotations

import inspect
import typing
from dataclasses import dataclass
from typing import Any

import torch

from torchgraft.analysis.signatures import get_signature_for_torch_op, normalize_function
from torchgraft.errors import GraphError
from torchgraft.ir.node import Node
from torchgraft.ir.printing import target_text
from torchgraft.ir.verify import find_attribute


@dataclass(frozen=True)
class CallInfo:
    """What a node calls and with what. `arguments` are live values, nodes among them, in the order of the signature.

    Where nothing is known about the names (`bound` is False) they are `args[0]`, `args[1]`, ..., and no defaults are added.
    `given` are the names of the positional and keyword arguments that the node has itself, in the order in which it has them.

    >>> import torch, torchgraft
    >>> graph = torchgraft.symbolic_trace(lambda x: torch.sum(x, 1)).graph
    >>> [node] = graph.find_nodes(op="call_function", target=torch.sum)
    >>> torchgraft.node_call_info(node).arguments
    {'input': x, 'dim': 1, 'keepdim': False, 'dtype': None}
    """

    target: str
    arguments: dict[str, Any]
    bound: bool
    signature: str | None
    given: tuple[str, ...]


def node_call_info(node: Node) -> CallInfo:
    """The arguments of `node` bound to the signature of the operator, function, method or module that it calls.

    >>> from torchgraft import Graph
    >>> graph = Graph()
    >>> info = node_call_info(graph.call_function(torch.nn.functional.relu, (graph.placeholder("x"),)))
    >>> info.target, info.arguments
    ('torch.nn.functional.relu', {'input': x, 'inplace': False})
    """
    target = target_text(node.target)
    names = {"placeholder": ("default",), "output": ("result",), "get_attr": ()}.get(node.op)
    if names is not None:
        given = names[: len(node.args)]
        return CallInfo(target, dict(zip(given, node.args, strict=False)), True, None, given)
    signature, function, args = _callee(node)
    arguments = None if function is None else _bound(function, args, node.kwargs)
    start = 1 if node.op == "call_method" else 0
    if arguments is None and function is not None and len(args) > start + 1 and node.op != "call_module":
        # x.view(2, -1) and torch.zeros(2, 3) are short for x.view([2, -1]) and torch.zeros([2, 3]).
        packed = (*args[:start], list(args[start:]))
        arguments = _bound(function, packed, node.kwargs)
        if arguments is not None and not _takes_list(function, list(arguments)[start]):
            arguments = None
        args = args if arguments is None else packed
    if arguments is None:
        places = [f"args[{index}]" for index in range(len(node.args))]
        values = {**dict(zip(places, node.args, strict=True)), **node.kwargs}
        return CallInfo(target, values, False, signature, (*places, *node.kwargs))
    positional = list(arguments)[: len(args)]
    if len(args) < len(node.args):
        positional[start:] = [f"{positional[start]}[{index}]" for index in range(len(node.args) - start)]
    return CallInfo(target, arguments, True, signature, (*positional, *node.kwargs))


def _callee(node: Node) -> tuple[str | None, Any, tuple[Any, ...]]:
    """The text of the signature, what has it, and the arguments to bind."""
    if node.op == "call_module":
        module = find_attribute(node.graph.owning_module, node.target)[0]
        forward = module.forward if isinstance(module, torch.nn.Module) else None
        return _signature_text(forward), forward, node.args
    if node.op == "call_method":
        method = getattr(torch.Tensor, node.target, None)
        if inspect.isfunction(method):
            return _signature_text(method), method, node.args
        packet = getattr(torch.ops.aten, node.target, None) if method is not None else None
        return None, packet, node.args
    return _signature_text(node.target), node.target, node.args


def _signature_text(function: Any) -> str | None:
    if isinstance(function, torch._ops.OpOverload):
        return str(function._schema)
    if isinstance(function, torch._ops.OpOverloadPacket) or function is None:
        return None
    try:
        text = str(inspect.signature(function))
    except (TypeError, ValueError):
        return None
    return None if text == "(*args, **kwargs)" else text


def _bound(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Every argument by name, in the order of the signature; None where it cannot be said."""
    if function is getattr:  # the one function without a signature that programs are full of
        return dict(zip(("object", "name", "default"), args, strict=False))
    pair = None
    try:
        pair = normalize_function(function, args, kwargs, normalize_to_only_use_kwargs=True)
    except GraphError:
        # Several overloads fit what is known; a node whose value is not known is nearly always a tensor, or else a size.
        for guess in (torch.Tensor, int):
            types = tuple([_guessed_type(value, guess) for value in args])
            pair = pair or normalize_function(function, args, kwargs, types, normalize_to_only_use_kwargs=True)
    if pair is not None:
        return pair.kwargs
    try:
        call = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    kinds = {parameter.kind for parameter in call.signature.parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.VAR_KEYWORD in kinds:
        return None
    call.apply_defaults()
    return dict(call.arguments)


def _takes_list(function: Any, name: str) -> bool:
    if isinstance(function, torch._ops.OpOverload):
        return False  # operators take their arguments as they are
    for signature in get_signature_for_torch_op(function) or ():
        parameter = signature.parameters.get(name)
        kinds = [parameter.annotation, *typing.get_args(parameter.annotation)] if parameter is not None else []
        if any(typing.get_origin(kind) is list for kind in kinds):
            return True
    return False


def _guessed_type(value: Any, guess: type) -> Any:
    if isinstance(value, Node):
        return guess
    if isinstance(value, (list, tuple)):
        kinds = {type(item) for item in value if not isinstance(item, Node)} or {guess}
        return list[kinds.pop()] if len(kinds) == 1 else list  # type: ignore[misc]
    return type(value)
