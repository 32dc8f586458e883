"""Tracer's options and the state it shows: paths, scopes, stack traces, wrapped functions, constants of parameters.

Overriding its methods is examined in test_tracer.
"""

import math
import operator
from types import ModuleType

import pytest
import torch
from torch import nn

from .test_tracer import Block, Network, trace_with


def test_path_of_module(fx: ModuleType) -> None:
    tracer = fx.Tracer()
    model = Network()
    tracer.trace(model)
    assert tracer.path_of_module(model.second[0].linear) == "second.0.linear"
    with pytest.raises(NameError, match="submodule"):
        tracer.path_of_module(nn.ReLU())


def test_calling_a_module_that_is_not_installed_is_refused(fx: ModuleType) -> None:
    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [nn.Linear(2, 2)]

        def forward(self, x):
            return self.hidden[0](x)

    with pytest.raises(NameError, match="submodule"):
        fx.symbolic_trace(Loose())


def test_autowrap_functions(fx: ModuleType) -> None:
    tracer = fx.Tracer(autowrap_functions=(opaque,))
    traced = trace_with(fx, tracer, lambda x: opaque(x) + 1)
    assert [node.target for node in traced.graph.nodes] == ["x", opaque, operator.add, "output"]
    assert traced(3) == 10


def opaque(x):
    return x * x if x > 0 else 0


def test_autowrap_modules(fx: ModuleType) -> None:
    library = ModuleType("library")
    exec("def cube(x):\n    return x ** 3 if x > 0 else 0\n", library.__dict__)
    tracer = fx.Tracer(autowrap_modules=(math, library))
    traced = trace_with(fx, tracer, lambda x: library.cube(x) + math.floor(x))
    assert [node.target for node in traced.graph.find_nodes(op="call_function", target=library.cube)]
    assert traced(2) == 10


def test_parameter_shapes_can_be_constants(fx: ModuleType) -> None:
    class ShapeReading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 3))

        def forward(self, x):
            if self.weight.dim() == 2 and self.weight.shape[0] > 2 and self.weight.size()[1] == 3:
                return x @ self.weight * self.weight.numel() + self.weight.ndim + self.weight.nelement()
            return x

    model = ShapeReading()
    traced = trace_with(fx, fx.Tracer(param_shapes_constant=True), model)
    x = torch.rand(2, 4)
    assert torch.equal(traced(x), model(x))
    with pytest.raises(fx.proxy.TraceError):
        fx.Tracer().trace(model)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(3))

    def forward(self, x):
        return x - self.mean.abs()


def test_buffers_can_be_proxied(fx: ModuleType) -> None:
    class Buffers(fx.Tracer):
        proxy_buffer_attributes = True

    traced = trace_with(fx, Buffers(), Normalised())
    assert [node.target for node in traced.graph.find_nodes(op="call_method")] == ["abs"]
    assert [node.target for node in traced.graph.find_nodes(op="get_attr")] == ["mean"]


def test_method_of_a_buffer_that_is_not_proxied(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(Normalised())
    assert torch.equal(traced(torch.ones(3)), torch.zeros(3))


def test_stack_traces_are_recorded_on_request(fx: ModuleType) -> None:
    class Located(fx.Tracer):
        record_stack_traces = True

    graph = Located().trace(Block())
    relu = graph.find_nodes(op="call_function", target=torch.relu)[0]
    assert relu.stack_trace is not None
    assert "test_tracer.py" in relu.stack_trace
    assert "return torch.relu(self.linear(x))" in relu.stack_trace
    assert relu.meta["stack_trace"] == relu.stack_trace


def test_another_method_than_forward_can_be_traced(fx: ModuleType) -> None:
    class Predict(fx.Tracer):
        traced_func_name = "predict"

    model = Network()
    tracer = Predict()
    traced = fx.GraphModule(model, tracer.trace(model))
    x = torch.rand(2, 3)
    assert torch.equal(traced(x), model.predict(x))


def test_missing_method_is_refused(fx: ModuleType) -> None:
    class Absent(fx.Tracer):
        traced_func_name = "absent"

    with pytest.raises((AssertionError, AttributeError, ValueError), match="absent"):
        Absent().trace(Network())


def test_scopes_are_told_by_node_name(fx: ModuleType) -> None:
    tracer = fx.Tracer()
    tracer.trace(Network())
    assert tracer.node_name_to_scope["first_linear"] == ("first.linear", nn.Linear)
    assert tracer.node_name_to_scope["relu"] == ("first", Block)
    assert tracer.node_name_to_scope["relu_1"] == ("second.0", Block)
    assert tracer.node_name_to_scope["mul"][0] == ""


def test_module_stack_is_left_on_the_nodes(fx: ModuleType) -> None:
    graph = fx.Tracer().trace(Network())
    relu = graph.find_nodes(op="call_function", target=torch.relu)[1]
    assert list(relu.meta["nn_module_stack"].values()) == [
        ("second", nn.Sequential),
        ("second.0", Block),
    ]
    (multiply,) = graph.find_nodes(op="call_function", target=operator.mul)
    assert not multiply.meta.get("nn_module_stack")


def test_scope_is_current_while_tracing(fx: ModuleType) -> None:
    seen = []

    class Watching(fx.Tracer):
        def create_node(self, kind, target, args, kwargs, name=None, type_expr=None):
            if target is torch.relu:
                seen.append((self.scope.module_path, self.scope.module_type, list(self.module_stack)))
            return super().create_node(kind, target, args, kwargs, name, type_expr)

    Watching().trace(Network())
    assert seen == [("first", Block, ["first"]), ("second.0", Block, ["second", "second.0"])]


def test_fresh_qualified_names_do_not_clash(fx: ModuleType) -> None:
    tracer = fx.Tracer()
    tracer.trace(lambda x: x)
    assert tracer.get_fresh_qualname("_constant") == "_constant0"
    tracer.root._constant0 = 1
    assert tracer.get_fresh_qualname("_constant") == "_constant1"


def test_submodule_paths_exist_while_tracing(fx: ModuleType) -> None:
    seen = []

    class Watching(fx.Tracer):
        def create_node(self, kind, target, args, kwargs, name=None, type_expr=None):
            seen.append(dict(self.submodule_paths))
            return super().create_node(kind, target, args, kwargs, name, type_expr)

    model = Network()
    Watching().trace(model)
    assert seen[-1][model.second[0]] == "second.0"


def test_a_tracer_can_be_used_again(fx: ModuleType) -> None:
    tracer = fx.Tracer()
    first = tracer.trace(Network())
    second = tracer.trace(lambda x: x + 1)
    assert first is not second
    assert len(first.nodes) == 11
    assert len(second.nodes) == 3


def test_nested_tracing_from_call_module(fx: ModuleType) -> None:
    class Nesting(fx.Tracer):
        def call_module(self, m, forward, args, kwargs):
            if isinstance(m, Block):
                inner = fx.symbolic_trace(m)
                path = self.path_of_module(m)
                owner, _, name = path.rpartition(".")
                setattr(self.root.get_submodule(owner), name, inner)
                return self.create_proxy("call_module", path, args, kwargs)
            return super().call_module(m, forward, args, kwargs)

    model = Network()
    x = torch.rand(2, 3)
    expected = model(x)
    traced = trace_with(fx, Nesting(), model)
    assert isinstance(traced.first, fx.GraphModule)
    assert torch.equal(traced(x), expected)


def test_graph_appending_tracer(fx: ModuleType) -> None:
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    x = fx.Proxy(graph.placeholder("x"), tracer)
    graph.output((torch.relu(x) + 1).node)
    assert fx.GraphModule({}, graph)(torch.tensor(-1.0)).item() == 1.0


def test_tracer_base_is_the_base(fx: ModuleType) -> None:
    assert issubclass(fx.Tracer, fx.proxy.TracerBase)
    assert issubclass(fx.proxy.GraphAppendingTracer, fx.proxy.TracerBase)


def test_operations_of_two_tracers_do_not_mix(fx: ModuleType) -> None:
    one, two = fx.Graph(), fx.Graph()
    x, y = fx.Proxy(one.placeholder("x")), fx.Proxy(two.placeholder("y"))
    with pytest.raises(RuntimeError, match="(?i)tracer|graph"):
        torch.add(x, y)
