"""Transformer: an interpreter whose result is a new module.

Running graphs on real values is examined in test_interpreter.
"""

import operator
from types import ModuleType

import torch
from torch import nn


def targets(module) -> list[object]:
    return [node.target for node in module.graph.nodes]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.act = nn.ReLU()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x, bias=None):
        return self.act(self.linear(x)) * self.weight


def test_plain_transformer_is_a_copy(fx: ModuleType) -> None:
    model = Model()
    traced = fx.symbolic_trace(model)
    transformed = fx.Transformer(traced).transform()
    assert isinstance(transformed, fx.GraphModule)
    assert transformed is not traced
    assert str(transformed.graph) == str(traced.graph)
    assert transformed.linear is traced.linear
    transformed.graph.lint()
    x = torch.rand(1, 3)
    assert torch.equal(transformed(x), model(x))


def test_example_of_the_documentation(fx: ModuleType) -> None:
    class NegSigmSwapXformer(fx.Transformer):
        def call_function(self, target, args, kwargs):
            if target == torch.sigmoid:
                return torch.neg(*args, **kwargs)
            return super().call_function(target, args, kwargs)

        def call_method(self, target, args, kwargs):
            if target == "neg":
                call_self, *args_tail = args
                return call_self.sigmoid(*args_tail, **kwargs)
            return super().call_method(target, args, kwargs)

    def fn(x):
        return torch.sigmoid(x).neg()

    gm = fx.symbolic_trace(fn)
    transformed = NegSigmSwapXformer(gm).transform()
    input = torch.randn(3, 4)
    torch.testing.assert_close(transformed(input), torch.neg(input).sigmoid())
    assert targets(transformed) == ["x", torch.neg, "sigmoid", "output"]
    assert targets(gm) == ["x", torch.sigmoid, "neg", "output"], "the original is as it was"


def test_methods_get_proxies(fx: ModuleType) -> None:
    seen = []

    class Watching(fx.Transformer):
        def call_module(self, target, args, kwargs):
            seen.append((target, [type(arg) for arg in args]))
            return super().call_module(target, args, kwargs)

    Watching(fx.symbolic_trace(Model())).transform()
    assert seen == [("linear", [fx.Proxy]), ("act", [fx.Proxy])]


def test_call_module_can_be_replaced(fx: ModuleType) -> None:
    class ReluToTanh(fx.Transformer):
        def call_module(self, target, args, kwargs):
            if isinstance(self.fetch_attr(target), nn.ReLU):
                return torch.tanh(args[0])
            return super().call_module(target, args, kwargs)

    model = Model()
    transformed = ReluToTanh(fx.symbolic_trace(model)).transform()
    assert "act" not in targets(transformed)
    x = torch.rand(1, 3)
    assert torch.equal(transformed(x), torch.tanh(model.linear(x)) * model.weight)


def test_one_operation_may_become_many(fx: ModuleType) -> None:
    class Decompose(fx.Transformer):
        def call_function(self, target, args, kwargs):
            if target is torch.add:
                left, right = args
                return -(-left - right)
            return super().call_function(target, args, kwargs)

    transformed = Decompose(fx.symbolic_trace(lambda x, y: torch.add(x, y))).transform()
    assert targets(transformed) == ["x", "y", operator.neg, operator.sub, operator.neg, "output"]
    assert transformed(3, 4) == 7


def test_operation_may_be_dropped(fx: ModuleType) -> None:
    class NoDropout(fx.Transformer):
        def call_module(self, target, args, kwargs):
            if isinstance(self.fetch_attr(target), nn.Dropout):
                return args[0]
            return super().call_module(target, args, kwargs)

    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.ReLU())
    transformed = NoDropout(fx.symbolic_trace(model)).transform()
    assert [node.target for node in transformed.graph.find_nodes(op="call_module")] == ["0", "2"]


def test_defaults_of_placeholders_are_kept(fx: ModuleType) -> None:
    transformed = fx.Transformer(fx.symbolic_trace(lambda x, y=3: x + y)).transform()
    assert transformed(1) == 4
    assert [node.args for node in transformed.graph.find_nodes(op="placeholder")] == [(), (3,)]


def test_placeholder_and_get_attr_can_be_overridden(fx: ModuleType) -> None:
    class Doubling(fx.Transformer):
        def placeholder(self, target, args, kwargs):
            return super().placeholder(target, args, kwargs) * 2

        def get_attr(self, target, args, kwargs):
            return super().get_attr(target, args, kwargs) + 1

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x * self.weight

    transformed = Doubling(fx.symbolic_trace(Scale())).transform()
    assert transformed(torch.tensor([3.0])).item() == 12.0


def test_new_nodes_through_the_tracer(fx: ModuleType) -> None:
    class ToSigmoid(fx.Transformer):
        def call_function(self, target, args, kwargs):
            if target is torch.relu:
                return self.tracer.create_proxy("call_function", torch.sigmoid, args, kwargs)
            return super().call_function(target, args, kwargs)

    transformed = ToSigmoid(fx.symbolic_trace(lambda x: torch.relu(x) + 1)).transform()
    assert targets(transformed) == ["x", torch.sigmoid, operator.add, "output"]


def test_structured_results_are_kept(fx: ModuleType) -> None:
    transformed = fx.Transformer(fx.symbolic_trace(lambda x: {"a": [x, (x + 1, 2)]})).transform()
    assert transformed(1) == {"a": [1, (2, 2)]}


def test_metadata_is_carried_over(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: torch.relu(x))
    output = traced.graph.output_node()
    output.meta["note"] = "kept"
    transformed = fx.Transformer(traced).transform()
    assert transformed.graph.output_node().meta["note"] == "kept"


def test_stack_traces_are_carried_over(fx: ModuleType) -> None:
    class Located(fx.Tracer):
        record_stack_traces = True

    model = Model()
    traced = fx.GraphModule(model, Located().trace(model))
    transformed = fx.Transformer(traced).transform()
    (before,) = traced.graph.find_nodes(op="call_module", target="linear")
    (after,) = transformed.graph.find_nodes(op="call_module", target="linear")
    assert after.stack_trace == before.stack_trace
    assert "self.act(self.linear(x))" in after.stack_trace


def test_transformers_can_follow_each_other(fx: ModuleType) -> None:
    def swap(old, new):
        class Swap(fx.Transformer):
            def call_function(self, target, args, kwargs):
                return super().call_function(new if target is old else target, args, kwargs)

        return Swap

    traced = fx.symbolic_trace(lambda x: torch.relu(x))
    middle = swap(torch.relu, torch.neg)(traced).transform()
    final = swap(torch.neg, torch.abs)(middle).transform()
    assert targets(final) == ["x", torch.abs, "output"]


def test_result_can_be_traced_again(fx: ModuleType) -> None:
    transformed = fx.Transformer(fx.symbolic_trace(Model())).transform()
    assert targets(fx.symbolic_trace(transformed)) == targets(transformed)


def test_attributes(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(Model())
    transformer = fx.Transformer(traced)
    assert isinstance(transformer, fx.Interpreter)
    assert isinstance(transformer.new_graph, fx.Graph)
    assert isinstance(transformer.tracer, fx.Tracer)
    assert transformer.module is traced
