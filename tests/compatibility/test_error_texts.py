"""Where torch.fx raises or warns, ours contains the phrase that users' programs match on, and the same `except` catches it."""

from __future__ import annotations

import importlib
import operator
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

ERRORS: dict[str, tuple[str, Callable[[Any], Any]]] = {}


def raises(phrase: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Register something that fails with this phrase; it is given the library."""

    def register(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        ERRORS[function.__name__] = phrase, function
        return function

    return register


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


def traced(fx: Any, forward: Callable[..., Any], **options: Any) -> Any:
    return fx.symbolic_trace(forward, **options)


def first_nodes(fx: Any) -> Any:
    graph = fx.symbolic_trace(Layer()).graph
    return [graph, *graph.nodes]


# ---- tracing ----


@raises("symbolically traced variables cannot be used as inputs to control flow")
def branch(fx: Any) -> None:
    traced(fx, lambda x: x if x.sum() > 0 else -x)


@raises("Proxy object cannot be iterated")
def loop(fx: Any) -> None:
    traced(fx, lambda x: [row + 1 for row in x])


@raises("Proxy object cannot be iterated")
def star(fx: Any) -> None:
    traced(fx, lambda x: torch.cat((*x,)))


@raises("'len' is not supported in symbolic tracing by default")
def length(fx: Any) -> None:
    traced(fx, lambda x: len(x))


@raises("argument of type: ")
def unknown_argument(fx: Any) -> None:
    class Unknown: ...

    traced(fx, lambda x: x.foo(Unknown()))


@raises("Keys for dictionaries used as an argument cannot contain a Node")
def key(fx: Any) -> None:
    traced(fx, lambda x: {x: 1})


@raises("module is not installed as a submodule")
def strange_module(fx: Any) -> None:
    other = nn.Linear(1, 1)

    class Calls(nn.Module):
        def forward(self, x: Any) -> Any:
            return other(x)

    traced(fx, Calls())


@raises("parameter is not a member of this module")
def strange_parameter(fx: Any) -> None:
    other = nn.Parameter(torch.ones(1))

    class Tracer(fx.Tracer):  # type: ignore[misc, name-defined]
        pass

    class Uses(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.add(x, other)

    Tracer().trace(Uses())


@raises("Tracing expected 2 arguments but got 1 concrete arguments")
def too_few_concrete_args(fx: Any) -> None:
    traced(fx, lambda a, b: a, concrete_args=(1,))


@raises("``self`` argument cannot be part of *args expansion!")
def self_in_args(fx: Any) -> None:
    class Model(nn.Module):
        def forward(*args: Any) -> Any:
            return args[1]

    traced(fx, Model())


@raises("wrap must be called at the top level of a module")
def wrap_inside(fx: Any) -> None:
    fx.wrap("len")


@raises("Unsupported type for global function! Must be either a callable or string name")
def wrap_a_number(fx: Any) -> None:
    fx.wrap(5)


@raises("Found multiple different tracers")
def two_tracers(fx: Any) -> None:
    one, two = [
        fx.Proxy(graph.placeholder("x"), fx.proxy.GraphAppendingTracer(graph)) for graph in (fx.Graph(), fx.Graph())
    ]
    torch.add(one, two)


@raises("Tried to trace mutable operation")
def mutable_operation(fx: Any) -> None:
    class Tracer(fx.Tracer):  # type: ignore[misc, name-defined]
        check_mutable_operations = True

    Tracer().trace(lambda x: torch.relu_(x))


@raises("doesn't exist in")
def another_function(fx: Any) -> None:
    tracer = fx.Tracer()
    tracer.traced_func_name = "absent"
    tracer.trace(Layer())


@raises("has been specialized to have value")
def another_value(fx: Any) -> None:
    def function(x: Any, flag: Any) -> Any:
        return x if flag else -x

    traced(fx, function, concrete_args={"flag": True})(torch.ones(1), False)


# ---- graphs ----


@raises("but it still had 1 users in the graph")
def erase_used(fx: Any) -> None:
    graph, x, *_ = first_nodes(fx)
    graph.erase_node(x)


@raises("from wrong graph!")
def erase_of_another(fx: Any) -> None:
    *_, output = first_nodes(fx)
    fx.Graph().erase_node(output)


@raises("Node to insert before is not in graph.")
def insert_before_another(fx: Any) -> None:
    fx.Graph().inserting_before(first_nodes(fx)[1])


@raises("Node to insert after is not in graph.")
def insert_after_another(fx: Any) -> None:
    fx.Graph().inserting_after(first_nodes(fx)[1])


@raises("does not belong to this Graph")
def strange_argument(fx: Any) -> None:
    graph = fx.Graph()
    graph.output(first_nodes(fx)[1])
    graph.lint()


@raises("before it has been defined!")
def wrong_order(fx: Any) -> None:
    graph, x, layer, _ = first_nodes(fx)
    x.prepend(layer)
    graph.lint()


@raises("references nonexistent attribute")
def absent_attribute(fx: Any) -> None:
    module = fx.symbolic_trace(Layer())
    for node in module.graph.nodes:
        if node.op == "call_module":
            node.target = "nothing"
    module.graph.lint()


@raises("does not reference an nn.Module")
def no_module(fx: Any) -> None:
    module = fx.symbolic_trace(Layer())
    for node in module.graph.nodes:
        if node.op == "call_module":
            node.target = "layer.weight"
    module.graph.lint()


@raises("a Callable is expected")
def target_is_no_function(fx: Any) -> None:
    fx.Graph().create_node("call_function", "relu")


@raises("a str is expected")
def target_is_no_name(fx: Any) -> None:
    fx.Graph().create_node("call_method", operator.add)


@raises("args must be a tuple")
def args_are_a_list(fx: Any) -> None:
    graph = fx.Graph()
    graph.create_node("call_function", operator.add, [graph.placeholder("x")])


@raises("kwargs must be a dict")
def kwargs_are_a_list(fx: Any) -> None:
    graph = fx.Graph()
    graph.create_node("call_function", operator.add, (), [1])


@raises("no underlying reference in the owning GraphModule")
def get_absent_attribute(fx: Any) -> None:
    module = fx.symbolic_trace(Layer())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.graph.get_attr("nothing")


# ---- nodes and arguments ----


@raises("object does not support mutation")
def mutate_list(fx: Any) -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.cat, ([graph.placeholder("x")],))
    node.args[0].append(1)


@raises("object does not support mutation")
def mutate_dict(fx: Any) -> None:
    graph = fx.Graph()
    graph.call_function(torch.add, (graph.placeholder("x"),), {"other": 1}).kwargs["other"] = 2


@raises("index must be between 0 and len(self.args)")
def insert_far(fx: Any) -> None:
    first_nodes(fx)[2].insert_arg(5, 1)


@raises("fn must be a callable")
def map_nothing(fx: Any) -> None:
    fx.node.map_arg((1,), 5)


@raises("but replace_with already has .meta keys")
def two_metas(fx: Any) -> None:
    _, x, layer, _ = first_nodes(fx)
    x.meta["a"] = layer.meta["a"] = 1
    x.replace_all_uses_with(layer, propagate_meta=True)


# ---- modules and interpreters ----


@raises("Unsupported type")
def strange_root(fx: Any) -> None:
    fx.GraphModule(5, fx.Graph())


@raises("referenced target")
def absent_in_dict(fx: Any) -> None:
    graph = fx.Graph()
    graph.output(graph.get_attr("nothing"))
    fx.GraphModule({}, graph)


@raises("Expected a Graph instance, but got")
def no_graph(fx: Any) -> None:
    fx.symbolic_trace(Layer()).graph = 5


@raises("hook must be a callable.")
def no_hook(fx: Any) -> None:
    fx.symbolic_trace(Layer())._register_create_node_hook(5)


@raises("Expected positional argument for parameter y, but one was not passed in!")
def missing_input(fx: Any) -> None:
    fx.Interpreter(fx.symbolic_trace(lambda x, y: x + y)).run(torch.ones(1))


@raises("Node referenced nonexistent target nothing")
def absent_target(fx: Any) -> None:
    fx.Interpreter(fx.symbolic_trace(Layer())).fetch_attr("nothing")


@raises("Call using an FX-traced Module, line")
def failing_program(fx: Any) -> None:
    fx.symbolic_trace(lambda x: x.reshape(5, 7) + 1)(torch.ones(2))


@raises("Must provide either a replacement GraphModule or a replacement callback")
def no_replacement(fx: Any) -> None:
    rewriter = importlib.import_module(f"{fx.__name__}.subgraph_rewriter")
    program = fx.symbolic_trace(lambda x: torch.relu(x))
    rewriter.replace_pattern_with_filters(program, lambda x: torch.relu(x), None)


@pytest.mark.parametrize("name", ERRORS)
def test_text_and_class(graft: ModuleType, name: str, capsys: Any) -> None:
    phrase, fails = ERRORS[name]
    found = []
    for library in ("torch.fx", graft.__name__):
        capsys.readouterr()
        with pytest.raises(Exception) as caught:
            fails(importlib.import_module(library))
        text = f"{caught.value}{''.join(getattr(caught.value, '__notes__', []))}{capsys.readouterr().err}"
        assert phrase in text, f"{library}: {text}"
        found.append(caught.value)
    theirs, ours = found
    builtin = [kind for kind in type(theirs).__mro__ if kind.__module__ == "builtins" and kind is not object]
    assert all(isinstance(ours, kind) for kind in builtin), f"{type(ours).__mro__} lacks one of {builtin}"
