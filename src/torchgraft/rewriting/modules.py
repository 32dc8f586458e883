"""The meaning of a module call: `nn.Softmax(1)(x)` means what its `forward` does, if that is one call.
The `forward` of a module of torch is captured once for each way in which such a module is set up; calls are in `meaning.py`.

A module whose forward is more than one call (a batch norm, which checks its input), or whose type is not torch's own, means its
type and its settings; its weights may be any. One with hooks means nothing but itself, because its hooks do what nobody can say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchgraft.capturing.symbolic.tracer import symbolic_trace
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError
from torchgraft.ir.arguments import map_aggregate
from torchgraft.ir.modules import has_hooks
from torchgraft.ir.node import Node
from torchgraft.rewriting.meaning import Meaning, coarse_key, meaning_of_call


@dataclass(frozen=True, slots=True)
class State:
    """A parameter, buffer or mode of a module that a call uses without a node of its own; fetched if somebody needs it."""

    path: str


@dataclass(frozen=True, slots=True)
class _Input:
    name: str


class _Form(NamedTuple):
    """A forward that is one call: what it may mean, its meaning with marks for inputs and state, and its inputs with defaults."""

    coarse_key: Any
    meaning: Meaning
    inputs: dict[str, Any]


_MISSING: Any = object()
_SIMPLE = (int, float, bool, str, type(None), complex, torch.dtype, torch.device)
_captured: dict[Any, _Form | None] = {}


def coarse_key_of_module(module: Any) -> Any:
    """What a call of this module may mean; equal for all calls that mean the same."""
    if has_hooks(module):
        return ("hooked", id(module))
    form = _form(module)
    return ("module", type(module)) if form is None else form.coarse_key


def meaning_of_module_call(node: Node, module: Any) -> Meaning:
    """The meaning of a module call.

    >>> from torchgraft.ir.graph import Graph
    >>> graph = Graph()
    >>> call = graph.call_module("layer", (graph.placeholder("x"),))
    >>> meaning_of_module_call(call, torch.nn.Softmax(1))
    Meaning(key='softmax', arguments={'self': x, 'dim': 1, 'dtype': None})
    >>> meaning_of_module_call(call, torch.nn.Linear(2, 2)).arguments["weight"]
    State(path='layer.weight')
    """
    if has_hooks(module):
        return Meaning(("hooked", id(module)), {})
    form = _form(module)
    if form is not None:
        arguments = _with_inputs(form, node)
        if arguments is not None:
            return Meaning(form.meaning.key, arguments)
    settings = {f".{name}": value for name, value in _settings(module).items()}
    return Meaning(("module", type(module)), {**dict(enumerate(node.args)), **node.kwargs, **settings})


def _with_inputs(form: _Form, node: Node) -> dict[str, Any] | None:
    if len(node.args) > len(form.inputs) or not form.inputs.keys() >= node.kwargs.keys():
        return None
    given = {**form.inputs, **dict(zip(form.inputs, node.args, strict=False)), **node.kwargs}
    if any(value is _MISSING for value in given.values()):
        return None

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, _Input):
            return given[leaf.name]
        return State(f"{node.target}.{leaf.path}") if isinstance(leaf, State) else leaf

    return {key: map_aggregate(value, fill) for key, value in form.meaning.arguments.items()}


def _settings(module: Any) -> dict[str, Any]:
    """What the constructor of a module noted, as far as it can be compared."""
    found = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
    return {name: value for name, value in found.items() if _is_simple(value)}


def _is_simple(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_simple, value))
    return isinstance(value, _SIMPLE)


def _form(module: Any) -> _Form | None:
    """The form of a module's forward, or None if it is more than a call."""
    cls = type(module)
    if not cls.__module__.startswith("torch.nn.modules") or has_hooks(module) or module._modules:
        return None
    settings = _settings(module)
    simple = [name for name in vars(module) if not name.startswith("_") and name != "training"]
    if len(settings) < len(simple):
        return None
    tensors = [(name, value is None) for name, value in (*module._parameters.items(), *module._buffers.items())]
    key = (
        cls,
        module.training,
        tuple([(name, type(value), value) for name, value in settings.items()]),
        tuple(tensors),
    )
    if key not in _captured:
        _captured[key] = _capture(module)
    return _captured[key]


def _capture(module: Any) -> _Form | None:
    try:
        captured = symbolic_trace(module)
    except (GraftError, TypeError, ValueError, RuntimeError):  # a forward that cannot be captured means itself
        return None
    return _single_call(captured)


def _single_call(captured: GraphModule) -> _Form | None:
    nodes = list(captured.graph.nodes)
    calls = [node for node in nodes if node.op not in ("placeholder", "get_attr", "output")]
    if len(calls) != 1 or calls[0].op == "call_module" or nodes[-1].args != (calls[0],):
        return None
    if any(node.op == "placeholder" and not node._users for node in nodes):
        return None

    def mark(leaf: Any) -> Any:
        if not isinstance(leaf, Node):
            return leaf
        return _Input(leaf.target) if leaf.op == "placeholder" else State(leaf.target)

    meaning = meaning_of_call(calls[0])
    marked = Meaning(meaning.key, {key: map_aggregate(value, mark) for key, value in meaning.arguments.items()})
    inputs = {node.target: node.args[0] if node.args else _MISSING for node in nodes if node.op == "placeholder"}
    return _Form(coarse_key(calls[0]), marked, inputs)
