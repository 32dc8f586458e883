"""What torch.fx gets wrong after tracing, asked of torchgraft alone: stale code, lost effects, bad edits, lost state.

Traps while tracing are in test_traps.
"""

import copy
import operator
import pickle
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional


def relu_module(graft: ModuleType):
    return graft.symbolic_trace(lambda x: torch.relu(x))


def only(graph, target):
    (node,) = graph.find_nodes(op="call_function", target=target)
    return node


def change_target(graph) -> None:
    only(graph, torch.relu).target = torch.neg


def change_arguments(graph) -> None:
    relu = only(graph, torch.relu)
    with graph.inserting_before(relu):
        negated = graph.call_function(torch.neg, relu.args)
    relu.args = (negated,)
    graph.output_node().args = (negated,)


def insert_and_erase(graph) -> None:
    relu = only(graph, torch.relu)
    with graph.inserting_after(relu):
        new = graph.call_function(torch.neg, relu.args)
    relu.replace_all_uses_with(new)
    graph.erase_node(relu)


@pytest.mark.parametrize("edit", [change_target, change_arguments, insert_and_erase])
@pytest.mark.parametrize("call", [lambda m, x: m(x), lambda m, x: m.forward(x)], ids=["call", "forward"])
def test_edited_graph_runs_without_recompile(graft: ModuleType, edit: Callable, call: Callable) -> None:
    module = relu_module(graft)
    assert call(module, torch.tensor(2.0)).item() == 2.0
    edit(module.graph)
    assert call(module, torch.tensor(2.0)).item() == -2.0
    assert "torch.neg" in module.code, "what is printed is what runs"


def test_edited_inner_graph_runs_without_recompile(graft: ModuleType) -> None:
    inner = relu_module(graft)
    outer = nn.Sequential(inner, nn.Identity())
    outer(torch.tensor(2.0))
    change_target(inner.graph)
    assert outer(torch.tensor(2.0)).item() == -2.0


def test_dead_code_elimination_runs_without_recompile(graft: ModuleType) -> None:
    ran = []

    def noisy(x):
        ran.append(1)
        return x

    graph = graft.Graph()
    x = graph.placeholder("x")
    graph.call_function(noisy, (x,))
    graph.output(x)
    module = graft.GraphModule({}, graph)
    module(1)
    before = len(ran)
    if graph.eliminate_dead_code():
        module(1)
        assert len(ran) == before


def effect_method(x):
    y = x.clone()
    y.mul_(3)
    return y


def effect_function(x):
    y = x.clone()
    functional.relu(y, inplace=True)
    return y


def effect_torch_function(x):
    y = x.clone()
    torch.neg_(y)
    return y


def effect_out(x):
    y = torch.zeros_like(x)
    torch.add(x, 1, out=y)
    return y


def effect_store(x):
    y = x.clone()
    y[0] = 5
    return y


def effect_alias_method(x):
    y = x.clone()
    y.view(-1).add_(1)
    return y


def effect_slice_copy(x):
    y = x.clone()
    y[0].copy_(torch.tensor(9.0))
    return y


def effect_random_in_place(x):
    y = x.clone()
    y.uniform_()
    return y


@pytest.mark.parametrize(
    "function",
    [
        effect_method,
        effect_function,
        effect_torch_function,
        effect_out,
        effect_store,
        effect_alias_method,
        effect_slice_copy,
        effect_random_in_place,
    ],
    ids=lambda function: function.__name__,
)
def test_dead_code_elimination_keeps_effects(graft: ModuleType, function: Callable) -> None:
    traced = graft.symbolic_trace(function)
    traced.graph.eliminate_dead_code()
    x = torch.tensor([-1.0, 2.0])
    torch.manual_seed(3)
    expected = function(x)
    torch.manual_seed(3)
    assert torch.equal(traced(x), expected)


def test_dead_code_elimination_keeps_in_place_modules(graft: ModuleType) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            y = x.clone()
            self.relu(y)
            return y

    traced = graft.symbolic_trace(InPlace())
    traced.graph.eliminate_dead_code()
    assert traced(torch.tensor([-1.0])).item() == 0.0


def test_dead_code_elimination_keeps_in_place_operators_on_aliases(graft: ModuleType) -> None:
    graph = graft.Graph()
    x = graph.placeholder("x")
    y = graph.call_method("clone", (x,))
    alias = graph.call_method("view", (y, -1))
    graph.call_function(operator.iadd, (alias, 1))
    graph.output(y)
    graph.eliminate_dead_code()
    assert graft.GraphModule({}, graph)(torch.zeros(1)).item() == 1.0


def test_dead_code_elimination_keeps_writes_to_buffers(graft: ModuleType) -> None:
    root = nn.Module()
    root.register_buffer("count", torch.zeros(1))
    graph = graft.Graph()
    x = graph.placeholder("x")
    graph.call_method("add_", (graph.get_attr("count"), 1))
    graph.output(x)
    module = graft.GraphModule(root, graph)
    module.graph.eliminate_dead_code()
    module(1)
    assert module.count.item() == 1.0


def test_dead_code_elimination_keeps_random_draws(graft: ModuleType) -> None:
    def forward(x):
        torch.rand(3)
        torch.rand_like(x)
        return x + torch.rand(1)

    traced = graft.symbolic_trace(forward)
    traced.graph.eliminate_dead_code()
    torch.manual_seed(1)
    expected = forward(torch.zeros(1))
    torch.manual_seed(1)
    assert torch.equal(traced(torch.zeros(1)), expected)


@pytest.mark.parametrize("layer", [lambda: nn.BatchNorm1d(2), lambda: nn.Dropout(0.5)], ids=["batchnorm", "dropout"])
def test_dead_code_elimination_keeps_leaf_modules_in_training(graft: ModuleType, layer: Callable) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer()

        def forward(self, x):
            self.layer(x)
            return x

    traced = graft.symbolic_trace(Unused().train())
    traced.graph.eliminate_dead_code()
    assert traced.graph.find_nodes(op="call_module")


def test_dead_code_elimination_still_removes_what_has_no_effect(graft: ModuleType) -> None:
    def forward(x):
        x.mul(2)
        torch.relu(x)
        functional.relu(x, inplace=False)
        x.clone().view(-1)
        return x

    traced = graft.symbolic_trace(forward)
    assert traced.graph.eliminate_dead_code() is True
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "output"]


def test_in_place_operator_does_not_change_immutable_values(graft: ModuleType) -> None:
    graph = graft.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(operator.iadd, (x, 1)), x))
    module = graft.GraphModule({}, graph)
    assert module(3) == (4, 3)
    assert [value.item() for value in module(torch.tensor(3))] == [4, 4]


def pair_of_graphs(graft: ModuleType):
    graph = graft.Graph()
    x = graph.placeholder("x")
    relu = graph.call_function(torch.relu, (x,))
    output = graph.output(relu)
    other = graft.Graph()
    stranger = other.placeholder("stranger")
    return graph, x, relu, output, stranger


@pytest.mark.parametrize("kind", ["cycle", "own cycle", "foreign", "dead", "duplicate name"])
def test_bad_edit_raises_at_once_or_in_lint(graft: ModuleType, kind: str) -> None:
    graph, x, relu, output, stranger = pair_of_graphs(graft)
    with pytest.raises(Exception):  # noqa: B017
        if kind == "cycle":
            with graph.inserting_before(relu):
                early = graph.call_function(torch.neg, (x,))
            early.args = (relu,)
            relu.args = (early,)
        elif kind == "own cycle":
            relu.args = (relu,)
        elif kind == "foreign":
            relu.args = (stranger,)
        elif kind == "dead":
            output.args = (x,)
            graph.erase_node(relu)
            output.args = (relu,)
        elif kind == "duplicate name":
            relu.name = "x"
        graph.lint()


def test_lint_lists_every_problem(graft: ModuleType) -> None:
    module = graft.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    delattr(module, "0")
    delattr(module, "1")
    with pytest.raises(RuntimeError) as caught:
        module.graph.lint()
    assert "'0'" in str(caught.value) or "_0" in str(caught.value)
    assert "'1'" in str(caught.value) or "_1" in str(caught.value)


def metadata_module(graft: ModuleType):
    module = graft.symbolic_trace(Scaled())
    node = next(node for node in module.graph.nodes if node.op == "call_function")
    node.meta["note"] = {"shape": (1, 2)}
    module.meta["whole"] = "kept"
    module.author = "somebody"
    return module


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("transient", torch.full((2,), 2.0), persistent=False)

    def forward(self, x):
        return x * self.kept + self.transient


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_keep_metadata_and_attributes(graft: ModuleType, duplicate: Callable) -> None:
    other = duplicate(metadata_module(graft))
    node = next(node for node in other.graph.nodes if node.op == "call_function")
    assert node.meta["note"] == {"shape": (1, 2)}
    assert other.meta["whole"] == "kept"
    assert other.author == "somebody"


@pytest.mark.parametrize(
    "duplicate",
    [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["traced", "deepcopy", "pickle"],
)
def test_non_persistent_buffers_stay_so(graft: ModuleType, duplicate: Callable) -> None:
    module = duplicate(graft.symbolic_trace(Scaled()))
    assert list(module.state_dict()) == ["kept"]
    assert sorted(name for name, _ in module.named_buffers()) == ["kept", "transient"]
    assert module(torch.ones(2)).tolist() == [3.0, 3.0]


def branchy(x):
    return x if x > 0 else -x


def test_pickling_does_not_trace_again(graft: ModuleType) -> None:
    graph = graft.Graph()
    graph.output(graph.call_function(branchy, (graph.placeholder("x"),)))
    loaded = pickle.loads(pickle.dumps(graft.GraphModule({}, graph)))
    assert loaded(-3) == 3
    assert loaded.graph.find_nodes(op="call_function", target=branchy)


def test_pickling_keeps_node_names(graft: ModuleType) -> None:
    module = relu_module(graft)
    only(module.graph, torch.relu).name = "chosen"
    module.recompile()
    loaded = pickle.loads(pickle.dumps(module))
    assert [node.name for node in loaded.graph.nodes] == ["x", "chosen", "output"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_pickling_keeps_structured_inputs(graft: ModuleType) -> None:
    traced = graft.symbolic_trace(lambda pair: [pair[0] + pair[1]], concrete_args={"pair": (graft.PH, graft.PH)})
    assert pickle.loads(pickle.dumps(traced))((1, 2)) == [3]


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = x * 2
        return y + self.weight


def test_error_in_generated_code_shows_both_lines(graft: ModuleType, capfd) -> None:
    traced = graft.symbolic_trace(Adding())
    with pytest.raises(RuntimeError) as caught:
        traced(torch.ones(2))
    told = capfd.readouterr().err + str(caught.value) + "\n".join(getattr(caught.value, "__notes__", []))
    assert "return y + self.weight" in told
    assert "add = mul + weight" in told


def test_print_readable_shows_shapes_and_source(graft: ModuleType) -> None:
    traced = graft.symbolic_trace(Adding())
    for node in traced.graph.nodes:
        if node.op != "output":
            node.meta["val"] = torch.empty(3, 5, device="meta")
    text = traced.print_readable(print_output=False)
    assert "[3, 5]" in text
    assert "return y + self.weight" in text


def test_print_tabular_needs_no_other_package(graft: ModuleType, capsys) -> None:
    relu_module(graft).graph.print_tabular()
    printed = capsys.readouterr().out
    assert printed.split()[:5] == ["opcode", "name", "target", "args", "kwargs"]
    assert "call_function" in printed and "relu" in printed


def test_transformer_keeps_types_of_placeholders(graft: ModuleType) -> None:
    def forward(x: torch.Tensor, n: int = 3) -> torch.Tensor:
        return x * n

    transformed = graft.Transformer(graft.symbolic_trace(forward)).transform()
    assert [node.type for node in transformed.graph.find_nodes(op="placeholder")] == [torch.Tensor, int]
    assert transformed.graph.output_node().type is torch.Tensor


def test_erased_node_cannot_be_used_again(graft: ModuleType) -> None:
    graph, x, relu, output, _ = pair_of_graphs(graft)
    output.args = (x,)
    graph.erase_node(relu)
    with pytest.raises(Exception):  # noqa: B017
        graph.call_function(torch.neg, (relu,))
    with pytest.raises(Exception):  # noqa: B017
        x.append(relu)
