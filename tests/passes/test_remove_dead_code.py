"""Dead code is removed, and nothing else: every program here runs before and after, against eager."""

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchgraft
from torchgraft.errors import GraphError
from torchgraft.ir.graph import Graph
from torchgraft.passes.remove_dead_code import eliminate_dead_code


@torchgraft.wrap
def write_first(x, y):
    x.mul_(2)
    return y


@torchgraft.wrap
@torchgraft.pure
def only_compute(x, y):
    result = x + y
    result.mul_(2)
    return result


class Program(nn.Module):
    """A model with something of everything; subclasses say what `forward` does with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.relu = nn.ReLU()
        self.relu_in_place = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(4)
        self.layer_norm = nn.LayerNorm(4)
        self.conv = nn.Conv1d(4, 4, 1)
        self.pool = nn.MaxPool1d(1)
        self.attention = nn.MultiheadAttention(4, 2)
        self.embedding = nn.Embedding(4, 4)
        self.clipped_embedding = nn.Embedding(4, 4, max_norm=0.1)
        self.register_buffer("total", torch.zeros(4))
        self.eval_norm = nn.BatchNorm1d(4)


def method_in_place(self, x):
    y = x + 1
    y.mul_(2)
    return y


def method_in_place_on_view(self, x):
    y = x + 1
    y.view(-1).mul_(2)
    return y


def function_in_place(self, x):
    y = x - 1
    torch.relu_(y)
    return y


def functional_in_place(self, x):
    y = x - 1
    F.relu(y, inplace=True)
    return y


def module_in_place(self, x):
    y = x - 1
    self.relu_in_place(y)
    return y


def out_argument(self, x):
    y = x + 1
    torch.add(x, 2, out=y)
    return y


def set_item(self, x):
    y = x + 1
    operator.setitem(y, 0, 5)
    return y


def set_item_method(self, x):
    y = x + 1
    y.__setitem__(0, 5)
    return y


def in_place_operator_on_alias(self, x):
    y = x + 1
    z = y.view(-1)
    z += 1
    return y


def in_place_operator_function(self, x):
    y = x + 1
    operator.imul(y, 3)
    return y


def write_to_buffer(self, x):
    self.total.add_(1)
    return x + 1


def write_to_parameter(self, x):
    self.linear.weight.detach().mul_(2)
    return self.linear(x)


def write_in_wrapped_function(self, x):
    y = x + 1
    write_first(y, x)
    return y


def random_draw(self, x):
    torch.rand_like(x)
    return x + torch.rand_like(x)


def random_method(self, x):
    x.abs().clamp(0, 1).bernoulli()
    return F.dropout(x)


def functional_dropout(self, x):
    F.dropout(x)
    return F.dropout(x)


def module_dropout(self, x):
    self.dropout(x)
    return self.dropout(x)


def batch_norm_in_training(self, x):
    self.norm(x)
    return x + 1


def embedding_with_maximum(self, x):
    self.clipped_embedding(x.long().clamp(0, 3))
    return self.clipped_embedding.weight + 1


def assertion(self, x):
    torch._assert(x.shape[0] > 0, "empty")
    return x + 1


def no_gradient_region(self, x):
    with torch.no_grad():
        y = x * 2
    return y + x


def optimizer_like_update(self, x):
    y = x + 1
    self.total.copy_(y.detach().sum(0))
    return self.total + 1


# What each must keep besides the output: the number of nodes that dead-code removal may not touch.
KEPT = [
    method_in_place, method_in_place_on_view, function_in_place, functional_in_place, module_in_place, out_argument,
    set_item, set_item_method, in_place_operator_on_alias, in_place_operator_function, write_to_buffer,
    write_to_parameter, write_in_wrapped_function, random_draw, random_method, functional_dropout, module_dropout,
    batch_norm_in_training, embedding_with_maximum, assertion, no_gradient_region, optimizer_like_update,
]  # fmt: skip


def program_of(function) -> nn.Module:
    torch.manual_seed(0)
    cls = type(function.__name__, (Program,), {"forward": function})
    module = cls().train()
    module.eval_norm.eval()
    return module


def observed(module: nn.Module, x: torch.Tensor) -> tuple:
    """Everything a run leaves behind: the result, the input, the state, the generator."""
    torch.manual_seed(1)
    x = x.clone()
    result = module(x)
    return result.detach(), x, {k: v.clone() for k, v in module.state_dict().items()}, torch.get_rng_state()


def assert_same(actual: tuple, expected: tuple) -> None:
    result, x, state, generator = expected
    # A traced program holds only the state that it uses.
    expected = result, x, {name: value for name, value in state.items() if name in actual[2]}, generator
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("function", KEPT, ids=lambda function: function.__name__)
def test_effects_survive(function):
    x = torch.randn(4, 4)
    expected = observed(program_of(function), x)
    traced = torchgraft.symbolic_trace(program_of(function))
    before = [node.name for node in traced.graph.nodes]
    assert_same(observed(copy.deepcopy(traced), x), expected)
    changed = traced.graph.eliminate_dead_code()
    assert [node.name for node in traced.graph.nodes] == before
    assert not changed
    assert_same(observed(traced, x), expected)


def unused_arithmetic(self, x):
    (x + 1) * 2
    x.relu().sum()
    x.view(-1)
    x.shape
    x[0]
    return x * 3


def unused_functions(self, x):
    F.relu(x)
    F.dropout(x, training=False)
    F.layer_norm(x, (4,))
    F.embedding(x.long().clamp(0, 3), self.embedding.weight)
    F.max_pool1d(x, 1)
    torch.softmax(x, dim=1)
    return x * 3


def unused_modules_in_training_mode(self, x):
    self.linear(x)
    self.relu(self.linear(x))
    self.layer_norm(x)
    self.pool(self.conv(x))
    self.attention(x, x, x)
    self.embedding(x.long().clamp(0, 3))
    self.eval_norm(x)
    return x * 3


def unused_attributes(self, x):
    self.total + 1
    self.linear.weight.t()
    return x * 3


def unused_wrapped_function(self, x):
    only_compute(x, x)
    len([x, x])
    return x * 3


def unused_chain(self, x):
    y = x
    for _ in range(10):
        y = F.relu(y) + 1
    return x * 3


REMOVED = [
    unused_arithmetic, unused_functions, unused_modules_in_training_mode, unused_attributes, unused_wrapped_function,
    unused_chain,
]  # fmt: skip


@pytest.mark.parametrize("function", REMOVED, ids=lambda function: function.__name__)
def test_what_is_provably_pure_is_removed(function):
    x = torch.randn(4, 4)
    expected = observed(program_of(function), x)
    traced = torchgraft.symbolic_trace(program_of(function))
    assert traced.graph.eliminate_dead_code()
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_function", "output"]
    assert not traced.graph.eliminate_dead_code()
    traced.graph.lint()
    assert_same(observed(traced, x), expected)


@pytest.mark.parametrize("function", [module_dropout, batch_norm_in_training], ids=lambda function: function.__name__)
def test_the_mode_decides(function):
    traced = torchgraft.symbolic_trace(program_of(function)).eval()
    before = len(traced.graph.nodes)
    assert traced.graph.eliminate_dead_code()
    assert len(traced.graph.nodes) == before - 1


def test_the_question_can_be_answered_by_the_caller():
    graph = Graph()
    x = graph.placeholder("x")
    kept = graph.call_function(torch.relu, (x,), name="kept")
    graph.call_method("mul_", (x, 2))
    graph.output(x)
    assert graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or node is kept)
    assert [node.name for node in graph.nodes] == ["x", "kept", "output"]
    assert graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    assert [node.name for node in graph.nodes] == ["x", "output"]


def test_unused_inputs_stay_and_a_graph_without_dead_code_is_unchanged():
    graph = Graph()
    x, _ = graph.placeholder("x"), graph.placeholder("unused")
    graph.output(x)
    assert not eliminate_dead_code(graph)
    assert len(graph.nodes) == 3


def test_a_broken_graph_is_refused():
    graph = Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.relu, (x,))
    second = graph.call_function(torch.relu, (first,))
    graph.output(second)
    first.prepend(second)
    with pytest.raises(GraphError):
        graph.eliminate_dead_code()


def test_programs_given_to_operators_are_cleaned_too():
    class Branch(nn.Module):
        def forward(self, x):
            x.relu()
            return x + 1

    root = nn.Module()
    root.branch = torchgraft.symbolic_trace(Branch())
    root.called = torchgraft.symbolic_trace(Branch())
    graph = Graph(root)
    x = graph.placeholder("x")
    branch = graph.get_attr("branch")
    result = graph.call_function(torch.ops.higher_order.cond, (x, branch, branch, [x]))
    graph.output(graph.call_module("called", (result,)))
    assert graph.eliminate_dead_code()
    assert len(root.branch.graph.nodes) == 3
    assert len(root.called.graph.nodes) == 4


def test_a_program_with_an_effect_called_as_a_module_stays():
    class Inner(nn.Module):
        def forward(self, x):
            x.add_(1)
            return x * 2

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torchgraft.symbolic_trace(Inner())

        def forward(self, x):
            y = x * 2
            self.inner(y)
            return y

    class KeepPrograms(torchgraft.Tracer):
        def is_leaf_module(self, module, path):
            return True

    outer = Outer()
    traced = torchgraft.GraphModule(outer, KeepPrograms().trace(outer))
    assert not traced.graph.eliminate_dead_code()
    x = torch.randn(3)
    torch.testing.assert_close(traced(x), outer(x))


# ---- random programs ----

STEPS = {
    "add": lambda graph, a, b: graph.call_function(torch.add, (a, b)),
    "neg": lambda graph, a, b: graph.call_method("neg", (a,)),
    "view": lambda graph, a, b: graph.call_method("view", (a, -1)),
    "transpose": lambda graph, a, b: graph.call_function(torch.flip, (a, (0,))),
    "functional": lambda graph, a, b: graph.call_function(F.leaky_relu, (a,)),
    "mul_": lambda graph, a, b: graph.call_method("mul_", (a, 0.5)),
    "add_": lambda graph, a, b: graph.call_method("add_", (a, b)),
    "iadd": lambda graph, a, b: graph.call_function(operator.iadd, (a, 1)),
    "functional_": lambda graph, a, b: graph.call_function(F.leaky_relu, (a, 0.1, True)),
    "out": lambda graph, a, b: graph.call_function(torch.sub, (a, 1), {"out": b}),
    "setitem": lambda graph, a, b: graph.call_function(operator.setitem, (a, 0, 0.25)),
    "dropout": lambda graph, a, b: graph.call_function(F.dropout, (a,)),
    "dropout off": lambda graph, a, b: graph.call_function(F.dropout, (a, 0.5, False)),
    "module": lambda graph, a, b: graph.call_module("act", (a,)),
    "module_": lambda graph, a, b: graph.call_module("act_", (a,)),
}


def run(graph: Graph, root: nn.Module, x: torch.Tensor) -> tuple:
    torch.manual_seed(0)
    x = x.clone()
    result = torchgraft.GraphModule(root, copy.deepcopy(graph))(x)
    return result, x, torch.get_rng_state()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_programs_mean_the_same_without_their_dead_code(data):
    root = nn.Module()
    root.act, root.act_ = nn.ELU(), nn.ELU(inplace=True)
    graph = Graph(root)
    values = [graph.placeholder("x")]
    for _ in range(data.draw(st.integers(1, 12))):
        step = STEPS[data.draw(st.sampled_from(sorted(STEPS)))]
        first, second = (data.draw(st.sampled_from(values)) for _ in range(2))
        made = step(graph, first, second)
        if made.target is not operator.setitem:
            values.append(made)
    graph.output(data.draw(st.sampled_from(values)))
    x = torch.linspace(-1, 1, 5)
    expected = run(graph, root, x)
    graph.eliminate_dead_code()
    graph.lint()
    torch.testing.assert_close(run(graph, root, x), expected, rtol=0, atol=0)


# ---- what led to a result that an edit took away ----


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.last(self.act(self.norm(self.conv(x))))


def cut_at(program, name: str, how: str):
    inner = next(node for node in program.graph.nodes if node.name == name)
    output = next(iter(reversed(program.graph.nodes)))
    if how == "erase":
        program.graph.erase_node(output)
        program.graph.output(inner)
    else:
        output.args = (inner,)
    program.graph.eliminate_dead_code()
    return [node.name.replace("output_1", "output") for node in program.graph.nodes]


@pytest.mark.parametrize("how", ["erase", "assign"])
@pytest.mark.parametrize("mode", [True, False])
def test_an_inner_value_made_the_result_is_what_its_node_computed(how, mode):
    model = Features().train(mode)
    x = torch.randn(2, 3, 4, 4)
    program = torchgraft.symbolic_trace(model)
    assert cut_at(program, "norm", how) == ["x", "conv", "norm", "output"]
    torch.testing.assert_close(program(x), copy.deepcopy(model).norm(model.conv(x)))


def test_functions_of_somebody_else_that_led_to_the_old_result_go():
    graph = Graph()
    x = graph.placeholder("x")
    inner = graph.call_function(torch.relu, (x,))
    outer = graph.call_function(copy.copy, (inner,))  # may do anything, as far as is known
    output = graph.output(graph.call_method("add_", (outer, 1)))
    output.args = (inner,)
    graph.eliminate_dead_code()
    assert [node.name for node in graph.nodes] == ["x", "relu", "output"]


def test_what_never_led_to_the_result_stays_for_its_effect():
    def function(x, y):
        z = x + 1
        z.mul_(2)  # whose result nobody uses
        y.add_(1)
        return z.relu_().exp()

    program = torchgraft.symbolic_trace(function)
    names = cut_at(program, "add", "erase")
    assert names == ["x", "y", "add", "mul_", "add_", "output"]
    x, y = torch.zeros(2), torch.zeros(2)
    assert program(x, y).tolist() == [2, 2] and y.tolist() == [1, 1]


def test_what_writes_an_input_or_a_tensor_of_the_model_stays():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x, y):
            return x.exp(), y.add_(self.count.add_(1))

    model = Counting()
    program = torchgraft.symbolic_trace(model)
    assert cut_at(program, "exp", "erase") == ["x", "y", "exp", "count", "add_", "add__1", "output"]


@pytest.mark.parametrize("write", ["x.view(-1)[1:].mul_(2)", "self.act(x.t())", "x[0].add_(self.act(x[1]))"])
def test_what_writes_a_view_of_an_input_stays(write):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU(inplace=True)

    exec(f"def forward(self, x):\n    y = x.exp()\n    return y.sum() + {write}", globals_ := {})
    Model.forward = globals_["forward"]
    model, program = Model(), torchgraft.symbolic_trace(Model())
    cut_at(program, "exp", "erase")
    x, expected = (torch.tensor([[-1.0, 2.0], [-3.0, 4.0]]) for _ in range(2))
    model(expected)
    program(x)
    assert torch.equal(x, expected)


def test_guards_of_what_is_cut_off_go_with_it():
    def function(x):
        y = torch.relu(x)
        z = y.unbind()[0]
        return z + 1 if isinstance(z, torch.Tensor) and hasattr(z, "whatever") is False else z

    program = torchgraft.symbolic_trace(function)
    assert any("check" in getattr(node.target, "__name__", "") for node in program.graph.nodes)
    assert cut_at(program, "relu", "erase") == ["x", "relu", "output"]


def test_a_value_that_only_lost_another_user_is_not_cut_off():
    def function(x):
        y = x * 2
        z = y.add_(1)
        torch.relu(z)
        return y

    program = torchgraft.symbolic_trace(function)
    program.graph.eliminate_dead_code()
    program.graph.eliminate_dead_code()
    assert program(torch.ones(1)).tolist() == [3]
