"""`from_fx` and `to_fx`: a whole module across the border, with its state and without copying parameters or submodules.
The graph in it is translated in `translation.py`.
"""

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import Any

import torch
import torch.fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from torchgraft.bridge.translation import find_constants, graph_from_fx, graph_to_fx, warn
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.codegen.source import PyTreeCodeGen
from torchgraft.errors import BridgeError
from torchgraft.ir.graph import Graph

# Compiled code belongs to the module it was compiled for.
_LEFT_BEHIND = {"_compiled_call_impl"}


def from_fx(module: torch.fx.GraphModule, *, nested: bool = False) -> GraphModule:
    """The same program as a torchgraft module.

    Nodes keep their names, order, users and metadata; parameters, buffers and submodules are shared, not copied. The graph
    counts, not the code: edits that were not followed by `recompile()` are in the result. With `nested`, submodules that
    are torch.fx modules themselves are converted, too. Functions watching edits of the graph stay behind.

    >>> module = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    >>> program = from_fx(module)
    >>> type(program).__mro__[1], [node.name for node in program.graph.nodes]
    (<class 'torchgraft.codegen.graph_module.GraphModule'>, ['input_1', '_0', '_1', 'output'])
    >>> program.get_parameter("0.weight") is module.get_parameter("0.weight")
    True
    """
    if not isinstance(module, torch.fx.GraphModule):
        raise BridgeError(f"from_fx takes a torch.fx.GraphModule, not a {_kind(module)}; capture it with symbolic_trace()")
    return _Crossing(nested).module_from_fx(module)


def to_fx(module: GraphModule, *, nested: bool = False) -> torch.fx.GraphModule:
    """The same program as a torch.fx module; `from_fx` of it is the same program again.

    Nodes keep their names, order, users and metadata; parameters, buffers and submodules are shared, not copied. With
    `nested`, submodules that are torchgraft modules themselves are converted, too. Functions watching edits of the graph
    stay behind.

    torch.fx has no `with` blocks. A region such as `torch.no_grad()` becomes two calls, one that enters it and one that
    leaves it, so an error raised in between leaves the region open: grad mode, for example, stays switched off. torch.fx
    pickles a module by tracing its code again, and loses regions then, as it does with its own calls of that kind.

    >>> import torchgraft
    >>> module = to_fx(torchgraft.symbolic_trace(lambda x: torch.relu(x) + 1))
    >>> print(module.code.strip())
    def forward(self, x):
        relu = torch.relu(x);  x = None
        add = relu + 1;  relu = None
        return add
    """
    if not isinstance(module, GraphModule):
        raise BridgeError(f"to_fx takes a torchgraft.GraphModule, not a {_kind(module)}; capture it with symbolic_trace()")
    return _Crossing(nested).module_to_fx(module)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


class _Crossing:
    """One conversion: every module is converted once, however often it is met."""

    def __init__(self, nested: bool) -> None:
        self._nested = nested
        self._made: dict[int, torch.nn.Module] = {}

    def module_from_fx(self, source: torch.fx.GraphModule) -> GraphModule:
        _check_subclass(source, torch.fx.GraphModule, (_LazyGraphModule,), "from_fx")
        result = GraphModule(torch.nn.Module(), Graph(), type(source).__name__)
        self._made[id(source)] = result
        graph, translation = graph_from_fx(source.graph)
        self._share_state(source, result, _own_of_torch_fx())
        graph._constants = find_constants(graph, result)
        result.meta = dict(translation.metadata(dict(getattr(source, "meta", {}))))
        if getattr(source, "shape_env", None) is not None:
            result.shape_env = source.shape_env  # type: ignore[assignment]
        result.graph = graph
        return result

    def module_to_fx(self, source: GraphModule) -> torch.fx.GraphModule:
        _check_subclass(source, GraphModule, (), "to_fx")
        result = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph(), type(source).__name__)
        self._made[id(source)] = result
        graph, translation = graph_to_fx(source.graph)
        self._share_state(source, result, _own_of_torchgraft())
        codegen = source.graph._codegen
        if isinstance(codegen, PyTreeCodeGen):
            result._in_spec, result._out_spec = codegen.in_spec, codegen.out_spec
        result.meta = dict(translation.metadata(dict(source.meta)))
        tracer_cls = graph._tracer_cls
        result._tracer_cls = tracer_cls if tracer_cls and "<locals>" not in tracer_cls.__qualname__ else None
        result._tracer_extras = graph._tracer_extras or {}
        result.graph = graph
        return result

    def _share_state(self, source: torch.nn.Module, result: torch.nn.Module, own: frozenset[str]) -> None:
        """Everything a module holds: its tables copied, so that both can be edited apart, the values in them shared."""
        for key, value in vars(source).items():
            if key in own or key in _LEFT_BEHIND:
                continue
            if key == "_modules":
                value = type(value)((name, self._child(child)) for name, child in value.items())
            elif key in _tables():
                value = copy.copy(value)
            elif isinstance(value, MethodType) and value.__self__ is source:
                value = MethodType(value.__func__, result)
            vars(result)[key] = value

    def _child(self, child: torch.nn.Module | None) -> torch.nn.Module | None:
        if child is None:
            return None
        made = self._made.get(id(child))
        if made is not None:
            return made
        if type(child) is torch.nn.Module:
            # A bare container only leads to others; a shared one would let edits of one program reach the other.
            container = self._made[id(child)] = torch.nn.Module()
            self._share_state(child, container, frozenset())
            return container
        if self._nested and isinstance(child, torch.fx.GraphModule):
            return self.module_from_fx(child)
        if self._nested and isinstance(child, GraphModule):
            return self.module_to_fx(child)
        return child


@functools.cache
def _tables() -> frozenset[str]:
    """The attributes of every module that are dicts and sets: parameters, buffers, hooks."""
    return frozenset(key for key, value in vars(torch.nn.Module()).items() if isinstance(value, (dict, set)))


@functools.cache
def _own_of_torch_fx() -> frozenset[str]:
    """What every torch.fx module has for its own purposes; read from one, because it differs between versions."""
    return frozenset(vars(torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())).keys() - vars(torch.nn.Module()).keys())


@functools.cache
def _own_of_torchgraft() -> frozenset[str]:
    return frozenset(vars(GraphModule(torch.nn.Module(), Graph())).keys() - vars(torch.nn.Module()).keys())


def _check_subclass(module: torch.nn.Module, base: type, harmless: tuple[type, ...], direction: str) -> None:
    if "forward" in vars(module):
        raise BridgeError(
            f"{direction} cannot convert {type(module).__name__}: its forward was replaced on the instance, so the graph is "
            "not what runs; delete the attribute, or capture the module again"
        )
    # Each instance has a class of its own, where the generated code lives.
    classes = [cls for cls in type(module).__mro__[1:] if issubclass(cls, base) and cls is not base and cls not in harmless]
    lost = sorted({name for cls in classes for name, value in vars(cls).items() if _is_behaviour(name, value)})
    if lost:
        warn(
            f"{direction} converts the program and the state of {classes[0].__name__}, but not what the class adds: "
            f"{', '.join(lost)}"
        )


def _is_behaviour(name: str, value: Any) -> bool:
    if name in ("__call__", "__getattr__", "__setattr__"):
        return True
    return not name.startswith("__") and (callable(value) or isinstance(value, (property, classmethod, staticmethod)))
