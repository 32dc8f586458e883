"""Whatever a subclass of Tracer may override in torch.fx is called here at the same moments with the same arguments."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from .networks import NETWORKS

METHODS = (
    *("create_proxy", "create_node", "create_arg", "call_module", "getattr", "to_bool", "iter", "keys", "proxy"),
    *("path_of_module", "is_leaf_module", "create_args_for_root", "get_fresh_qualname"),
)


class Through(nn.Module):
    """Leaf modules, modules that are looked into, parameters, buffers, constants, containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> Any:
        x = self.layer(x)
        for block in self.blocks:
            x = block(x) + self.shift
        y = functional.relu(x * self.weight, inplace=False)
        return {"all": [y, (x.size(0), y[:, 0])], "sum": torch.cat([x, y], dim=-1).sum() * scale}


class Inputs(nn.Module):
    def forward(self, a: torch.Tensor, b: Any = None, *rest: Any, **named: Any) -> Any:
        return a + rest[0] + named["c"] + b


class Decides(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        if x.sum() > 0:
            x = x + 1
        first, second = x.split(2)
        for row in second:
            first = first + row
        return torch.cat([first], dim=0)


def _name(value: Any) -> str:
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_name, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_name(item)}' for key, item in value.items())}}}"
    if hasattr(value, "node") and hasattr(value, "tracer"):
        return f"proxy {value.node.name}"
    if hasattr(value, "all_input_nodes"):
        return f"node {value.name}"
    if callable(value):
        return getattr(value, "__name__", str(value))
    return repr(value) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__


def logging_tracer(library: Any, methods: tuple[str, ...], log: list[str], answers: dict[str, Any]) -> Any:
    """A tracer that overrides these methods, notes each call and passes it on, or answers itself."""

    def overriding(method: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            log.append(f"{method}({', '.join(map(_name, args))})")
            if method in answers:
                return answers[method](self, *args, **kwargs)
            return getattr(super(Logging, self), method)(*args, **kwargs)

        call.__name__ = method
        return call

    Logging = type("Logging", (library.Tracer,), {method: overriding(method) for method in methods})
    return Logging()


def logs(library: str, make: Callable[[], nn.Module], methods: tuple[str, ...], **answers: Any) -> list[str]:
    log: list[str] = []
    tracer = logging_tracer(importlib.import_module(library), methods, log, answers)
    graph = tracer.trace(make())
    return [*log, *(f"{node.name} {node.op} {_name(node.args)}" for node in graph.nodes)]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "through": Through,
    **{name: make for name, (make, _) in NETWORKS.items() if name != "residual"},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_one_method_at_a_time(graft: ModuleType, model: str, method: str) -> None:
    assert logs(graft.__name__, MODELS[model], (method,)) == logs("torch.fx", MODELS[model], (method,))


@pytest.mark.parametrize("model", MODELS)
def test_all_methods_together(graft: ModuleType, model: str) -> None:
    assert logs(graft.__name__, MODELS[model], METHODS) == logs("torch.fx", MODELS[model], METHODS)


@pytest.mark.parametrize("method", ["create_proxy", "create_node", "create_arg", "create_args_for_root", "proxy"])
def test_inputs_of_all_kinds(graft: ModuleType, method: str) -> None:
    assert logs(graft.__name__, Inputs, (method,)) == logs("torch.fx", Inputs, (method,))


def test_a_subclass_that_answers_is_asked_as_in_torch_fx(graft: ModuleType) -> None:
    answers = {
        "to_bool": lambda self, value: True,
        "iter": lambda self, value: iter([value[0], value[1]]),
    }
    assert logs(graft.__name__, Decides, ("to_bool", "iter"), **answers) == logs(
        "torch.fx", Decides, ("to_bool", "iter"), **answers
    )


@pytest.mark.parametrize("leaf", [True, False])
def test_the_answer_of_is_leaf_module_counts(graft: ModuleType, leaf: bool) -> None:
    answers = {"is_leaf_module": lambda self, module, name: leaf}
    assert logs(graft.__name__, Through, ("is_leaf_module",), **answers) == logs(
        "torch.fx", Through, ("is_leaf_module",), **answers
    )


def test_state_while_tracing(graft: ModuleType) -> None:
    """`root`, `graph`, `scope`, `module_stack`, `node_name_to_scope` as a method of a subclass finds them."""
    found = []
    for library in ("torch.fx", graft.__name__):
        base: Any = importlib.import_module(library).Tracer
        seen: list[Any] = []

        class Looks(base):  # type: ignore[misc, valid-type]
            def create_node(self, kind: str, target: Any, *args: Any, _seen: list[Any] = seen, **kwargs: Any) -> Any:
                node = super().create_node(kind, target, *args, **kwargs)
                _seen.append(
                    [
                        node.name,
                        type(self.root).__name__,
                        self.scope.module_path,
                        getattr(self.scope.module_type, "__name__", None),
                        list(self.module_stack),
                        self.graph is node.graph,
                        self.node_name_to_scope[node.name][0],
                    ]
                )
                return node

        Looks().trace(Through())
        found.append(seen)
    assert found[1] == found[0]


def test_module_getattr(graft: ModuleType) -> None:
    """The private door of older versions of torch.fx, which some tracers override: it sees what `getattr` sees."""
    seen: list[str] = []
    base: Any = graft.Tracer

    class Looks(base):  # type: ignore[misc, valid-type]
        def _module_getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
            seen.append(f"getattr({_name(attr)}, {_name(attr_val)}, {_name(parameter_proxy_cache)})")
            return super()._module_getattr(attr, attr_val, parameter_proxy_cache)

    Looks().trace(Through())
    expected = [line for line in logs("torch.fx", Through, ("getattr",)) if line.startswith("getattr(")]
    assert [line.split(", {")[0] for line in seen] == [line.split(", {")[0] for line in expected]


def test_a_subclass_with_functions_to_keep_whole(graft: ModuleType) -> None:
    found = []
    for library in ("torch.fx", graft.__name__):
        base: Any = importlib.import_module(library).Tracer

        class Keeps(base):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                super().__init__(autowrap_functions=(functional.gelu,))

        tracer = Keeps()
        tracer._autowrap_function_ids.add(id(kept))
        graph = tracer.trace(lambda x: kept(functional.gelu(x)))
        found.append([[node.name for node in graph.nodes], isinstance(tracer._autowrap_search, list)])
    assert found[1] == found[0]


def kept(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.sum() > 0 else x
