"""Graph built by hand: one method per opcode, names, insertion points, and what a finished graph answers.

Copying, dead code, checks and code generation are examined in test_graph_editing and test_graph_code.
"""

import operator
from types import ModuleType

import pytest
import torch
from torch import nn

from tests.torch_versions import torch_fx_since


def names(graph) -> list[str]:
    return [node.name for node in graph.nodes]


def test_empty_graph(fx: ModuleType) -> None:
    graph = fx.Graph()
    assert len(graph.nodes) == 0
    assert list(graph.nodes) == []
    assert graph.owning_module is None


def test_every_opcode_by_its_method(fx: ModuleType) -> None:
    root = nn.Module()
    root.linear = nn.Linear(2, 2)
    root.weight = nn.Parameter(torch.ones(2))
    graph = fx.Graph()
    x = graph.placeholder("x")
    weight = graph.get_attr("weight")
    linear = graph.call_module("linear", (x,))
    method = graph.call_method("relu", (linear,))
    function = graph.call_function(torch.add, args=(method, weight), kwargs={"alpha": 2})
    output = graph.output(function)
    assert [node.op for node in graph.nodes] == [
        "placeholder", "get_attr", "call_module", "call_method", "call_function", "output",
    ]  # fmt: skip
    assert [node.target for node in graph.nodes] == ["x", "weight", "linear", "relu", torch.add, "output"]
    assert all(isinstance(node, fx.Node) for node in graph.nodes)
    assert all(node.graph is graph for node in graph.nodes)
    assert output.args == (function,)
    graph.lint()
    data = torch.rand(1, 2)
    assert torch.equal(fx.GraphModule(root, graph)(data), torch.add(root.linear(data).relu(), root.weight, alpha=2))


def test_create_node_is_the_general_form(fx: ModuleType) -> None:
    graph = fx.Graph()
    x = graph.create_node("placeholder", "x", name="given", type_expr=torch.Tensor)
    node = graph.create_node("call_function", torch.relu, (x,), {}, "named", torch.Tensor)
    graph.create_node("output", "output", args=(node,))
    assert names(graph) == ["given", "named", "output"]
    assert x.type is torch.Tensor
    assert node.type is torch.Tensor
    assert node.args == (x,)
    assert node.kwargs == {}


def test_missing_args_and_kwargs_are_empty(fx: ModuleType) -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.initial_seed)
    assert node.args == ()
    assert node.kwargs == {}


def test_unknown_opcode_is_refused(fx: ModuleType) -> None:
    with pytest.raises((AssertionError, ValueError)):
        fx.Graph().create_node("call_nothing", "x")


def test_target_must_suit_the_opcode(fx: ModuleType) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with pytest.raises((ValueError, AssertionError)):
        graph.create_node("call_function", "relu", (x,))
    with pytest.raises((ValueError, AssertionError)):
        graph.create_node("call_method", torch.relu, (x,), name="relu")


def test_type_expressions_on_every_method(fx: ModuleType) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x", type_expr=torch.Tensor)
    nodes = [
        x,
        graph.get_attr("w", type_expr=torch.Tensor),
        graph.call_module("m", (x,), type_expr=torch.Tensor),
        graph.call_method("relu", (x,), type_expr=torch.Tensor),
        graph.call_function(torch.relu, (x,), type_expr=torch.Tensor),
        graph.output(x, type_expr=torch.Tensor),
    ]
    assert all(node.type is torch.Tensor for node in nodes)


def test_default_value_of_a_placeholder(fx: ModuleType) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.placeholder("y", default_value=3)
    z = graph.placeholder("z", default_value=None)
    graph.output((x, y, z))
    assert (x.args, y.args, z.args) == ((), (3,), (None,))
    assert fx.GraphModule({}, graph)(1) == (1, 3, None)


def test_names_come_from_targets(fx: ModuleType) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.get_attr("block.0.weight")
    graph.call_module("block.0.conv", (x,))
    graph.call_method("relu", (x,))
    graph.call_method("__getitem__", (x, 0))
    graph.call_function(torch.nn.functional.max_pool2d, (x, 2))
    graph.call_function(operator.add, (x, 1))
    graph.output(x)
    assert names(graph) == [
        "x", "block_0_weight", "block_0_conv", "relu", "getitem", "max_pool2d", "add", "output",
    ]  # fmt: skip


def test_class_names_become_snake_case(fx: ModuleType) -> None:
    class TensorPair:
        pass

    graph = fx.Graph()
    assert graph.call_function(TensorPair).name == "tensor_pair"
    assert graph.call_module("layer.someBlock", ()).name == "layer_some_block"


def test_repeated_names_are_numbered(fx: ModuleType) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(3):
        graph.call_function(torch.relu, (x,))
    assert names(graph) == ["x", "relu", "relu_1", "relu_2"]


@torch_fx_since(2, 13)
def test_a_given_number_is_respected_and_counted_on(fx: ModuleType) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = [
        graph.create_node("call_function", torch.relu, (x,), name=name).name for name in ("relu_5", "relu", "relu_5")
    ]
    assert made == ["relu_5", "relu", "relu_6"]


def test_numbers_after_a_name_ending_in_digits(fx: ModuleType) -> None:
    graph = fx.Graph()
    made = [graph.placeholder(name).name for name in ("x1", "x1", "x_1", "x_1", "x")]
    assert made == ["x1", "x1_1", "x_1", "x_2", "x"]


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("len", "len_1"),
        ("sum", "sum_1"),
        ("float", "float_1"),
        ("class", "class_1"),
        ("and", "and_1"),
        ("lambda", "lambda_1"),
        ("torch", "torch_1"),
        ("inf", "inf_1"),
        ("nan", "nan_1"),
        ("device", "device_1"),
        ("a.b.c", "a_b_c"),
        ("a-b c", "a_b_c"),
        ("0start", "_0start"),
        ("*args", "_args"),
        ("**kwargs", "_kwargs"),
    ],
)
def test_illegal_names_are_mended(fx: ModuleType, asked: str, given: str) -> None:
    node = fx.Graph().create_node("call_method", asked, ())
    assert node.name == given


def test_explicit_name_keeps_its_case(fx: ModuleType) -> None:
    graph = fx.Graph()
    assert graph.create_node("call_function", torch.relu, (), name="ReLU").name == "ReLU"


def test_and_or_methods_of_tensors(fx: ModuleType) -> None:
    def forward(x, y):
        return (x & y) | x.logical_and(y)

    traced = fx.symbolic_trace(forward)
    assert names(traced.graph) == ["x", "y", "and_", "logical_and", "or_", "output"]
    assert traced(torch.tensor(True), torch.tensor(False)).item() is False


def test_names_freed_by_erasing_are_not_given_twice(fx: ModuleType) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.relu, (x,))
    graph.erase_node(first)
    assert graph.call_function(torch.relu, (x,)).name == "relu_1"


def test_default_insertion_point_is_the_end(fx: ModuleType) -> None:
    graph = fx.Graph()
    for name in "abc":
        graph.placeholder(name)
    assert names(graph) == ["a", "b", "c"]


def chain(fx: ModuleType):
    graph = fx.Graph()
    a = graph.placeholder("a")
    b = graph.call_method("b", (a,))
    c = graph.call_method("c", (b,))
    return graph, a, b, c


def test_inserting_before(fx: ModuleType) -> None:
    graph, a, b, c = chain(fx)
    with graph.inserting_before(b):
        graph.call_method("one", (a,))
        graph.call_method("two", (a,))
    graph.call_method("end", (c,))
    assert names(graph) == ["a", "one", "two", "b", "c", "end"]


def test_inserting_after_puts_the_newest_first(fx: ModuleType) -> None:
    graph, a, b, c = chain(fx)
    with graph.inserting_after(a):
        graph.call_method("one", (a,))
        graph.call_method("two", (a,))
    graph.call_method("end", (c,))
    assert names(graph) == ["a", "two", "one", "b", "c", "end"]


def test_insertion_contexts_nest(fx: ModuleType) -> None:
    graph, a, b, c = chain(fx)
    with graph.inserting_before(c):
        graph.call_method("one", (a,))
        with graph.inserting_before(b):
            graph.call_method("two", (a,))
        graph.call_method("three", (a,))
    assert names(graph) == ["a", "two", "b", "one", "three", "c"]


def test_insertion_point_without_a_node(fx: ModuleType) -> None:
    graph, a, b, c = chain(fx)
    with graph.inserting_before():
        graph.call_method("front", ())
    with graph.inserting_after():
        graph.call_method("back", ())
    assert names(graph) == ["front", "a", "b", "c", "back"]


def test_insertion_point_set_for_good(fx: ModuleType) -> None:
    graph, a, b, c = chain(fx)
    graph.inserting_before(b)
    graph.call_method("one", (a,))
    graph.call_method("two", (a,))
    assert names(graph) == ["a", "one", "two", "b", "c"]


def test_insertion_point_is_restored_after_an_exception(fx: ModuleType) -> None:
    graph, a, b, c = chain(fx)
    with pytest.raises(KeyError), graph.inserting_before(b):
        raise KeyError
    graph.call_method("end", (c,))
    assert names(graph)[-1] == "end"


def test_insertion_point_in_another_graph_is_refused(fx: ModuleType) -> None:
    graph, *_ = chain(fx)
    _, stranger, *_ = chain(fx)
    with pytest.raises(Exception, match="(?i)graph"):
        graph.inserting_before(stranger)
    with pytest.raises(Exception, match="(?i)graph"):
        graph.inserting_after(stranger)


def test_nodes_can_be_walked_backwards_and_counted(fx: ModuleType) -> None:
    graph, *_ = chain(fx)
    assert len(graph.nodes) == 3
    assert [node.name for node in reversed(graph.nodes)] == ["c", "b", "a"]


def test_nodes_may_be_inserted_and_erased_while_walking(fx: ModuleType) -> None:
    def forward(x):
        return torch.relu(torch.neg(torch.relu(x)))

    traced = fx.symbolic_trace(forward)
    for node in traced.graph.nodes:
        if node.target is torch.relu:
            with traced.graph.inserting_after(node):
                new = traced.graph.call_function(torch.tanh, node.args, node.kwargs)
            node.replace_all_uses_with(new)
            traced.graph.erase_node(node)
    traced.recompile()
    assert [node.target for node in traced.graph.nodes] == ["x", torch.tanh, torch.neg, torch.tanh, "output"]


def test_output_node(fx: ModuleType) -> None:
    graph, a, b, c = chain(fx)
    output = graph.output(c)
    assert graph.output_node() is output


def test_output_may_hold_a_structure(fx: ModuleType) -> None:
    graph, a, b, c = chain(fx)
    output = graph.output({"first": [a, b], "second": (c, 1)})
    assert output.all_input_nodes == [a, b, c]


def test_find_nodes(fx: ModuleType) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.relu, (x,))
    second = graph.call_function(torch.neg, (first,))
    third = graph.call_function(torch.relu, (second,))
    module = graph.call_module("m", (third,))
    method = graph.call_method("sin", (module,))
    with graph.inserting_before(first):
        early = graph.call_function(torch.relu, (x,))
    assert graph.find_nodes(op="call_function", target=torch.relu) == [early, first, third]
    assert set(graph.find_nodes(op="call_function", target=torch.relu, sort=False)) == {early, first, third}
    assert graph.find_nodes(op="placeholder") == [x]
    assert graph.find_nodes(op="call_module", target="m") == [module]
    assert graph.find_nodes(op="call_method", target="sin") == [method]
    assert graph.find_nodes(op="call_method", target="cos") == []
    assert graph.find_nodes(op="get_attr") == []


def test_find_nodes_follows_edits(fx: ModuleType) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.relu, (x,))
    second = graph.call_function(torch.relu, (x,))
    first.target = torch.neg
    graph.erase_node(second)
    assert graph.find_nodes(op="call_function", target=torch.relu) == []
    assert graph.find_nodes(op="call_function", target=torch.neg) == [first]


def test_graph_as_text(fx: ModuleType) -> None:
    class Sample(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.param = nn.Parameter(torch.rand(3, 4))
            self.linear = nn.Linear(4, 5)

        def forward(self, x):
            return self.linear(x + self.param).clamp(min=0.0, max=1.0)

    assert str(fx.symbolic_trace(Sample()).graph) == (
        "graph():\n"
        "    %x : [num_users=1] = placeholder[target=x]\n"
        "    %param : [num_users=1] = get_attr[target=param]\n"
        "    %add : [num_users=1] = call_function[target=operator.add](args = (%x, %param), kwargs = {})\n"
        "    %linear : [num_users=1] = call_module[target=linear](args = (%add,), kwargs = {})\n"
        "    %clamp : [num_users=1] = call_method[target=clamp](args = (%linear,), kwargs = {min: 0.0, max: 1.0})\n"
        "    return clamp"
    )


def test_print_tabular_prints_opcodes_names_and_targets(fx: ModuleType, capsys) -> None:
    pytest.importorskip("tabulate")
    fx.symbolic_trace(lambda x: torch.relu(x).neg()).graph.print_tabular()
    printed = capsys.readouterr().out
    header, *_ = printed.splitlines()
    assert header.split() == ["opcode", "name", "target", "args", "kwargs"]
    for word in ("placeholder", "call_function", "call_method", "neg", "output"):
        assert word in printed


def test_graph_module_owns_its_graph(fx: ModuleType) -> None:
    graph, a, b, c = chain(fx)
    graph.output(c)
    module = fx.GraphModule({}, graph)
    assert module.graph is graph
    assert graph.owning_module is module


def test_graph_knows_the_tracer_class_it_is_given(fx: ModuleType) -> None:
    class Mine(fx.Tracer):
        pass

    graph = fx.Graph(tracer_cls=Mine)
    graph.output(graph.placeholder("x"))
    assert fx.GraphModule({}, graph)(1) == 1
    owner = fx.symbolic_trace(lambda x: x)
    assert fx.Graph(owning_module=owner).owning_module is owner
