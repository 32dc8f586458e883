"""`from_networkx`: round trips at every level, each kind of edit, and every wrong edit with its message."""

from __future__ import annotations

import copy

import networkx as nx
import pytest
import torch
from torch import nn

import torchgraft
from tests.names import stable
from tests.view.programs import MLP, Net, Twice, WritesInPlace
from torchgraft.errors import GraphError

X = torch.linspace(-1, 1, 32).reshape(2, 16)
IMAGE = torch.linspace(-1, 1, 96).reshape(2, 3, 4, 4)


def same(left, right) -> bool:
    left, right = torch.utils._pytree.tree_leaves(left), torch.utils._pytree.tree_leaves(right)
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize("level", ["module", "function", "aten", "core_aten"])
@pytest.mark.parametrize(("make", "x"), [(MLP, X), (Net, IMAGE)])
def test_an_unchanged_graph_gives_the_same_program(level: str, make, x: torch.Tensor) -> None:
    model = make().eval()
    program = torchgraft.capture(model, (x,), level=level)
    again = torchgraft.from_networkx(torchgraft.to_networkx(program), program)
    assert again.code == program.code
    assert same(again(x), model(x))
    assert type(again).__name__ == type(program).__name__
    notes = [{key for key in ("val", "stack_trace", "nn_module_stack") if key in n.meta} for n in program.graph.nodes]
    assert [
        {key for key in ("val", "stack_trace", "nn_module_stack") if key in n.meta} for n in again.graph.nodes
    ] == notes


def test_a_joint_program_comes_back() -> None:
    model = MLP()
    program = torchgraft.capture(model, (X,), level="joint")
    again = torchgraft.from_networkx(torchgraft.to_networkx(program), program)
    inputs = [*[parameter.detach() for parameter in model.parameters()], X, torch.ones(2, 16)]
    assert same(again(*inputs), program(*inputs))
    assert again.code == program.code
    # It holds no state, so it needs no root either; then it takes its inputs without checking their sizes.
    bare = torchgraft.from_networkx(torchgraft.to_networkx(program))
    assert same(bare(*inputs), program(*inputs))
    assert bare.graph.find_nodes(op="placeholder")[0].meta["origin_name"] == "fc1.weight"


def test_a_model_or_a_dict_can_be_the_root() -> None:
    model = MLP()
    graph = torchgraft.to_networkx(torchgraft.symbolic_trace(model))
    assert same(torchgraft.from_networkx(graph, model)(X), model(X))
    assert same(torchgraft.from_networkx(graph, dict(model.named_modules()))(X), model(X))
    node = next(n for n in torchgraft.from_networkx(graph, model).graph.nodes if n.name == "relu")
    assert "x = self.relu(self.fc1(x))" in node.stack_trace
    assert list(node.meta["nn_module_stack"].values()) == [("relu", "ReLU")]


def test_renamed() -> None:
    program = torchgraft.symbolic_trace(MLP())
    graph = nx.relabel_nodes(torchgraft.to_networkx(program), {"relu": "activation", "x": "images"})
    again = torchgraft.from_networkx(graph, program)
    assert [node.name for node in again.graph.nodes] == ["images", "fc1", "activation", "fc2", "output"]
    assert same(again(X), program(X)) and same(again(x=X), program(X))  # the input keeps its name for callers


def test_rewired_and_removed() -> None:
    program = torchgraft.symbolic_trace(MLP())
    graph = torchgraft.to_networkx(program)
    graph.remove_node("relu")
    graph.add_edge("fc1", "fc2", key=0)
    again = torchgraft.from_networkx(graph, program)
    assert same(again(X), program.fc2(program.fc1(X)))
    assert "relu" not in dict(again.named_modules())


def test_added() -> None:
    program = torchgraft.symbolic_trace(Twice())
    graph = torchgraft.to_networkx(program)
    graph.add_node("shifted", op="call_function", target="torch.add", args=[{"input": 0}, 1], kwargs={"alpha": 3})
    graph.add_edge("x", "shifted", key=0)
    graph.remove_edge("x", "mul", key=1)
    graph.add_edge("shifted", "mul", key=1)
    again = torchgraft.from_networkx(graph, program)
    assert same(again(X), X * (X + 3))
    assert [node.name for node in again.graph.nodes] == ["x", "shifted", "mul", "output"]


def test_added_inputs_come_last_and_new_nodes_take_their_edges_in_order() -> None:
    program = torchgraft.symbolic_trace(Twice())
    graph = torchgraft.to_networkx(program)
    graph.add_node("y", op="placeholder", target="y")
    graph.add_node("difference", op="call_function", target="operator.sub")
    graph.add_edges_from([("mul", "difference", 1), ("y", "difference", 0)])
    graph.remove_edge("mul", "output", key=0)
    graph.add_edge("difference", "output", key=0)
    assert same(torchgraft.from_networkx(graph, program)(X, X + 1), (X + 1) - X * X)


def test_a_changed_constant_and_target() -> None:
    program = torchgraft.symbolic_trace(lambda x: torch.clamp(x, min=0.0))
    graph = torchgraft.to_networkx(program)
    graph.nodes["clamp"]["kwargs"] = {"min": 0.25}
    assert torchgraft.from_networkx(graph, program)(X).min() == 0.25
    graph.nodes["clamp"]["target"] = "torch.clip"
    assert torchgraft.from_networkx(graph, program).graph.output_node().args[0].target is torch.clip


def test_values_that_are_no_plain_data_come_from_the_program() -> None:
    secret = object()

    def local(x, tag, *, scale):
        assert tag[0] is secret
        return x * scale

    graph = torchgraft.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(local, (x, [secret]), {"scale": 2.0}))
    program = torchgraft.GraphModule(nn.Module(), graph)
    shown = torchgraft.to_networkx(program)
    shown.nodes["local"]["kwargs"] = {"scale": 3.0}
    assert same(torchgraft.from_networkx(shown, program)(X), X * 3)
    with pytest.raises(GraphError, match="nothing can be imported by that name, or give the original program"):
        torchgraft.from_networkx(shown)


def test_functions_and_values_that_look_alike_are_not_mixed_up() -> None:
    class Same:
        def __repr__(self) -> str:
            return "same"

    def adding(number):
        def local(x, tag):
            assert tag is tags[number]
            return x * 10 + number

        return local

    tags = [Same(), Same(), Same()]
    graph = torchgraft.Graph()
    value = graph.placeholder("x")
    for number, tag in enumerate(tags):
        value = graph.call_function(adding(number), (value, tag))
    graph.output(value)
    program = torchgraft.GraphModule(nn.Module(), graph)
    shown = torchgraft.to_networkx(program)
    # Swap the last two calls, edges and order alike.
    for name, order in (("local_1", 3), ("local_2", 2)):
        shown.nodes[name]["order"] = order
    shown.remove_edges_from([("local", "local_1", 0), ("local_1", "local_2", 0), ("local_2", "output", 0)])
    shown.add_edges_from([("local", "local_2", 0), ("local_2", "local_1", 0), ("local_1", "output", 0)])
    assert torchgraft.from_networkx(shown, program)(1) == 1021
    shown.add_node("new", op="call_function", target=shown.nodes["local"]["target"], args=[{"input": 0}, None])
    shown.add_edge("x", "new", key=0)
    with pytest.raises(GraphError, match="node 'new' calls .*, and the original program has 3 such functions"):
        torchgraft.from_networkx(shown, program)


def test_a_local_function_is_not_taken_for_another_of_its_name() -> None:
    def same(left, right):
        return left

    graph = torchgraft.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(same, (x, x)))
    shown = torchgraft.to_networkx(torchgraft.GraphModule(nn.Module(), graph))
    assert shown.nodes["same"]["importable"] is False
    with pytest.raises(GraphError, match="nothing can be imported by that name, or give the original program"):
        torchgraft.from_networkx(shown)


AWKWARD = [
    (1, (2, [3, None]), {"a": 1.5, "b": (True,)}),
    (float("nan"), float("inf"), -0.0, complex(1, -0.0)),
    (slice(1, None, 2), ..., range(3), torch.Size([2, 3])),
    (torch.float16, torch.device("cpu"), torch.channels_last, torch.strided),
    ("%x", "{}", "", "\x00\n\t é漢"),
    (torch.relu, dict, torch.ops.aten.add.Tensor),
    (),
]


@pytest.mark.parametrize("value", AWKWARD, ids=stable)
def test_awkward_constants(value) -> None:
    def keep(x, constant):
        return x

    graph = torchgraft.Graph()
    graph.output(graph.call_function(keep, (graph.placeholder("x"), value)))
    program = torchgraft.GraphModule(nn.Module(), graph)
    shown = torchgraft.to_networkx(program)
    del shown.nodes["keep"]["node_index"]  # not a node of the original any more, so no value is taken from it
    again = next(n for n in torchgraft.from_networkx(shown, program).graph.nodes if n.name == "keep").args[1]
    assert repr(again) == repr(next(n for n in graph.nodes if n.name == "keep").args[1])


def test_notes_about_values_go_where_they_are_no_longer_true() -> None:
    program = torchgraft.capture(MLP(), (X,), level="aten")
    graph = torchgraft.to_networkx(program)
    graph.add_node("twice", op="call_function", target="torch.cat", args=[[{"input": 0}, {"input": 1}]])
    graph.remove_edge("linear", "relu", key=0)
    graph.add_edges_from([("linear", "twice", 0), ("linear", "twice", 1), ("twice", "relu", 0)])
    again = torchgraft.from_networkx(graph, program)
    noted = {node.name for node in again.graph.nodes if "val" in node.meta}
    assert {"x", "linear"} <= noted and not noted & {"twice", "relu", "linear_1", "output"}
    assert again(X).shape == (4, 16)


# ---- order ----


def test_writes_stay_where_they_were() -> None:
    program = torchgraft.symbolic_trace(WritesInPlace())
    again = torchgraft.from_networkx(torchgraft.to_networkx(program), program)
    assert same(again(X), (X.sum(), (X + 1).sum()))


def test_an_edit_that_would_move_a_read_behind_a_write_is_refused() -> None:
    program = torchgraft.symbolic_trace(WritesInPlace())
    graph = torchgraft.to_networkx(program)
    # `before` shall now depend on something computed after the write.
    graph.nodes["sum_1"]["kwargs"] = {"dtype": {"input": 1}}
    graph.add_node("kind", op="call_function", target="builtins.getattr", args=[{"input": 0}, "dtype"], order=3.5)
    graph.add_edge("sum_2", "kind", key=0)
    graph.add_edge("kind", "sum_1", key=1)
    graph.nodes["kind"]["order"] = 5
    with pytest.raises(GraphError, match="move node 'sum_1' behind nodes that came after it"):
        torchgraft.from_networkx(graph, program)
    graph.nodes["sum_1"]["order"] = 6
    assert same(torchgraft.from_networkx(graph, program)(X), ((X + 1).sum(), (X + 1).sum()))


# ---- wrong edits ----


def edited(change, make=MLP):
    program = torchgraft.symbolic_trace(make())
    graph = torchgraft.to_networkx(program)
    change(graph)
    return graph, program


def cut(graph):
    graph.remove_node("relu")


def circle(graph):
    graph.remove_edge("fc1", "relu", key=0)
    graph.add_edge("fc2", "relu", key=0)


def double(graph):
    graph.add_edge("x", "fc2", key=0)


def superfluous(graph):
    graph.add_edge("x", "fc2", key=7)


def unknown_name(graph):
    graph.remove_edge("relu", "fc2", key=0)
    graph.add_edge("gelu", "fc2", key=0)


def set_attributes(name, **attributes):
    return lambda graph: graph.nodes[name].update(attributes)


def no_output(graph):
    graph.remove_node("output")


def two_outputs(graph):
    graph.add_node("again", op="output")
    graph.add_edge("fc2", "again", key=0)


def use_of_output(graph):
    graph.add_node("after", op="call_function", target="torch.neg")
    graph.add_edge("output", "after", key=0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (cut, r"node 'fc2' has no value for \{'input': 0\} in its arguments: .*'relu', which gave it, is no longer"),
        (circle, r"the edges go round in a circle: (relu -> fc2 -> relu|fc2 -> relu -> fc2)"),
        (lambda graph: graph.add_edge("fc1", "fc1", key=1), r"the edges go round in a circle: fc1 -> fc1"),
        (double, r"node 'fc2' has two edges with key 0, from '(relu|x)' and '(relu|x)'"),
        (superfluous, r"the edge from 'x' to 'fc2' with key 7 is no argument of 'fc2': its args and kwargs use 0"),
        (unknown_name, r"node 'gelu' has no attribute 'op'"),
        (set_attributes("relu", op="call"), r"node 'relu' has op 'call'; it must be one of placeholder"),
        (set_attributes("relu", target=5), r"node 'relu' has target 5; it must be a text"),
        (
            set_attributes("relu", op="call_function", target="torch.reluu"),
            r"'relu' calls 'torch.reluu', and nothing can be",
        ),
        (
            set_attributes("relu", op="call_function", target="torch.nn"),
            r"'torch.nn', which is a module, not a function",
        ),
        (set_attributes("relu", target="missing"), r"has no attribute|missing"),
        (set_attributes("relu", args=3), r"node 'relu' has args 3; it must be a list"),
        (set_attributes("relu", kwargs=[1]), r"node 'relu' has kwargs \[1\]; it must be a dict"),
        (set_attributes("relu", args=[{"input": 0}, {"dtype": "float7"}]), r"node 'relu': .*float7"),
        (
            set_attributes("relu", args=[{"input": 0}, {"a": 1, "b": 2}]),
            r"a dict must have one key that says what it is",
        ),
        (set_attributes("relu", args=[{"input": 0}, {"tensor": 1}]), r"'tensor' is no word for a value"),
        (set_attributes("relu", order="first"), r"node 'relu' has order 'first'; it must be a number"),
        (
            lambda graph: nx.relabel_nodes(graph, {"relu": "my relu"}, copy=False),
            r"'my relu' is no name that Python code",
        ),
        (lambda graph: nx.relabel_nodes(graph, {"relu": 3}, copy=False), r"3 is no name that Python code"),
        (no_output, r"a program has one node with op 'output', and this graph has none"),
        (two_outputs, r"this graph has 2 \(output, again\)"),
        (use_of_output, r"the output 'output' is used by 'after'"),
    ],
)
def test_wrong_edits(change, text: str) -> None:
    graph, program = edited(change)
    before = copy.deepcopy(program.code)
    with pytest.raises((GraphError, AttributeError), match=text):
        torchgraft.from_networkx(graph, program)
    assert program.code == before


def test_every_problem_is_reported() -> None:
    graph, program = edited(lambda graph: (cut(graph), superfluous(graph), no_output(graph)))
    with pytest.raises(GraphError, match="3 problems") as error:
        torchgraft.from_networkx(graph, program)
    assert str(error.value).count("\n  - ") == 3


def test_an_input_too_few_for_a_program_with_containers() -> None:
    class Pair(nn.Module):
        def forward(self, pair):
            return pair[0] + 1

    program = torchgraft.from_export(torch.export.export(Pair(), ((X, X + 1),)))
    graph = torchgraft.to_networkx(program)
    graph.remove_node("_guards_fn")
    unused = [name for name, op in graph.nodes(data="op") if op == "placeholder" and not graph.out_degree(name)]
    graph.remove_nodes_from(unused)
    with pytest.raises(GraphError, match="the original takes the inputs pair_0, pair_1 in containers of its own"):
        torchgraft.from_networkx(graph, program)
    assert same(torchgraft.from_networkx(graph, Pair())(X), (X + 1,))


@pytest.mark.parametrize("kind", [nx.DiGraph, nx.Graph, nx.MultiGraph])
def test_other_graphs(kind) -> None:
    with pytest.raises(GraphError, match=f"cannot make a program of a {kind.__name__}"):
        torchgraft.from_networkx(kind())


def test_without_root_the_missing_parameters_are_named() -> None:
    graph, _ = edited(lambda graph: None)
    with pytest.raises(GraphError, match="node 'fc1' refers to 'fc1', and no root was given"):
        torchgraft.from_networkx(graph)
