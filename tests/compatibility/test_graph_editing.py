"""Changing a graph: copying nodes and graphs, erasing, dead code, and the checks of ``lint``.

Edits of a single node's arguments are examined in test_node.
"""

import copy
import operator
import pickle
from types import ModuleType

import pytest
import torch
from torch import nn

from tests.compatibility.networks import OneLinear


def targets(graph) -> list[object]:
    return [node.target for node in graph.nodes]


def relu_graph(fx: ModuleType):
    graph = fx.Graph()
    x = graph.placeholder("x")
    relu = graph.call_function(torch.relu, (x,))
    output = graph.output(relu)
    return graph, x, relu, output


def test_node_copy_into_another_graph(fx: ModuleType) -> None:
    graph, *_ = relu_graph(fx)
    new_graph = fx.Graph()
    value_remap = {}
    for node in graph.nodes:
        value_remap[node] = new_graph.node_copy(node, lambda n: value_remap[n])
    assert str(new_graph) == str(graph)
    new_graph.lint()
    assert all(node.graph is new_graph for node in new_graph.nodes)


def test_node_copy_copies_type_and_metadata(fx: ModuleType) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x", type_expr=torch.Tensor)
    x.meta["shape"] = (1, 2)
    other = fx.Graph()
    copied = other.node_copy(x)
    assert copied.type is torch.Tensor
    assert copied.meta == {"shape": (1, 2)}
    copied.meta["more"] = 1
    assert "more" not in x.meta


def test_node_copy_within_one_graph_gets_a_new_name(fx: ModuleType) -> None:
    graph, x, relu, output = relu_graph(fx)
    with graph.inserting_after(relu):
        copied = graph.node_copy(relu)
    assert copied.name == "relu_1"
    assert copied.args == (x,)
    assert list(x.users) == [relu, copied]


def test_graph_copy_returns_the_value_of_the_output(fx: ModuleType) -> None:
    graph, x, relu, _ = relu_graph(fx)
    target = fx.Graph()
    value_map = {}
    result = target.graph_copy(graph, value_map)
    assert isinstance(result, fx.Node)
    assert result is value_map[relu]
    assert targets(target) == ["x", torch.relu], "the output itself is not copied"
    target.output(result)
    target.lint()


def test_graph_copy_with_values_already_mapped_inlines(fx: ModuleType) -> None:
    inner, inner_x, *_ = relu_graph(fx)
    outer = fx.Graph()
    a = outer.placeholder("a")
    doubled = outer.call_function(operator.mul, (a, 2))
    result = outer.graph_copy(inner, {inner_x: doubled})
    outer.output(result)
    outer.lint()
    assert targets(outer) == ["a", operator.mul, torch.relu, "output"]
    assert fx.GraphModule({}, outer)(torch.tensor(3.0)).item() == 6.0


def test_graph_copy_of_a_structured_output(fx: ModuleType) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output({"value": [x, 3]})
    target = fx.Graph()
    value_map = {}
    result = target.graph_copy(graph, value_map)
    assert result == {"value": [value_map[x], 3]}


def test_graph_copy_of_a_graph_without_output(fx: ModuleType) -> None:
    graph = fx.Graph()
    graph.placeholder("x")
    assert fx.Graph().graph_copy(graph, {}) is None


def test_graph_copy_can_return_the_output_node(fx: ModuleType) -> None:
    graph, x, relu, output = relu_graph(fx)
    value_map = {}
    value, node = fx.Graph().graph_copy(graph, value_map, return_output_node=True)
    assert value is value_map[relu]
    assert node is output


def test_graph_copy_honours_the_insertion_point(fx: ModuleType) -> None:
    inner, inner_x, *_ = relu_graph(fx)
    outer, x, relu, output = relu_graph(fx)
    with outer.inserting_before(relu):
        value = outer.graph_copy(inner, {inner_x: x})
    relu.args = (value,)
    outer.lint()
    assert [node.name for node in outer.nodes] == ["x", "relu_1", "relu", "output"]


def test_deepcopy_of_a_graph(fx: ModuleType) -> None:
    graph, x, relu, output = relu_graph(fx)
    relu.meta["note"] = "kept"
    output.type = torch.Tensor
    copied = copy.deepcopy(graph)
    assert str(copied) == str(graph)
    copied.lint()
    new_relu = copied.find_nodes(op="call_function", target=torch.relu)[0]
    assert new_relu is not relu
    assert new_relu.meta["note"] == "kept"
    assert copied.output_node().type is torch.Tensor
    new_relu.target = torch.neg
    assert relu.target is torch.relu


def test_deepcopy_of_a_long_graph_does_not_recurse(fx: ModuleType) -> None:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(3000):
        value = graph.call_function(torch.neg, (value,))
    graph.output(value)
    assert len(copy.deepcopy(graph).nodes) == 3002


def test_erase_node(fx: ModuleType) -> None:
    graph, x, relu, output = relu_graph(fx)
    output.args = (x,)
    graph.erase_node(relu)
    assert targets(graph) == ["x", "output"]
    assert len(graph.nodes) == 2
    assert list(x.users) == [output]
    graph.lint()


def test_erasing_a_used_node_is_refused(fx: ModuleType) -> None:
    graph, x, relu, output = relu_graph(fx)
    with pytest.raises(RuntimeError, match="relu.*users?"):
        graph.erase_node(relu)
    assert len(graph.nodes) == 3


def test_erasing_from_the_wrong_graph_is_refused(fx: ModuleType) -> None:
    graph, x, relu, output = relu_graph(fx)
    with pytest.raises(RuntimeError, match="graph"):
        fx.Graph().erase_node(output)


def test_dead_code_is_removed(fx: ModuleType) -> None:
    def forward(x):
        a = x + 1
        b = torch.relu(a)  # noqa: F841
        return x * 2

    traced = fx.symbolic_trace(forward)
    assert traced.graph.eliminate_dead_code() is True
    traced.recompile()
    assert targets(traced.graph) == ["x", operator.mul, "output"]
    assert traced.graph.eliminate_dead_code() is False


def test_unused_inputs_stay(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x, unused: x + 1)
    assert traced.graph.eliminate_dead_code() is False
    assert traced(1, 2) == 2


def test_unused_module_call_of_a_pure_module_is_removed(fx: ModuleType) -> None:
    class Wasteful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            self.linear(x)
            return x

    traced = fx.symbolic_trace(Wasteful().eval())
    assert traced.graph.eliminate_dead_code() is True
    assert targets(traced.graph) == ["x", "output"]


def test_unused_get_attr_is_removed(fx: ModuleType) -> None:
    class Fetching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            self.weight + 1
            return x

    traced = fx.symbolic_trace(Fetching())
    traced.graph.eliminate_dead_code()
    assert targets(traced.graph) == ["x", "output"]


def test_assertions_and_stores_are_not_dead(fx: ModuleType) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch._assert, (x, "must be true"))
    graph.call_function(operator.setitem, (x, 0, 1))
    graph.output(x)
    assert graph.eliminate_dead_code() is False
    assert len(graph.nodes) == 4


def test_module_that_says_it_is_impure_is_not_dead(fx: ModuleType) -> None:
    class Printing(nn.Module):
        _is_impure = True

        def forward(self, x):
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.printing = Printing()

        def forward(self, x):
            self.printing(x)
            return x

    class Leaves(fx.Tracer):
        def is_leaf_module(self, m, module_qualified_name):
            return True

    model = Model()
    module = fx.GraphModule(model, Leaves().trace(model))
    assert module.graph.eliminate_dead_code() is False


def test_function_marked_with_a_side_effect_is_not_dead(fx: ModuleType) -> None:
    @fx.has_side_effect
    def log(x):
        return x

    graph = fx.Graph()
    x = graph.placeholder("x")
    logged = graph.call_function(log, (x,))
    quieted = graph.call_function(torch.neg, (x,))
    graph.output(x)
    assert logged.is_impure()
    assert not quieted.is_impure()
    graph.eliminate_dead_code()
    assert targets(graph) == ["x", log, "output"]


def test_caller_may_say_what_is_impure(fx: ModuleType) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.relu, (x,))
    graph.call_function(torch.neg, (x,))
    graph.output(x)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.target is torch.relu or node.op != "call_function")
    assert targets(graph) == ["x", torch.relu, "output"]


def test_lint_accepts_a_good_graph(fx: ModuleType) -> None:
    graph, *_ = relu_graph(fx)
    assert graph.lint() is None


def test_lint_notices_a_value_used_before_it_is_made(fx: ModuleType) -> None:
    graph, x, relu, output = relu_graph(fx)
    x.prepend(relu)
    with pytest.raises(RuntimeError, match="(?i)before"):
        graph.lint()


def test_lint_notices_a_missing_submodule(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(OneLinear())
    del traced.linear
    with pytest.raises(RuntimeError, match="linear"):
        traced.graph.lint()


def test_lint_notices_a_call_of_something_that_is_no_module(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(OneLinear())
    del traced.linear
    traced.linear = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match="linear"):
        traced.graph.lint()


def test_lint_notices_a_missing_attribute(fx: ModuleType) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.weight + x

    traced = fx.symbolic_trace(Model())
    del traced.weight
    with pytest.raises(RuntimeError, match="weight"):
        traced.graph.lint()


def test_warning_when_an_attribute_does_not_exist_yet(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: x)
    with pytest.warns(UserWarning, match="."):
        traced.graph.get_attr("absent")


def test_pickle_of_a_graph(fx: ModuleType) -> None:
    graph, *_ = relu_graph(fx)
    loaded = pickle.loads(pickle.dumps(graph))
    assert str(loaded) == str(graph)
    assert fx.GraphModule({}, loaded)(torch.tensor(-1.0)).item() == 0.0


def test_graph_module_can_be_given_another_graph(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: x + 1)
    other, *_ = relu_graph(fx)
    traced.graph = other
    assert traced.graph is other
    assert traced(torch.tensor(-3.0)).item() == 0.0
    assert "relu" in traced.code


def test_swapping_an_operator_by_its_target(fx: ModuleType) -> None:
    def transform(m: nn.Module, tracer_class: type = fx.Tracer) -> nn.Module:
        graph = tracer_class().trace(m)
        for node in graph.nodes:
            if node.op == "call_function" and node.target == torch.add:
                node.target = torch.mul
        graph.lint()
        return fx.GraphModule(m, graph)

    class M(nn.Module):
        def forward(self, x, y):
            return torch.add(x, y)

    assert transform(M())(torch.tensor(3.0), torch.tensor(4.0)).item() == 12.0


def test_inserting_a_function_and_rewiring_its_users(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: torch.neg(x) * 2)
    (negation,) = traced.graph.find_nodes(op="call_function", target=torch.neg)
    with traced.graph.inserting_after(negation):
        new_node = traced.graph.call_function(torch.relu, args=(negation,))
        negation.replace_all_uses_with(new_node)
        new_node.args = (negation,)
    traced.graph.lint()
    traced.recompile()
    assert traced(torch.tensor(-3.0)).item() == 6.0
    assert traced(torch.tensor(3.0)).item() == 0.0
