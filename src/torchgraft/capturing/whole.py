"""A model as one call: the program of a model that cannot be looked into, which runs the original Python.
When that is so is decided in `program.py`.
"""

from __future__ import annotations

import functools
import inspect
from types import FunctionType
from typing import Any

import torch

from torchgraft.capturing.state.model_state import ModelState
from torchgraft.capturing.watching.example import copied_input
from torchgraft.capturing.watching.parts import closed_over
from torchgraft.capturing.watching.signatures import bind, placeholders
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.graph import Graph
from torchgraft.ir.modules import paths_of_modules
from torchgraft.ir.node import Node


class WholeModel:
    """A model that is one call of a program. It is no submodule of the program, which has the model's own tables of parameters,
    buffers and modules: so both have the same state dict, and what moves, loads or copies the one does so to the other."""

    def __init__(self, model: torch.nn.Module, method: str) -> None:
        self.model, self.method = model, method

    def __repr__(self) -> str:
        return f"WholeModel({type(self.model).__name__})"


# What a program that is one call of a model, or a module in its place, shares with it: they have one state dict.
SHARED_WITH_MODEL = (
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def call_whole(
    callee: Any,
    mode: bool | None,
    args: tuple[Any, ...],
    packed: tuple[Any, ...] = (),
    named: dict[str, Any] | None = None,
    packed_named: dict[str, Any] | None = None,
) -> Any:
    """Call a function, or a model in the mode of the program, with arguments of which some come packed."""
    if isinstance(callee, WholeModel):
        callee.model.training = bool(mode)
        callee = getattr(callee.model, callee.method) if callee.method else callee.model
    return callee(*args, *packed, **(named or {}), **(packed_named or {}))


# Read by analysis/effects: it may do anything.
call_whole.__torchgraft_effect__ = True  # type: ignore[attr-defined]


def whole_program(
    model: Any, root: torch.nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> GraphModule:
    """A program that calls the model, or a function."""
    graph = Graph()
    bound = bind(model, args, kwargs)
    positional, packed, named, packed_named = _arguments(bound.signature, placeholders(graph, bound))
    if root is None and packed is None and packed_named is None:
        graph.output(graph.call_function(model, positional, named))
        return GraphModule(torch.nn.Module(), graph, program_name(model))
    holder, callee, mode = torch.nn.Module(), model, None
    if root is not None:
        whole = WholeModel(root, "" if model is root else model.__name__)
        holder._whole_model, holder.training = whole, root.training  # type: ignore[assignment]
        callee, mode = graph.get_attr("_whole_model"), graph.get_attr("training")
    arguments: Any = (callee, mode, positional, packed or (), named, packed_named or {})
    graph.output(graph.call_function(call_whole, arguments))
    program = GraphModule(holder, graph, program_name(model))
    if root is not None:
        program.__dict__.update({name: root.__dict__[name] for name in SHARED_WITH_MODEL if name in root.__dict__})
    return program


def whole_model(program: torch.nn.Module) -> torch.nn.Module | None:
    """The model of which a program is one call, unless it is the call of a function or of another method."""
    whole = program.__dict__.get("_whole_model")
    return whole.model if isinstance(whole, WholeModel) and not whole.method else None


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
