"""`from_fx` and `to_fx`: there and back again, node for node, with metadata, code, results and gradients."""

import operator
import pickle
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn

import torchgraft
from tests.bridge.comparison import assert_same_graph, assert_same_module, assert_same_outcome, outcome
from tests.bridge.models import SMALL, Pair, small
from tests.compatibility.programs import PROGRAMS
from tests.torch_versions import TORCH
from torchgraft import BridgeError, from_fx, to_fx
from torchgraft.capturing.symbolic.inputs import _assert_is_none
from torchgraft.capturing.tracer_base import assert_traced

# ---- there and back ----


@pytest.mark.zoo
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", SMALL)
def test_zoo_models_cross_both_ways(name, mode):
    model, inputs = small(name)
    model.train(mode == "train")
    theirs = torch.fx.symbolic_trace(model)
    ours = torchgraft.symbolic_trace(model)
    assert_same_module(to_fx(from_fx(theirs)), theirs)
    assert_same_module(from_fx(to_fx(ours)), ours)
    expected = outcome(theirs, inputs)
    for module in (from_fx(theirs), to_fx(ours), to_fx(from_fx(theirs)), from_fx(to_fx(ours))):
        assert_same_outcome(outcome(module, inputs), expected)
        module.graph.lint()


@pytest.mark.parametrize("build", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_programs_of_torch_fx_cross_both_ways(build):
    theirs = build(torch.fx)
    ours = from_fx(theirs)
    ours.graph.lint()
    assert_same_module(to_fx(ours), theirs)


@pytest.mark.parametrize("build", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_programs_of_ours_cross_both_ways(build):
    ours = build(torchgraft)
    theirs = to_fx(ours)
    theirs.graph.lint()
    assert_same_module(from_fx(theirs), ours)


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.linear = nn.Linear(3, 3)
        self.inner.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.arange(3.0))


def build_everything(fx: Any) -> Any:
    """All six opcodes, nested arguments, annotations, a default, keyword arguments, a star."""
    graph = fx.Graph()
    x = graph.placeholder("x", torch.Tensor)
    scale = graph.placeholder("scale", float, default_value=2.0)
    rest = graph.placeholder("*rest")
    weight = graph.get_attr("inner.weight")
    offset = graph.get_attr("offset", torch.Tensor)
    linear = graph.call_module("inner.linear", (x,), type_expr=torch.Tensor)
    product = graph.call_function(torch.mul, (linear, weight), {}, name="product")
    stacked = graph.call_function(torch.stack, ([product, x],), {"dim": 0})
    part = graph.call_function(operator.getitem, (stacked, (slice(None, 1, None), ...)))
    total = graph.call_method("sum", (part,), {"dim": (0,), "keepdim": False})
    scaled = graph.call_function(torch.mul, (total, scale))
    results = scaled, [offset, rest, {"constant": (1, None, torch.float32)}]
    # torch.fx cannot return a named tuple before 2.13.
    graph.output(*((Pair(*results), Pair) if TORCH >= (2, 13) else (results, tuple)))
    return fx.GraphModule(Everything(), graph, "Everything")


@pytest.mark.parametrize("fx", [torch.fx, torchgraft], ids=["torch.fx", "torchgraft"])
def test_a_hand_built_graph_with_every_opcode_crosses(fx):
    module = build_everything(fx)
    there, back = (from_fx, to_fx) if fx is torch.fx else (to_fx, from_fx)
    assert_same_module(back(there(module)), module)
    args = (torch.randn(2, 3, requires_grad=True), 3.0, 4, 5)
    assert_same_outcome(outcome(there(module), args), outcome(module, args))


def test_a_graph_without_an_output_crosses():
    graph = torch.fx.Graph()
    graph.call_function(torch.relu, (graph.placeholder("x"),))
    module = torch.fx.GraphModule(nn.Module(), graph)
    assert from_fx(module)(torch.ones(1)) is None
    assert_same_module(to_fx(from_fx(module)), module)


# ---- order, users, names ----


def test_the_order_of_users_crosses():
    def program(x):
        return torch.relu(x) + torch.neg(x)

    module = torch.fx.symbolic_trace(program)
    x, relu, *_ = module.graph.nodes
    del x.users[relu]
    x.users[relu] = None  # neg is now the first user
    ours = from_fx(module)
    assert [user.name for user in next(iter(ours.graph.nodes)).users] == ["neg", "relu"]
    assert_same_module(to_fx(ours), module)


def test_new_names_go_on_where_they_were():
    module = torch.fx.symbolic_trace(lambda x: torch.relu(torch.relu(torch.relu(x))))
    last = list(module.graph.nodes)[3]
    last.replace_all_uses_with(last.args[0])
    module.graph.erase_node(last)
    ours = from_fx(module)
    for graph in (module.graph, ours.graph, to_fx(ours).graph):
        with graph.inserting_before(graph.output_node()):
            assert graph.call_function(torch.relu, (next(iter(graph.nodes)),)).name == "relu_3"


def test_illegal_names_of_torch_fx_arrive_and_are_reported():
    module = torch.fx.symbolic_trace(lambda x: torch.relu(torch.relu(x)))
    list(module.graph.nodes)[2].name = "relu"
    ours = from_fx(module)
    with pytest.raises(torchgraft.GraphError, match="the name 'relu' is used by more than one node"):
        ours.graph.lint()
    assert [node.name for node in to_fx(ours).graph.nodes] == ["x", "relu", "relu", "output"]


def test_a_graph_in_the_wrong_order_arrives_and_is_reported():
    module = torch.fx.symbolic_trace(lambda x: torch.neg(torch.relu(x)))
    _, relu, neg, _ = module.graph.nodes
    relu.prepend(neg)
    with pytest.raises(torchgraft.GraphError, match="before it has been defined"):
        from_fx(module).graph.lint()


def test_an_argument_of_another_graph_is_refused():
    module = torch.fx.symbolic_trace(lambda x: torch.relu(x))
    other = torch.fx.symbolic_trace(lambda elsewhere: elsewhere)
    list(module.graph.nodes)[1].args = (next(iter(other.graph.nodes)),)
    with pytest.raises(
        BridgeError, match="cannot convert node 'relu': its argument 'elsewhere' is not in the same graph"
    ):
        from_fx(module)


def test_arguments_have_the_containers_of_their_library():
    module = torch.fx.symbolic_trace(lambda x: torch.cat([x, x]).reshape(shape=[1, -1]))
    ours = from_fx(module)
    cat, reshape = list(ours.graph.nodes)[1:3]
    assert type(cat.args[0]) is torchgraft.immutable_list
    assert type(reshape.kwargs) is torchgraft.immutable_dict
    cat, reshape = list(to_fx(ours).graph.nodes)[1:3]
    assert type(cat.args[0]) is torch.fx.immutable_collections.immutable_list
    assert type(reshape.kwargs) is torch.fx.immutable_collections.immutable_dict


# ---- both are independent afterwards ----


def test_edits_do_not_cross():
    module = torch.fx.symbolic_trace(lambda x: torch.relu(x))
    ours = from_fx(module)
    list(ours.graph.nodes)[1].target = torch.neg
    assert module(torch.ones(1)) == 1 and ours(torch.ones(1)) == -1
    theirs = to_fx(ours)
    list(ours.graph.nodes)[1].target = torch.abs
    assert theirs(torch.ones(1)) == -1 and ours(torch.ones(1)) == 1


def test_edits_without_recompile_are_in_the_result():
    module = torch.fx.symbolic_trace(lambda x: torch.relu(x))
    list(module.graph.nodes)[1].target = torch.neg
    assert module(torch.ones(1)) == 1
    assert from_fx(module)(torch.ones(1)) == -1


# ---- functions with a counterpart ----


def test_functions_of_torch_fx_become_ours():
    theirs = torch.fx.symbolic_trace(lambda x, y=None: x, concrete_args={"y": None})
    ours = from_fx(theirs)
    assert [node.target for node in ours.graph.nodes if node.op == "call_function"] == [_assert_is_none]
    assert_same_module(to_fx(ours), theirs)
    for module in (theirs, ours):
        with pytest.raises(AssertionError, match="has been specialized"):
            module(torch.ones(1), 3)


def test_assertions_of_torch_fx_become_ours():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.fx.proxy.assert_fn, (x,))
    graph.output(x)
    theirs = torch.fx.GraphModule(nn.Module(), graph)
    ours = from_fx(theirs)
    assert ours.graph.find_nodes(op="call_function", target=assert_traced)
    with pytest.raises(AssertionError):
        ours(False)
    assert_same_module(to_fx(ours), theirs)


def leaf(x):
    return x * 2


def declared(x):
    return None


torch.fx.wrap("leaf")


def test_wrapped_functions_stay_leaves_on_both_sides():
    theirs = torch.fx.symbolic_trace(lambda x: leaf(x) + 1)
    ours = from_fx(theirs)
    assert_same_module(to_fx(ours), theirs)
    for again in (torchgraft.symbolic_trace(ours), torch.fx.symbolic_trace(to_fx(ours))):
        assert leaf in [node.target for node in again.graph.nodes]


def test_declared_effects_survive_dead_code_elimination_in_torch_fx():
    torchgraft.has_side_effect(declared)
    graph = torchgraft.Graph()
    x = graph.placeholder("x")
    graph.call_function(declared, (x,))
    graph.output(x)
    theirs = to_fx(torchgraft.GraphModule(nn.Module(), graph))
    assert not theirs.graph.eliminate_dead_code()
    assert theirs.graph.find_nodes(op="call_function", target=declared)


# ---- tracers ----


class OwnTracer(torchgraft.Tracer):
    pass


class TheirTracer(torch.fx.Tracer):
    pass


@pytest.mark.parametrize("tracer", [torchgraft.Tracer, OwnTracer])
def test_our_tracer_class_comes_back(tracer):
    model = nn.Sequential(nn.ReLU())
    ours = torchgraft.GraphModule(model, tracer().trace(model))
    theirs = to_fx(ours)
    assert theirs.graph._tracer_cls in (torch.fx.Tracer, None)
    assert from_fx(theirs).graph._tracer_cls is tracer
    assert pickle.loads(pickle.dumps(theirs)).code == theirs.code


def test_their_tracer_class_comes_back():
    model = nn.Sequential(nn.ReLU())
    theirs = torch.fx.GraphModule(model, TheirTracer().trace(model))
    back = to_fx(from_fx(theirs))
    assert back.graph._tracer_cls is TheirTracer and back._tracer_cls is TheirTracer
    assert_same_graph(back.graph, theirs.graph)


# ---- from other makers of torch.fx graphs ----


def test_graphs_of_torch_compile_cross():
    seen = []

    def backend(module, inputs):
        ours = from_fx(module)
        ours.graph.lint()
        assert_same_module(to_fx(ours), module)
        seen.append(ours)
        return ours.forward

    def program(x, y):
        with torch.no_grad():
            z = x @ y
        return z.view(x.shape[0] * 2, -1) + x.shape[1]

    x, y = torch.randn(4, 6), torch.randn(6, 8)
    assert torch.equal(torch.compile(program, backend=backend, dynamic=True)(x, y), program(x, y))
    assert seen


def test_graphs_of_make_fx_cross():
    from torch.fx.experimental.proxy_tensor import make_fx

    table = torch.arange(4.0)
    theirs = make_fx(lambda x: (x.relu() + table).sum())(torch.randn(4))
    ours = from_fx(theirs)
    assert ours.graph._constants["_tensor_constant0"] is theirs._tensor_constant0
    assert_same_module(to_fx(ours), theirs)
    assert torch.equal(ours(torch.ones(4)), theirs(torch.ones(4)))


# ---- what captured programs have in them ----


class Scale(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 5


@pytest.mark.parametrize("capture", [torchgraft.symbolic_trace, lambda f: torchgraft.capture(f, (torch.ones(2),))])
def test_a_custom_autograd_function_crosses_and_leaves_torch_fx_alone(capture):
    program = capture(lambda x: Scale.apply(x) + 1)
    theirs = to_fx(program)
    x = torch.ones(2, requires_grad=True)
    theirs(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 5.0))
    assert "Scale_apply" in theirs.code and "torch.autograd.function.apply" not in theirs.code
    assert_same_graph(from_fx(theirs).graph, program.graph)
    # torch.fx traces whatever it has been told to wrap, and fails for good where that does not exist.
    assert torch.fx.symbolic_trace(nn.ReLU())(torch.tensor([-1.0])) == 0


def test_guards_cross_and_are_checked_there():
    theirs = to_fx(torchgraft.capture(lambda x, flag=False: x * 2 if x.shape[0] > 2 else x, (torch.ones(3),)))
    theirs.graph.eliminate_dead_code()
    theirs.recompile()
    assert torch.equal(theirs(torch.ones(4)), torch.full((4,), 2.0))
    for wrong in [(torch.ones(2),), (torch.ones(3), True), ("text",)]:
        with pytest.raises(torchgraft.GuardError):
            theirs(*wrong)
