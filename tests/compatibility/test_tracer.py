"""Tracer as a base class: every method the documentation offers for overriding, and the state a tracer shows.

Leaf functions are examined in test_wrap.
"""

from types import ModuleType

import pytest
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return torch.relu(self.linear(x))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = nn.Sequential(Block(), nn.Tanh())
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        return self.second(self.first(x)) * self.weight + self.mean

    def predict(self, x):
        return self.first(x).softmax(-1)


def trace_with(fx: ModuleType, tracer, root) -> nn.Module:
    graph = tracer.trace(root)
    return fx.GraphModule(tracer.root, graph)


def test_default_tracer_is_what_symbolic_trace_uses(fx: ModuleType) -> None:
    model = Network()
    assert trace_with(fx, fx.Tracer(), model).code == fx.symbolic_trace(model).code


def test_trace_returns_a_graph_and_sets_root(fx: ModuleType) -> None:
    tracer = fx.Tracer()
    model = Network()
    graph = tracer.trace(model)
    assert isinstance(graph, fx.Graph)
    assert tracer.root is model
    assert tracer.graph is graph
    tracer.trace(lambda x: x)
    assert isinstance(tracer.root, nn.Module)


def test_leaf_modules_can_be_chosen(fx: ModuleType) -> None:
    asked = []

    class BlocksAreLeaves(fx.Tracer):
        def is_leaf_module(self, m, module_qualified_name):
            asked.append((type(m).__name__, module_qualified_name))
            return isinstance(m, Block) or super().is_leaf_module(m, module_qualified_name)

    model = Network()
    traced = trace_with(fx, BlocksAreLeaves(), model)
    assert [node.target for node in traced.graph.find_nodes(op="call_module")] == ["first", "second.0", "second.1"]
    assert asked == [("Block", "first"), ("Sequential", "second"), ("Block", "second.0"), ("Tanh", "second.1")]
    x = torch.rand(2, 3)
    assert torch.equal(traced(x), model(x))


def test_nothing_is_a_leaf(fx: ModuleType) -> None:
    class Through(fx.Tracer):
        def is_leaf_module(self, m, module_qualified_name):
            return False

    model = Network()
    traced = trace_with(fx, Through(), model)
    assert traced.graph.find_nodes(op="call_module") == []
    assert [node.target for node in traced.graph.find_nodes(op="get_attr")] == [
        "first.linear.weight", "first.linear.bias", "second.0.linear.weight", "second.0.linear.bias", "weight", "mean",
    ]  # fmt: skip
    x = torch.rand(2, 3)
    assert torch.equal(traced(x), model(x))


def test_call_module_can_be_overridden(fx: ModuleType) -> None:
    class Counting(fx.Tracer):
        def __init__(self) -> None:
            super().__init__()
            self.paths = []

        def call_module(self, m, forward, args, kwargs):
            self.paths.append(self.path_of_module(m))
            return super().call_module(m, forward, args, kwargs)

    tracer = Counting()
    tracer.trace(Network())
    assert tracer.paths == ["first", "first.linear", "second", "second.0", "second.0.linear", "second.1"]


def test_call_module_may_skip_the_call(fx: ModuleType) -> None:
    class WithoutActivation(fx.Tracer):
        def call_module(self, m, forward, args, kwargs):
            if isinstance(m, nn.Tanh):
                return args[0]
            return super().call_module(m, forward, args, kwargs)

    traced = trace_with(fx, WithoutActivation(), Network())
    assert "second.1" not in [node.target for node in traced.graph.nodes]


def test_call_module_may_run_forward_itself(fx: ModuleType) -> None:
    class Inlining(fx.Tracer):
        def call_module(self, m, forward, args, kwargs):
            return forward(*args, **kwargs)

    model = Network()
    traced = trace_with(fx, Inlining(), model)
    assert traced.graph.find_nodes(op="call_module") == []
    x = torch.rand(2, 3)
    assert torch.equal(traced(x), model(x))


def test_create_proxy_can_annotate_nodes(fx: ModuleType) -> None:
    class Tagging(fx.Tracer):
        def create_proxy(self, kind, target, args, kwargs, name=None, type_expr=None, proxy_factory_fn=None):
            proxy = super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)
            proxy.node.tag = kind.upper()
            return proxy

    graph = Tagging().trace(Network())
    assert [node.tag for node in graph.nodes if node.op == "call_module"] == ["CALL_MODULE"] * 3
    assert next(iter(graph.nodes)).tag == "PLACEHOLDER"


def test_create_proxy_with_the_short_signature(fx: ModuleType) -> None:
    class Old(fx.Tracer):
        def create_proxy(self, kind, target, args, kwargs, name=None, type_expr=None):
            return super().create_proxy(kind, target, args, kwargs, name, type_expr)

    model = Network()
    x = torch.rand(2, 3)
    assert torch.equal(trace_with(fx, Old(), model)(x), model(x))


def test_create_proxy_that_ignores_what_follows(fx: ModuleType) -> None:
    class Qualified(fx.Tracer):
        def __init__(self) -> None:
            super().__init__()
            self.paths = {}
            self.current = ""

        def call_module(self, m, forward, args, kwargs):
            before, self.current = self.current, self.path_of_module(m)
            try:
                return super().call_module(m, forward, args, kwargs)
            finally:
                self.current = before

        def create_proxy(self, kind, target, args, kwargs, name=None, type_expr=None, *_):
            proxy = super().create_proxy(kind, target, args, kwargs, name, type_expr)
            self.paths[proxy.node.name] = self.current
            return proxy

    tracer = Qualified()
    tracer.trace(Network())
    assert tracer.paths["relu"] == "first"
    assert tracer.paths["first_linear"] == "first.linear"
    assert tracer.paths["second_1"] == "second.1"
    assert tracer.paths["weight"] == ""


def test_create_node_sees_every_node(fx: ModuleType) -> None:
    class Recording(fx.Tracer):
        def __init__(self) -> None:
            super().__init__()
            self.kinds = []

        def create_node(self, kind, target, args, kwargs, name=None, type_expr=None):
            self.kinds.append(kind)
            node = super().create_node(kind, target, args, kwargs, name, type_expr)
            node.meta["seen"] = True
            return node

    tracer = Recording()
    graph = tracer.trace(Network())
    assert tracer.kinds == [node.op for node in graph.nodes]
    assert all(node.meta["seen"] for node in graph.nodes)


def test_create_node_may_refuse_in_place_operations(fx: ModuleType) -> None:
    class Functional(fx.Tracer):
        def create_node(self, kind, target, args, kwargs, name=None, type_expr=None):
            if kind == "call_method" and target.endswith("_"):
                raise TypeError(f"no in-place call: {target}")
            return super().create_node(kind, target, args, kwargs, name, type_expr)

    with pytest.raises(TypeError, match="add_"):
        Functional().trace(lambda x: x.add_(1))


def test_create_node_gets_arguments_already_lowered(fx: ModuleType) -> None:
    seen = {}

    class Watching(fx.Tracer):
        def create_node(self, kind, target, args, kwargs, name=None, type_expr=None):
            if kind == "call_function":
                seen[target] = (args, kwargs)
            return super().create_node(kind, target, args, kwargs, name, type_expr)

    graph = Watching().trace(lambda x: torch.cat([x, x], dim=1))
    x = next(iter(graph.nodes))
    args, kwargs = seen[torch.cat]
    assert list(args[0]) == [x, x]
    assert kwargs == {"dim": 1}


def test_create_arg_can_lower_new_types(fx: ModuleType) -> None:
    class Celsius:
        def __init__(self, degrees) -> None:
            self.degrees = degrees

    class Thermal(fx.Tracer):
        def create_arg(self, a):
            if isinstance(a, Celsius):
                return a.degrees + 273
            return super().create_arg(a)

    def forward(x):
        return x + Celsius(27)

    assert trace_with(fx, Thermal(), forward)(0) == 300


def test_create_arg_is_asked_for_nested_elements(fx: ModuleType) -> None:
    class Doubling(fx.Tracer):
        def create_arg(self, a):
            if type(a) is int:
                return a * 2
            return super().create_arg(a)

    traced = trace_with(fx, Doubling(), lambda x: {"numbers": [1, (2, 3)], "x": x})
    assert traced(0) == {"numbers": [2, (4, 6)], "x": 0}


def test_getattr_can_hand_out_the_real_parameter(fx: ModuleType) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.weight if self.weight.sum() > 0 else x

    seen = []

    class Concrete(fx.Tracer):
        def getattr(self, attr, attr_val, parameter_proxy_cache):
            seen.append(attr)
            return attr_val

    model = Scaled()
    traced = trace_with(fx, Concrete(), model)
    assert "weight" in seen
    assert torch.equal(traced(torch.ones(3)), torch.ones(3))
    assert [node.target for node in traced.graph.find_nodes(op="get_attr")] == ["weight"]


def test_iter_can_be_overridden(fx: ModuleType) -> None:
    class ThreeItems(fx.Tracer):
        def iter(self, obj):
            return iter([obj[i] for i in range(3)])

    def forward(x):
        total = 0
        for item in x:
            total = total + item
        return total

    assert trace_with(fx, ThreeItems(), forward)([1, 2, 3]) == 6


def test_keys_can_be_overridden(fx: ModuleType) -> None:
    class KnownKeys(fx.Tracer):
        def keys(self, obj):
            return ["a", "b"]

    def forward(options):
        return add_keywords(**options)

    assert trace_with(fx, KnownKeys(), forward)({"a": 1, "b": 2}) == 3


def add_keywords(a, b):
    return a + b


def test_to_bool_can_be_overridden(fx: ModuleType) -> None:
    class AlwaysTrue(fx.Tracer):
        def __init__(self) -> None:
            super().__init__()
            self.asked = []

        def to_bool(self, obj):
            self.asked.append(obj.node.name)
            return True

    def forward(x):
        if x.sum() > 0:
            return x
        return -x

    tracer = AlwaysTrue()
    traced = trace_with(fx, tracer, forward)
    assert tracer.asked == ["gt"]
    assert traced(torch.tensor(-1.0)).item() == -1.0


def test_proxy_can_be_overridden(fx: ModuleType) -> None:
    class Loud(fx.Proxy):
        def shout(self):
            return self + 100

    class LoudTracer(fx.Tracer):
        def proxy(self, node):
            return Loud(node, self)

    def forward(x):
        return x.shout()

    assert trace_with(fx, LoudTracer(), forward)(1) == 101
