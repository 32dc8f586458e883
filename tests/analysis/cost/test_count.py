"""`cost` on whole programs, side by side with torch's FlopCounterMode, and the shape of its answer."""

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import torchgraft
from torchgraft import zoo
from torchgraft.analysis.cost import Work, cost, flop_formula
from torchgraft.analysis.cost.formulas import FORMULAS

SMALL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mlp": ({}, {}),
    "resnet18": ({}, {"size": 64}),
    "resnet50": ({}, {"size": 64}),
    "transformer": ({"layers": 2, "width": 64}, {"length": 16}),
    "deep_recommender": ({}, {}),
    "learning_to_paint": ({}, {}),
}


def torch_counts(model: Any, *args: Any) -> tuple[dict[str, int], dict[str, int]]:
    """What FlopCounterMode counts forward and backward, by operator."""
    with FlopCounterMode(display=False) as counter:
        result = model(*args)
        forward = dict(counter.get_flop_counts().get("Global", {}))
        result.sum().backward()
    both = dict(counter.get_flop_counts()["Global"])
    names = {operator: str(operator) for operator in both}
    return (
        {names[operator]: forward.get(operator, 0) for operator in both},
        {names[operator]: count - forward.get(operator, 0) for operator, count in both.items()},
    )


@pytest.mark.parametrize(
    "name, training", [*[(name, True) for name in SMALL], ("resnet18", False), ("transformer", False)]
)
def test_equal_to_flop_counter_mode_on_what_it_knows(name: str, training: bool) -> None:
    options, sizes = SMALL[name]
    model = zoo.create(name, **options).train(training)
    args = zoo.example_inputs(name, batch=2, **sizes)
    result = cost(model, args)
    forward, backward = torch_counts(model, *args)
    assert forward
    operators = result.operators
    assert {operator: operators[operator][0].flops for operator in forward} == forward
    assert {operator: operators[operator][1].flops for operator in backward} == backward
    assert result.unknown == {}
    # Every multiply-add of these models is in an operator that FlopCounterMode knows.
    assert 2 * result.forward.macs == sum(forward.values())
    assert 2 * result.backward.macs == sum(backward.values())


@pytest.mark.parametrize("convolution", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_are_counted_as_by_torch_except_the_gradient_of_groups(convolution: Any, groups: int) -> None:
    model = convolution(4, 6, 3, stride=2, padding=1, groups=groups)
    spatial = int(convolution.__name__[-2])
    x = torch.ones(2, 4, *[9] * spatial, requires_grad=True)
    result = cost(model, x)
    forward, backward = torch_counts(model, x)
    work = forward["aten.convolution"]
    assert result.forward.macs * 2 == work
    assert result.backward.macs * 2 == 2 * work  # once for the input, once for the weight
    # torch counts the gradient of the weight as if there were one group.
    assert backward["aten.convolution_backward"] == work + groups * work


def test_products_that_flop_counter_mode_leaves_out() -> None:
    def function(matrix: torch.Tensor, vector: torch.Tensor) -> Any:
        return matrix @ vector, vector @ vector, torch.einsum("ij,kj->ik", matrix, matrix)

    result = cost(function, (torch.ones(3, 4), torch.ones(4)))
    assert result.forward.flops == 2 * 12 + 2 * 4 + 2 * 3 * 3 * 4
    assert result.forward.macs * 2 == result.forward.flops


@pytest.mark.parametrize("queries, keys", [(5, 5), (3, 7), (7, 3)])
def test_attention_is_causal_aware(queries: int, keys: int) -> None:
    batch, heads, width = 2, 3, 8
    query = torch.ones(batch, heads, queries, width, requires_grad=True)
    other = torch.ones(batch, heads, keys, width)

    def attend(causal: bool) -> Any:
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    mask = torch.ones(queries, keys, dtype=torch.bool).tril()
    full = cost(attend(False), (query, other, other))
    causal = cost(attend(True), (query, other, other))
    assert full.forward.macs == 2 * batch * heads * queries * keys * width
    assert causal.forward.macs == 2 * batch * heads * int(mask.sum()) * width
    assert cost(attend(True), (query, other, other), causal_aware=False).forward.macs == full.forward.macs
    # Scores anew, then four products with them.
    assert causal.backward.macs * 2 == causal.forward.macs * 5


def test_attention_formulas_equal_those_of_torch() -> None:
    from torch.utils.flop_counter import flop_registry

    query, key, value = torch.ones(2, 4, 5, 8), torch.ones(2, 4, 7, 8), torch.ones(2, 4, 7, 6)
    gradient = torch.ones(2, 4, 5, 6)
    forward = torch.ops.aten._scaled_dot_product_flash_attention
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    assert FORMULAS[forward].function(query, key, value, result=None) == flop_registry[forward](query, key, value)
    ours = FORMULAS[backward].function(gradient, query, key, value, result=None)
    assert ours == flop_registry[backward](gradient, query, key, value)


def test_an_unknown_operator_is_named_and_a_formula_makes_it_known() -> None:
    with torch.library._scoped_library("torchgraft_test", "DEF") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", lambda x: x.clone(), "CompositeExplicitAutograd")
        operator = torch.ops.torchgraft_test.mystery

        def function(x: torch.Tensor) -> torch.Tensor:
            return operator(operator(x)) + 1

        result = cost(function, torch.ones(3))
        assert list(result.unknown) == ["torchgraft_test.mystery"]
        assert len(result.unknown["torchgraft_test.mystery"]) == 2
        assert result.forward.flops == 3
        assert "not counted" in str(result) and "torchgraft_test.mystery" in str(result)
        assert "torchgraft_test.mystery" in result._repr_html_()
        assert "torchgraft_test.mystery" in json.loads(result.to_json())["unknown"]

        @flop_formula(operator, multiply_adds=True)
        def mystery(x: torch.Tensor, *, result: torch.Tensor) -> int:
            return 10 * result.numel()

        try:
            known = cost(function, torch.ones(3))
            assert known.unknown == {} and known.forward == result.forward + Work(60, 30)
        finally:
            del FORMULAS[operator]


def test_a_formula_may_be_for_a_function_or_a_module_class() -> None:
    class Kernel(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp().exp().exp()

    def outside(x: torch.Tensor, scale: int = 1) -> torch.Tensor:
        return x * scale * 2

    flop_formula(Kernel)(lambda x, *, result: 7)
    flop_formula(outside)(lambda x, scale=1, *, result: 11 * scale)
    try:
        graph = torchgraft.Graph()
        x = graph.placeholder("x")
        graph.output(graph.call_function(outside, (graph.call_module("kernel", (x,)),), {"scale": 3}))
        program = torchgraft.GraphModule({"kernel": Kernel()}, graph)
        result = cost(program, torch.ones(5))
        assert result["kernel"].forward.flops == 7 and result["outside"].forward.flops == 33
    finally:
        del FORMULAS[Kernel], FORMULAS[outside]


def test_a_formula_needs_a_target() -> None:
    with pytest.raises(torchgraft.GraftError, match=r"@flop_formula\(torch.ops.mylib.foo\)"):
        flop_formula()
    with pytest.raises(torchgraft.GraftError, match="not \\('aten.mm',\\)"):
        flop_formula("aten.mm")


def test_nodes_modules_and_totals_add_up() -> None:
    model = zoo.create("transformer", layers=2, width=64, attention="fused")
    result = cost(model, zoo.example_inputs("transformer", batch=2, length=16))
    nodes = sum((node.forward for node in result.nodes), Work()), sum((node.backward for node in result.nodes), Work())
    assert nodes == (result.forward, result.backward)
    assert result.total == result.forward + result.backward
    whole = result.modules[""]
    assert (whole.forward, whole.backward, whole.parameters) == (result.forward, result.backward, result.parameters)
    assert result.parameters == sum(parameter.numel() for parameter in model.parameters())
    layers = [result.modules[f"layers.{number}"] for number in range(2)]
    assert layers[0].forward == layers[1].forward
    assert layers[0].parameters == sum(parameter.numel() for parameter in model.layers[0].parameters())
    assert layers[0].type == "Layer"
    projection = result.modules["layers.0.attention.query"]
    assert projection.forward.flops == 2 * 2 * 16 * 64 * 64


def test_shared_modules_count_their_work_twice_and_their_parameters_once() -> None:
    shared = nn.Linear(4, 4, bias=False)
    result = cost(nn.Sequential(shared, nn.Tanh(), shared), torch.ones(2, 4))
    assert result.parameters == 16
    assert result.forward.macs == 2 * 2 * 16


def test_bytes_of_an_operator_by_itself() -> None:
    result = cost(torchgraft.symbolic_trace(lambda x, y: (x.t() + y).relu_()), (torch.ones(3, 2), torch.ones(3)))
    assert result["t"].forward == Work()
    assert result["add"].forward == Work(6, 0, 4 * 6 + 4 * 3, 4 * 6)
    assert result["relu_"].forward == Work(6, 0, 4 * 6, 4 * 6)
    looked_up = cost(nn.Embedding(1000, 8), torch.zeros(5, dtype=torch.int64))
    assert looked_up.forward == Work(0, 0, 5 * 8 * 4 + 5 * 8, 5 * 8 * 4)


def test_without_gradients_there_is_no_backward() -> None:
    model = nn.Linear(3, 3)
    assert cost(model, torch.ones(2, 3), backward=False).backward == Work()
    frozen = cost(model.requires_grad_(False), torch.ones(2, 3))
    assert frozen.backward == Work() and frozen.forward.macs == 18
    only_input = cost(model, torch.ones(2, 3, requires_grad=True))
    assert only_input.backward.macs == 18


def test_hostile_programs() -> None:
    assert cost(lambda x: x, torch.ones(3)).total == Work()
    assert cost(lambda x: x + 1, torch.ones(0, 3)).total == Work()
    scalar = cost(lambda x: (x + float("nan"), [x.sum()]), torch.tensor(2.0))
    assert scalar.forward.flops == 2
    huge = torch.empty(1 << 20, 1 << 20, device="meta")
    assert cost(lambda x: x @ x, huge).forward.flops == 2 << 60
    with pytest.raises(KeyError, match="no node named 'nothing'"):
        scalar["nothing"]


def test_a_program_of_operators_and_a_joint_program_are_counted_too() -> None:
    model = zoo.create("mlp")
    args = zoo.example_inputs("mlp", batch=2)
    whole = cost(model, args)
    assert cost(torchgraft.capture(model, args, level="aten"), args).forward.macs == whole.forward.macs
    joint = torchgraft.capture(model, args, level="joint")
    inputs = (*model.parameters(), *args, model(*args))
    assert cost(joint, inputs, backward=False).forward.macs == whole.total.macs


def test_rows_json_and_text() -> None:
    result = cost(zoo.create("mlp"), zoo.example_inputs("mlp"))
    rows = result.rows()
    assert [row["name"] for row in rows] == [node.name for node in result.nodes]
    assert sum(row["forward_flops"] for row in rows) == result.forward.flops
    assert json.loads(result.to_json())["nodes"] == json.loads(json.dumps(rows))
    assert "FLOPs" in str(result) and "MACs" in str(result)
    assert "<table>" in result._repr_html_()
    assert "fc1" in result.text(by="node")
    with pytest.raises(ValueError, match='by "node" or by "module"'):
        result.rows("layer")


def test_an_operator_on_programs_is_named_and_the_rest_counted() -> None:
    class Chooses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x + 1, (x,)) * 2

    x = torch.ones(3, 3)
    program = torchgraft.capture(Chooses(), (x,), level="aten")
    result = cost(program, x, backward=False)
    assert list(result.unknown) == ["cond"]
    assert result.forward.flops == 9 + 1 + 9


def test_flexible_attention_is_counted_in_full() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    class Flexible(nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return flex_attention(query, key, key)

    query, key = torch.ones(1, 2, 16, 8), torch.ones(1, 2, 32, 8)
    # Captured by us it is one call, because it compiles itself.
    program = torchgraft.from_export(torch.export.export(Flexible(), (query, key)))
    result = cost(program, (query, key), backward=False)
    assert result.unknown == {} and result.forward.macs == 2 * 2 * 16 * 32 * 8


@pytest.mark.gpu
def test_fused_attention_on_a_gpu_is_counted_as_by_torch_when_asked_to() -> None:
    model = zoo.create("transformer", layers=2, attention="fused", dropout=0.0).cuda().half()
    args = tuple(tensor.cuda() for tensor in zoo.example_inputs("transformer", batch=2, length=64))
    forward, backward = torch_counts(model, *args)
    full = cost(model, args, causal_aware=False)
    assert any("attention" in operator for operator in forward)
    assert {name: full.operators[name][0].flops for name in forward} == forward
    assert {name: full.operators[name][1].flops for name in backward} == backward
    assert cost(model, args).forward.flops < full.forward.flops
