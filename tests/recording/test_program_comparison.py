"""compare: the first node that differs, programs that were changed, moved or captured at other levels, and what goes wrong."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch

import torchgraft
from torchgraft import capture, compare, symbolic_trace
from torchgraft.errors import RunError
from torchgraft.zoo.mlp import MLP


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return MLP()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 16, generator=torch.Generator().manual_seed(1))


def pairs(comparison) -> list[tuple[str, str, str]]:
    return [(pair.first, pair.second, pair.verdict) for pair in comparison.pairs]


# ---- the first difference ----


def test_the_same_program_twice(model, x) -> None:
    comparison = compare(symbolic_trace(model), symbolic_trace(model), (x,))
    assert comparison.ok and comparison.first_difference is None
    assert {pair.verdict for pair in comparison.pairs} == {"equal"} and len(comparison.pairs) == 5
    assert comparison.pairs[1].measures == (0.0, 0.0, math.inf, 1.0, 0)
    assert str(comparison).startswith("no difference in 5 pairs of nodes\n")


def test_a_changed_weight(model, x) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.fc2.weight[0, 0] += 1
    comparison = compare(symbolic_trace(model), symbolic_trace(other), (x,))
    first = comparison.first_difference
    assert (first.first, first.second) == ("fc2", "fc2") and "self.fc2(x)" in first.line
    a, b = model(x).detach().double(), other(x).detach().double()
    error = (a - b).abs()
    assert first.measures.max_abs == pytest.approx(float(error.max()))
    assert first.measures.max_rel == pytest.approx(float((error / a.abs()).max()))
    assert first.measures.sqnr == pytest.approx(20 * math.log10(float(a.norm() / (a - b).norm())))
    assert first.measures.cosine == pytest.approx(float(torch.cosine_similarity(a.flatten(), b.flatten(), 0)))
    assert [verdict for _, _, verdict in pairs(comparison)] == ["equal"] * 3 + ["DIFFERENT"] * 2
    assert str(comparison).startswith("first difference: node 'fc2' at ")


def test_models_are_captured_first(model, x) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.fc1.bias += 1
    assert compare(model, other, (x,)).first_difference.second == "fc1"
    assert compare(model, other, (x,), level="function").first_difference.second == "fc1_bias"


def test_the_tolerance(model, x) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.fc1.weight *= 1 + 1e-3
    programs = symbolic_trace(model), symbolic_trace(other)
    assert compare(*programs, (x,)).first_difference.second == "fc1"
    relaxed = compare(*programs, (x,), rtol=0.1, atol=0.1)
    assert relaxed.ok and relaxed.pairs[1].verdict == "close" and relaxed.pairs[1].measures.max_abs > 0


def test_an_edited_node_under_its_old_name(x) -> None:
    one = symbolic_trace(lambda x: torch.relu(x * 2) + 1)
    two = copy.deepcopy(one)
    two.graph.find_nodes(op="call_function", target=torch.relu)[0].target = torch.tanh
    first = compare(one, two, (x,)).first_difference
    assert (first.first, first.second, first.matched_by) == ("relu", "relu", "name")


def test_a_swapped_activation(model, x) -> None:
    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = model.fc1, model.fc2

        def forward(self, x):
            return self.fc2(torch.nn.functional.gelu(self.fc1(x)))

    first = compare(symbolic_trace(model), symbolic_trace(Other()), (x,)).first_difference
    assert (first.first, first.second, first.matched_by) == ("relu", "gelu", "position")


def test_an_inserted_node(model, x) -> None:
    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.relu = model.fc1, model.fc2, model.relu

        def forward(self, x):
            return self.fc2(self.relu(self.fc1(torch.relu(x))))

    comparison = compare(symbolic_trace(model), symbolic_trace(Other()), (x,))
    assert comparison.first_difference.second == "fc1"
    assert comparison.first_difference.note == "its input 'relu' is only in the second"
    assert ("relu", "relu_1", "DIFFERENT") in pairs(comparison)
    assert comparison.only_second == ["relu"] and comparison.only_first == []
    assert str(comparison).endswith("only in the second: relu")


def test_an_inserted_node_that_changes_nothing(x) -> None:
    one = symbolic_trace(lambda x: torch.tanh(torch.relu(torch.exp(x))))
    two = symbolic_trace(lambda x: torch.tanh(torch.relu(torch.relu(torch.exp(x)))))
    comparison = compare(one, two, (x,))
    assert comparison.ok and len(comparison.only_second) == 1


@pytest.mark.parametrize("level", ["function", "aten", "core_aten"])
def test_other_levels(model, x, level) -> None:
    program = capture(model, (x,), level=level)
    comparison = compare(symbolic_trace(model), program, (x,))
    matched = {pair.first: pair for pair in comparison.pairs}
    assert comparison.ok and {"fc1", "relu", "fc2"} <= set(matched)
    assert matched["fc1"].measures.max_abs < 1e-6
    with torch.no_grad():
        other = copy.deepcopy(model)
        other.fc2.bias += 1
    different = compare(symbolic_trace(other), program, (x,)).first_difference
    assert different.first == "fc2" and different.second in ("linear_1", "addmm_1")


class Attends(torch.nn.Module):
    """A norm, whose operator gives three tensors, and sizes that operator programs read at other places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.query, self.key = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        query, key = [
            layer(x).view(x.shape[0], x.shape[1], 2, x.shape[2] // 2).transpose(1, 2)
            for layer in (self.query, self.key)
        ]
        return query @ key.transpose(2, 3)


@pytest.mark.parametrize("level", ["module", "function"])
def test_norms_and_sizes_at_other_levels_are_no_difference(level) -> None:
    torch.manual_seed(0)
    model, x = Attends().eval(), torch.randn(2, 5, 8)
    first = torchgraft.capture(model, x, level=level)
    comparison = compare(first, torchgraft.capture(model, x, level="core_aten"), x)
    assert comparison.ok, comparison
    pairs = {pair.second: pair for pair in comparison.pairs}
    assert pairs["native_layer_norm"].note == "the first of 3 tensors"
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.norm.weight[0] += 1
    assert not compare(first, torchgraft.capture(other, x, level="core_aten"), x).ok


def test_nodes_that_changed_places(x) -> None:
    one = symbolic_trace(lambda x: torch.exp(x) + torch.tanh(x))

    def other(x):
        b = torch.tanh(x)
        return torch.exp(x) + b

    comparison = compare(one, symbolic_trace(other), (x,))
    assert comparison.ok and not comparison.only_first and not comparison.only_second
    assert ("tanh", "tanh", "equal") in pairs(comparison) and ("exp", "exp", "equal") in pairs(comparison)


def test_renamed_nodes_are_matched_by_value(x) -> None:
    one = symbolic_trace(lambda x: torch.tanh(torch.exp(x)) * 2)
    two = copy.deepcopy(one)
    for number, node in enumerate(list(two.graph.nodes)[1:-1]):
        node.name = f"step{number}"
    comparison = compare(one, two, (x,))
    assert comparison.ok and [pair.matched_by for pair in comparison.pairs] == [
        "name",
        "value",
        "value",
        "value",
        "name",
    ]


def test_a_layer_that_took_up_the_norm_after_it_is_what_the_norm_was() -> None:
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm2d(4)
    for tensor in (norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var):
        tensor.uniform_(0.5, 2)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), norm, torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 1)).eval()
    image = torch.randn(1, 3, 8, 8)
    program, fused = (symbolic_trace(model) for _ in range(2))
    torchgraft.passes.Pipeline("fuse-conv-norm")(fused)
    found = compare(program, fused, (image,))
    by_value = [(pair.first, pair.second, pair.verdict) for pair in found.pairs if pair.matched_by == "value"]
    assert found.ok and by_value == [("_1", "_0", "close")]


def test_a_layer_with_wrong_weights_is_compared_under_its_name(model, x) -> None:
    program = symbolic_trace(model)
    other = symbolic_trace(copy.deepcopy(model))
    for node in other.graph.find_nodes(op="call_module", target="relu"):
        with other.graph.inserting_after(node):
            node.replace_all_uses_with(other.graph.call_function(torch.abs, (node,)), lambda user: user.name != "abs_1")
    with torch.no_grad():
        other.fc1.weight.mul_(1.5)
    found = compare(program, other, (x,))
    assert (found.first_difference.first, found.first_difference.second) == ("fc1", "fc1")


def test_other_dtypes(model, x) -> None:
    class Short(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = copy.deepcopy(model).bfloat16()

        def forward(self, x):
            x = x.to(torch.bfloat16)
            x = self.inner.relu(self.inner.fc1(x))
            return self.inner.fc2(x)

    comparison = compare(symbolic_trace(model), symbolic_trace(Short()), (x,))
    assert comparison.ok, str(comparison)
    last = comparison.pairs[-1]
    assert last.verdict == "close" and last.note == "float32 and bfloat16" and 20 < last.measures.sqnr < 60


# ---- values of all kinds ----


def test_odd_values() -> None:
    def one(x):
        return x / 0, x[:0], x > 0, torch.eye(2).to_sparse(), torch.complex(x, x), x.shape[0], None

    def two(x):
        return x / 0, x[:0], x >= 0, torch.eye(2).to_sparse() * 2, torch.complex(x, -x), x.shape[0], None

    x = torch.tensor([0.0, 1.0, -1.0])
    assert compare(one, one, (x,)).ok
    comparison = compare(one, two, (x,))
    verdicts = {pair.second: pair.verdict for pair in comparison.pairs}
    assert verdicts["truediv"] == verdicts["getitem"] == "equal"
    assert verdicts["complex_1"] == "DIFFERENT" and verdicts["output"] == "DIFFERENT"


def test_nan_in_one_only() -> None:
    one = symbolic_trace(lambda x: torch.exp(x))
    two = symbolic_trace(lambda x: torch.log(x))
    comparison = compare(one, two, (torch.tensor([-1.0, 2.0]),))
    assert comparison.first_difference.measures.unlike == 1
    assert "1 NaN or infinite in one only" in comparison.first_difference.note


def test_other_shapes_and_other_numbers_of_tensors() -> None:
    one, two = symbolic_trace(lambda x: x.sum(0)), symbolic_trace(lambda x: x.sum(1))
    assert compare(one, two, (torch.ones(2, 3),)).first_difference.note == "shapes (3,) and (2,)"
    one, two = symbolic_trace(lambda x: x.split(1)), symbolic_trace(lambda x: x.split(2))
    assert compare(one, two, (torch.ones(4),)).first_difference.note == "4 tensors and 2 tensors"


# ---- the runs ----


def test_everything_is_put_back_and_starts_alike() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5)).train()
    program, x = symbolic_trace(model), torch.randn(4, 3)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert compare(program, symbolic_trace(model), (x,)).ok
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_inputs_that_are_written() -> None:
    program, x = symbolic_trace(lambda x: x.add_(1)), torch.ones(3)
    assert compare(program, copy.deepcopy(program), (x,)).ok and x.eq(1).all()


def test_keyword_inputs(x) -> None:
    program = symbolic_trace(lambda x, scale=1.0: x * scale)
    assert compare(program, copy.deepcopy(program), (), {"x": x, "scale": 3.0}).ok


def test_a_program_that_fails_midway(model, x) -> None:
    broken = symbolic_trace(copy.deepcopy(model))
    broken.fc2 = torch.nn.Linear(7, 7)
    with pytest.raises(
        RunError, match="in the second program, the program raised RuntimeError.*in node 'fc2'"
    ) as error:
        compare(symbolic_trace(model), broken, (x,))
    assert "until then: no difference in 3 pairs" in str(error.value)
    assert [pair.second for pair in error.value.partial.pairs] == ["x", "fc1", "relu"]


def test_forms(model, x, tmp_path) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.fc2.weight += 1
    comparison = compare(model, other, (x,))
    data = json.loads(comparison.to_json(tmp_path / "a.json"))
    assert data["first_difference"] == "fc2" and not data["ok"]
    row = next(row for row in data["pairs"] if row["second"] == "fc1")
    assert row["sqnr"] == "inf" and row["max_abs"] == 0 and "measures" not in row
    assert "<table>" in comparison._repr_html_() and "color: #b00020" in comparison._repr_html_()
    assert repr(comparison).startswith("<ProgramComparison: first difference: node 'fc2' at ")


def test_long_programs_are_lined_up_quickly() -> None:
    def chain(extra: bool):
        def f(x):
            for step in range(500):
                x = torch.sin(x) + 1
                if extra and step % 100 == 0:
                    x = x * 1
            return x

        return f

    comparison = compare(symbolic_trace(chain(False)), symbolic_trace(chain(True)), (torch.rand(3),))
    assert comparison.ok and len(comparison.only_second) == 5 and len(comparison.pairs) == 1002


def test_public_name() -> None:
    assert torchgraft.compare is compare


def test_reads_of_sizes_that_one_program_has_more_of() -> None:
    def first(x):
        a, b, c = x.size(0), x.size(1), x.size(0)
        return x.reshape(b, a) + c

    def second(x):
        return x.reshape(x.size(1), -1) + x.size(0)

    comparison = compare(symbolic_trace(first), symbolic_trace(second), (torch.ones(3, 7),))
    assert comparison.ok, comparison
