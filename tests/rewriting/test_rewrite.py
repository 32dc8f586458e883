"""`rewrite` and `explain`: commuted operands, wildcards, conditions, several results, computed weights, overlaps, effects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

import torchgraft
from tests.properties.strategies import Program, programs
from tests.properties.ways import compare, observed
from tests.rewriting.test_properties import as_function, instructions
from torchgraft import Found, PerMatch, call_any, explain, rewrite


def traced(function: Any) -> Any:
    return torchgraft.symbolic_trace(function)


def calls(module: Any) -> list[str]:
    return [node.name for node in module.graph.nodes if node.op.startswith("call")]


# ---- commuted operands ----


@pytest.mark.parametrize(
    "program",
    [
        lambda x, y: torch.sin(x) + torch.cos(y) * 2,
        lambda x, y: torch.cos(y) * 2 + torch.sin(x),
        lambda x, y: 2 * y.cos() + x.sin(),
        lambda x, y: torch.add(torch.mul(2, torch.cos(y)), torch.sin(x)),
    ],
)
def test_commuted_operands_match(program: Any) -> None:
    module = traced(program)
    (found,) = rewrite(module, lambda a, b: torch.sin(a) + torch.cos(b) * 2, lambda a, b: a - b)
    assert (str(found["a"]), str(found["b"])) == ("x", "y")
    assert torch.equal(module(torch.ones(2), torch.zeros(2)), torch.ones(2))


def test_commuting_nests() -> None:
    module = traced(lambda x, y, z: (z + (y + x)) * ((x + z) + y))
    pattern = lambda a, b, c: ((a + b) + c) * (b + (c + a))
    assert len(rewrite(module, pattern, lambda a, b, c: a)) == 1


def test_the_same_operand_twice() -> None:
    assert len(rewrite(traced(lambda x, y: x * y), lambda a: a * a, lambda a: a)) == 0
    assert len(rewrite(traced(lambda x: x * x), lambda a: a * a, lambda a: a)) == 1


def test_many_commuting_operands_end_in_time() -> None:
    def tower(*leaves: Any) -> Any:
        level = list(leaves)
        while len(level) > 1:
            level = [first + second for first, second in zip(level[::2], level[1::2], strict=True)]
        return level[0]

    def program(x: torch.Tensor) -> torch.Tensor:
        return tower(*[torch.sin(x) if number % 2 else torch.cos(x) for number in range(64)])

    def pattern(a: torch.Tensor) -> torch.Tensor:
        return tower(*[torch.cos(a) if number % 2 else torch.tan(a) for number in range(64)])

    assert rewrite(traced(program), pattern, lambda a: a) == []


# ---- wildcards and conditions ----


def test_a_parameter_stands_for_any_constant() -> None:
    module = traced(lambda x: functional.dropout(x, 0.1) + functional.dropout(x, 0.7))
    found = rewrite(module, lambda a, p: torch.dropout(a, p, True), lambda a, p: a * p, where={"p": lambda p: p > 0.5})
    assert [each["p"] for each in found] == [0.7]
    assert calls(module) == ["dropout", "mul", "add"]


def test_a_parameter_does_not_stand_for_what_is_left_out() -> None:
    module = traced(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2)))
    pattern = lambda x, w, b: functional.linear(x, w, b)
    assert explain(pattern, module).reason == "argument 'bias' of '_0' is None, the pattern has a value"
    assert len(rewrite(module, pattern, lambda x, w, b: x @ w.t() + b)) == 1
    assert len(rewrite(module, lambda x, w: functional.linear(x, w), lambda x, w: x @ w.t())) == 1


def test_conditions_on_shapes() -> None:
    module = traced(lambda x: torch.relu(x) + torch.relu(torch.sum(x)))
    for node in module.graph.nodes:
        node.meta["val"] = torch.ones(()) if node.name in ("sum_1", "relu_1") else torch.ones(2, 3)
    found = rewrite(
        module, lambda a: torch.relu(a), lambda a: torch.abs(a), where=lambda found: found.shape("a") == (2, 3)
    )
    assert [each["a"].name for each in found] == ["x"]
    assert found[0].dtype("a") == torch.float32


def test_conditions_on_modules() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, (3, 3), stride=2))
    module = traced(model)
    found = rewrite(
        module,
        lambda x: call_any(nn.Conv2d, x, name="conv"),
        lambda x: torch.relu(x),
        where=lambda found: found.modules["conv"].kernel_size == (3, 3),
    )
    assert [each.nodes["conv"].name for each in found] == ["_0", "_2"]
    assert set(dict(module.named_modules())) == {"", "1"}


def test_any_of_several() -> None:
    module = traced(lambda x: torch.tanh(torch.relu(x)) + torch.sigmoid(x).cos())
    found = rewrite(module, lambda x: call_any((torch.relu, torch.sigmoid, nn.Tanh), x), lambda x: torch.neg(x))
    assert len(found) == 2
    assert sorted(calls(module)) == ["add", "cos", "neg", "neg_1", "tanh"]


def test_condition_on_a_parameter_that_is_not_there() -> None:
    with pytest.raises(torchgraft.GraphError, match="cannot ask about 'q': the pattern's parameters are a"):
        rewrite(traced(lambda x: torch.relu(x)), lambda a: torch.relu(a), lambda a: a, where={"q": bool})


def test_modules_with_hooks_stay() -> None:
    """Replacing them would lose their hooks without a word."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2)).eval()
    model[0].register_forward_hook(lambda module, args, result: result + 1)
    model[1].register_forward_pre_hook(lambda module, args: None)
    module = traced(model)
    assert rewrite(module, lambda x: call_any(nn.Linear, x), lambda x: x) == []
    assert len(rewrite(module, lambda x: call_any(nn.BatchNorm1d, x), lambda x: x)) == 1
    assert len(rewrite(traced(model), nn.Sequential(nn.BatchNorm1d(2)), lambda x: x)) == 1


def test_two_calls_of_one_name() -> None:
    with pytest.raises(torchgraft.GraphError, match="two calls named 'layer'"):
        rewrite(
            traced(nn.Sequential(nn.Linear(2, 2))),
            lambda x: call_any(nn.Linear, call_any(nn.Linear, x, name="layer"), name="layer"),
            lambda x: x,
        )


def test_call_any_outside_of_a_pattern() -> None:
    with pytest.raises(torchgraft.GraphError, match="was called outside of a pattern"):
        call_any(nn.Linear, 3)


def test_unknown_mode() -> None:
    with pytest.raises(torchgraft.GraphError, match='the modes are "meaning" and "spelling"'):
        rewrite(traced(lambda x: torch.relu(x)), lambda a: torch.relu(a), lambda a: a, mode="letters")


def test_spelling_is_what_replace_pattern_does() -> None:
    for program, count in ((lambda x: torch.relu(x), 1), (lambda x: x.relu(), 0)):
        assert len(rewrite(traced(program), lambda a: torch.relu(a), lambda a: a, mode="spelling")) == count


# ---- several results, adjacent and overlapping matches ----


def test_several_results() -> None:
    module = traced(lambda x: (x.sin() * 2, torch.cos(x) + 1))
    found = rewrite(module, lambda a: (torch.sin(a), torch.cos(a)), lambda a: (torch.cos(a), torch.sin(a)))
    assert len(found) == 1
    x = torch.randn(3)
    torch.testing.assert_close(module(x), (torch.cos(x) * 2, torch.sin(x) + 1))


def test_several_results_that_share_commuted_operands() -> None:
    module = traced(lambda x, y: (y + x, torch.exp(x)))
    found = rewrite(module, lambda a, b: (a + b, torch.exp(a)), lambda a, b: (a - b, torch.log(a)))
    assert [(str(each["a"]), str(each["b"])) for each in found] == [("x", "y")]


def test_adjacent_matches_all_count() -> None:
    module = traced(lambda x: torch.relu(torch.relu(torch.relu(torch.relu(x)).relu())))
    assert len(rewrite(module, lambda a: functional.relu(torch.relu(a)), lambda a: torch.abs(a))) == 2
    assert calls(module) == ["abs_1", "abs_2", "relu_4"]


def test_of_two_that_overlap_the_first_counts() -> None:
    module = traced(lambda x: torch.relu(torch.relu(torch.relu(x))))
    found = rewrite(module, lambda a: torch.relu(torch.relu(a)), lambda a: torch.abs(a))
    assert [node.name for each in found for node in each.nodes.values()] == ["relu_1", "relu"]
    assert calls(module) == ["abs_1", "relu_2"]


def test_a_match_that_does_not_count_stands_in_nobodys_way() -> None:
    module = traced(lambda x: torch.relu(torch.relu(torch.relu(x))))
    found = rewrite(
        module,
        lambda a: torch.relu(torch.relu(a)),
        lambda a: torch.abs(a),
        where=lambda found: found["a"].op != "placeholder",
    )
    assert len(found) == 1 and calls(module) == ["relu", "abs_1"]


def test_a_value_used_elsewhere() -> None:
    module = traced(lambda x: torch.neg(torch.relu(x)) + torch.relu(x).sum())
    assert len(rewrite(module, lambda a: torch.neg(torch.relu(a)), lambda a: a)) == 1

    def program(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        return torch.neg(y) + y

    assert rewrite(traced(program), lambda a: torch.neg(torch.relu(a)), lambda a: a) == []


# ---- replacements that compute weights ----


def test_new_weights_for_each_match() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2)
    ).eval()
    for layer in model:
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.running_mean)
            nn.init.uniform_(layer.running_var, 0.5, 2)
    module = traced(model)
    x = torch.randn(1, 1, 5, 5)
    expected = model(x)
    found = rewrite(
        module,
        lambda x: call_any(nn.BatchNorm2d, call_any(nn.Conv2d, x, name="conv"), name="norm"),
        PerMatch(lambda found: fuse_conv_bn_eval(found.modules["conv"], found.modules["norm"])),
    )
    assert len(found) == 2
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in module.modules())
    torch.testing.assert_close(module(x), expected)
    assert list(dict(module.named_children())) == ["2", "0_replaced", "3_replaced"]


def test_computed_from_functional_weights() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x):
            return functional.linear(x, self.weight) * 0.5

    def make(found: Found) -> Any:
        weight = found.tensor("w")
        assert weight is not None
        halved = (weight * found["s"]).detach()
        return lambda x, w, s: functional.linear(x, halved)

    model = Model()
    module = traced(model)
    assert len(rewrite(module, lambda x, w, s: functional.linear(x, w) * s, PerMatch(make))) == 1
    x = torch.randn(2, 4)
    torch.testing.assert_close(module(x), model(x))
    assert "weight" not in [node.target for node in module.graph.nodes]


def test_one_module_for_several_matches_is_shared() -> None:
    shared = nn.PReLU()
    module = traced(lambda x: torch.relu(torch.relu(x)))
    rewrite(module, lambda a: torch.relu(a), PerMatch(lambda found: shared))
    assert [node.target for node in module.graph.nodes if node.op == "call_module"] == ["pre_lu", "pre_lu"]
    assert module.pre_lu is shared


def test_an_error_in_a_replacement_changes_nothing() -> None:
    module = traced(lambda x: torch.relu(x))
    before = module.code
    with pytest.raises(ZeroDivisionError):
        rewrite(module, lambda a: torch.relu(a), PerMatch(lambda found: 1 // 0))
    with pytest.raises(torchgraft.GraphError, match="cannot replace a pattern by something with other inputs"):
        rewrite(module, lambda a: torch.relu(a), lambda a, b: a)
    with pytest.raises(torchgraft.GraphError, match="cannot rewrite a ReLU"):
        rewrite(nn.ReLU(), lambda a: torch.relu(a), lambda a: a)  # type: ignore[arg-type]
    assert module.code == before


# ---- effects ----


def test_never_across_a_write() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        first = torch.sin(y)
        y.add_(1)
        return torch.cos(y) + first

    module = traced(program)
    assert rewrite(module, lambda a: a.cos() + a.sin(), lambda a: torch.tan(a)) == []
    assert "writes memory" in explain(lambda a: a.cos() + a.sin(), module).reason
    assert torch.equal(module(torch.ones(2)), program(torch.ones(2)))


def positive(a: torch.Tensor) -> torch.Tensor:
    """What relu is, its gradient at zero included (that of clamp is another)."""
    return torch.where(a > 0, a, 0.0)


EQUALS = [
    (lambda a: functional.relu(a), lambda a: positive(a)),
    (lambda a: -(a.relu()), lambda a: positive(a) * -1),
    (lambda a: a.neg().neg(), lambda a: a * 1),
    (lambda a: a + a, lambda a: a * 2),
    (lambda a: a.cos() + a.sin(), lambda a: torch.cos(a) + torch.sin(a)),
    (lambda a, b: a + b, lambda a, b: torch.add(b, a)),
    (lambda a, b: a.sin() - b.neg(), lambda a, b: b + torch.sin(a)),
    (lambda a: (a.sin(), a.cos()), lambda a: (torch.sin(a), torch.cos(a))),
    (lambda a, b: (torch.relu(a), b + torch.relu(a)), lambda a, b: (positive(a), positive(a) + b)),
]


@given(instructions(effects=True), st.lists(st.sampled_from(EQUALS), min_size=1, max_size=3))
@settings(max_examples=150)
def test_replacing_equals_by_equals_changes_nothing(lines: Any, rewrites: Any) -> None:
    program = as_function(lines)
    module = traced(program)
    for pattern, replacement in rewrites:
        rewrite(module, pattern, replacement)
        module.graph.lint()
    (ours, our_gradients, our_inputs), (eager, gradients, inputs) = [_run(each) for each in (module, program)]
    torch.testing.assert_close((ours, our_inputs), (eager, inputs))
    if our_gradients is not None and gradients is not None:
        torch.testing.assert_close(our_gradients, gradients)


def _run(program: Any) -> tuple[Any, Any, Any]:
    """Results, gradients (None where something that backward needs was written: what is kept differs) and inputs afterwards."""
    leaves = [torch.linspace(-1, 1, 5, requires_grad=True), torch.linspace(2, -2, 5, requires_grad=True)]
    inputs = [value * 1 for value in leaves]
    values = program(*inputs)
    try:
        gradients = torch.autograd.grad(sum(value.sum() for value in values), leaves, allow_unused=True)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error) or "does not require grad" in str(error)
        gradients = None
    return values, gradients, [value.detach() for value in inputs]


MORE_EQUALS = [
    EQUALS[3],
    EQUALS[5],
    (lambda a, b: a * b, lambda a, b: torch.mul(b, a)),
    (lambda a: a.sin(), lambda a: torch.sin(a)),
    (lambda a, w, b: functional.linear(a, w, b), lambda a, w, b: functional.linear(bias=b, weight=w, input=a)),
]


@given(programs(), st.sampled_from(MORE_EQUALS))
@settings(max_examples=80)
def test_random_models(program: Program, equals: Any) -> None:
    pattern, replacement = equals
    seen = observed(program)
    if seen is None:
        return
    expected, module, model = seen
    rewrite(module, pattern, replacement)
    module.graph.lint()
    compare(expected, module, module, model, program, "rewritten")


# ---- explanations ----


def test_the_argument_that_differed() -> None:
    module = traced(lambda x: torch.relu(torch.softmax(torch.sin(x), 2)))
    explanation = explain(lambda x: torch.relu(torch.softmax(x.sin(), 1)), module)
    assert str(explanation).startswith(
        "the pattern occurs nowhere; the nearest miss is at node 'relu' (test_rewrite.py:"
    )
    assert str(explanation).endswith(
        ": 3 of 3 calls are there, but argument 'dim' of 'softmax' is 2, the pattern has 1"
    )


EXPLAINED = [
    (lambda x: torch.cos(x), lambda x: torch.sin(x), "nothing in the program calls sin; it calls cos (1)"),
    (
        lambda x: torch.relu(torch.cos(x)), lambda x: torch.relu(torch.sin(x)),
        "argument 'self' of 'relu' is made by 'cos', a call of cos; the pattern calls sin",
    ),
    (lambda x: torch.relu(x), lambda x: torch.relu(torch.sin(x)), "argument 'self' of 'relu' is 'x', the pattern calls sin"),
    (
        lambda x, y: torch.sub(x, y), lambda a: torch.sub(a, a),
        "argument 'other' of 'sub' is 'y', the pattern has the same value here as elsewhere, where it is 'x'",
    ),
    (lambda x: x.view(2, 3), lambda x: x.view(2, 4), "argument 'size' of 'view' is 3, the pattern has 4"),
    (
        lambda x: torch.cat([x, x]), lambda x: torch.cat([x, x, x]),
        "argument 'tensors' of 'cat' is [x, x], the pattern has something else",
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(EXPLAINED)))
def test_explanations(number: int) -> None:
    program, pattern, reason = EXPLAINED[number]
    assert explain(pattern, traced(program)).reason == reason


def test_explained_modules_and_users() -> None:
    module = traced(nn.Sequential(nn.BatchNorm2d(4, eps=0.1)))
    assert (
        explain(nn.Sequential(nn.BatchNorm2d(4)), module).reason
        == "the setting 'eps' of '_0' is 0.1, the pattern has 1e-05"
    )
    reason = explain(lambda x: torch.relu(call_any(nn.Conv2d, x)), traced(lambda x: torch.relu(x))).reason
    assert "the pattern calls any Conv2d" in reason

    def program(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        return torch.neg(y) + y

    reason = explain(lambda a: torch.neg(torch.relu(a)), traced(program)).reason
    assert "which 2 nodes use ('neg', 'add') and 1 in the pattern" in reason


def test_explained_conditions_and_matches() -> None:
    module = traced(lambda x: torch.relu(x))
    assert explain(lambda a: torch.relu(a), module, where=lambda found: False).reason == "`where` says no"
    assert str(explain(lambda a: torch.relu(a), module)) == "the pattern occurs once"
    assert explain(lambda a: torch.relu(a), module).matches == 1
    assert calls(module) == ["relu"]


def test_linear_in_the_program() -> None:
    """Counted, not timed: comparisons grow with the program."""
    from torchgraft.rewriting.meaning_matching import MeaningMatcher, MeaningPattern
    from torchgraft.rewriting.pattern import Program as Subject

    def chain(length: int) -> Any:
        def program(x: torch.Tensor) -> torch.Tensor:
            for _ in range(length):
                x = torch.relu(x) + 1
            return x

        return program

    counts = []
    for length in (100, 200, 400):
        module = traced(chain(length))
        pattern = MeaningPattern(Subject.of(lambda a: 1 + a.relu(), "pattern"))
        matcher = MeaningMatcher(pattern, Subject(module.graph, module))
        assert len(matcher.match()) == length
        counts.append(matcher.comparisons)
    assert counts[1] == 2 * counts[0] and counts[2] == 4 * counts[0]


def test_the_same_parameters_in_another_order_are_refused() -> None:
    program = traced(lambda x, y: torch.relu(x) - y)
    with pytest.raises(torchgraft.GraphError, match=r"the pattern has \(a, b\), the replacement \(b, a\)"):
        rewrite(program, lambda a, b: torch.relu(a) - b, lambda b, a: torch.relu(a) - b)
    assert len(rewrite(program, lambda a, b: torch.relu(a) - b, lambda c, d: torch.sigmoid(c) - d)) == 1


def test_explain_says_what_is_in_the_way() -> None:
    def regions(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = torch.sin(x)
        return torch.cos(y)

    def in_turn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.sin(x)
        return first, torch.cos(first + 1)

    found = explain(lambda a: torch.cos(torch.sin(a)), traced(regions))
    assert found.reason == "a `with` region begins or ends between its nodes"
    found = explain(lambda a, b: (torch.sin(a), torch.cos(b)), traced(in_turn))
    assert found.reason.startswith("one of its results is used before the last of them can be computed")
    found = explain(lambda a: a * 2.0, traced(lambda x: x * 2))
    assert found.reason == "argument 'other' of 'mul' is 2, the pattern has 2.0"
    hooked = nn.Sequential(nn.ReLU())
    hooked[0].register_forward_hook(lambda module, inputs, result: result + 1)
    assert (
        "it calls ReLU with hooks, which matches nothing (1)" in explain(lambda a: torch.relu(a), traced(hooked)).reason
    )
