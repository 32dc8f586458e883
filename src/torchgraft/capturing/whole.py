"""A model as one call: the program of a model that cannot be looked into, which runs the original Python.
When that is so is decided in `program.py`.
"""

from __future__ import annotations

import functools
import inspect
from types import FunctionType
from typing import Any

import torch

from torchgraft.capturing.example import bind, copied_input, placeholders
from torchgraft.capturing.model_state import ModelState
from torchgraft.capturing.parts import closed_over
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.graph import Graph
from torchgraft.ir.modules import paths_of_modules
from torchgraft.ir.node import Node


def call_whole(
    callee: Any,
    method: str,
    args: tuple[Any, ...],
    packed: tuple[Any, ...],
    named: dict[str, Any],
    packed_named: dict[str, Any],
) -> Any:
    """Call a function, or a method of an object, with arguments of which some come packed."""
    target = getattr(callee, method) if method else callee
    return target(*args, *packed, **named, **packed_named)


def whole_program(
    model: Any, root: torch.nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> GraphModule:
    """A program that calls the model; its submodule `model` is the model itself."""
    graph = Graph()
    bound = bind(model, args, kwargs)
    positional, packed, named, packed_named = _arguments(bound.signature, placeholders(graph, bound))
    holder = torch.nn.Module()
    if root is not None:
        holder.add_module("model", root)
        holder.training = root.training
    if packed is None and packed_named is None and (root is None or model is root):
        result = (
            graph.call_function(model, positional, named)
            if root is None
            else graph.call_module("model", positional, named)
        )
    else:
        callee = model if root is None else graph.get_attr("model")
        method = "" if model is root or root is None else model.__name__
        arguments: Any = (callee, method, positional, packed or (), named, packed_named or {})
        result = graph.call_function(call_whole, arguments)
    graph.output(result)
    return GraphModule(holder, graph, program_name(model))


def program_name(model: Any) -> str:
    """What the class of a model's program is called.

    >>> program_name(torch.nn.ReLU()), program_name(torch.relu), program_name(lambda x: x)
    ('ReLU', 'relu', 'GraphModule')
    """
    name = type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "")
    return name if name.isidentifier() else "GraphModule"


def _arguments(
    signature: inspect.Signature, nodes: dict[str, Node]
) -> tuple[tuple[Node, ...], Node | None, dict[str, Node], Node | None]:
    """Placeholders in the form in which the model takes them: one by one, packed, by name, packed by name."""
    kinds = inspect.Parameter
    of_kind = {name: parameter.kind for name, parameter in signature.parameters.items() if name in nodes}
    packed = next((nodes[name] for name, kind in of_kind.items() if kind is kinds.VAR_POSITIONAL), None)
    packed_named = next((nodes[name] for name, kind in of_kind.items() if kind is kinds.VAR_KEYWORD), None)
    # What has a default is given by name, as people do; decorators of a forward (transformers has some) count on it.
    positional, named = [], {}
    for name, parameter in signature.parameters.items():
        if name not in nodes or parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
            continue
        has_default = parameter.default is not kinds.empty and packed is None
        if parameter.kind is kinds.KEYWORD_ONLY or (has_default and parameter.kind is not kinds.POSITIONAL_ONLY):
            named[name] = nodes[name]
        else:
            positional.append(nodes[name])
    return tuple(positional), packed, named, packed_named


def modules_of(function: Any) -> torch.nn.Module:
    """A module that holds the modules which a function mentions, under the names it has for them."""
    holder = torch.nn.Module()
    function = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
    if isinstance(function, FunctionType):
        code = function.__code__
        found = closed_over(function)
        found |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
        for name, value in found.items():
            if isinstance(value, torch.nn.Module) and value not in holder._modules.values():
                holder._modules[name] = value
                holder.training = value.training
    return holder


def eager_error(model: Any, root: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """What the model itself raises on these inputs; it is left as it was."""
    state = ModelState(paths_of_modules(root))
    for module in state.paths:
        state.watch(module)
    state.tensors.save_all(root)
    copies: dict[int, Any] = {}
    try:
        model(*[copied_input(value, copies) for value in args], **copied_input(kwargs, copies))
    except Exception as error:
        return error
    finally:
        state.restore_all()
    return None
