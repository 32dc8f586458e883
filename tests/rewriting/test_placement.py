"""Where a replacement goes: after its inputs, before its users, and never past an effect that could tell.
Each program is run beside the same program unchanged, or the match must have been refused.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchgraft
from torchgraft.rewriting import replace_pattern


def neg_relu(a):
    return torch.neg(torch.relu(a))


def same_by_other_means(a):
    return torch.clamp(a, min=0) * -1


def check(program, pattern, replacement, matches: int, *inputs) -> torchgraft.GraphModule:
    """Rewrite by something that computes the same, and see that the program still does."""
    traced = torchgraft.symbolic_trace(program)
    assert len(replace_pattern(traced, pattern, replacement)) == matches
    traced.graph.lint()
    inputs = inputs or (torch.randn(4), torch.randn(4))
    ours, theirs = [value.clone() for value in inputs], [value.clone() for value in inputs]
    torch.testing.assert_close(traced(*ours), program(*theirs))
    torch.testing.assert_close(ours, theirs)
    return traced


# ---- effects between the parts of a match ----


def test_input_changed_between_the_parts() -> None:
    def program(x, y):
        inner = torch.relu(x)
        x.add_(1)
        return torch.neg(inner) + x

    check(program, neg_relu, same_by_other_means, 0)


def test_input_changed_through_a_view() -> None:
    def program(x, y):
        view = x[1:]
        inner = torch.relu(x)
        view.mul_(0)
        return torch.neg(inner) + y

    check(program, neg_relu, same_by_other_means, 0)


def test_item_assigned_between_the_parts() -> None:
    def program(x, y):
        inner = torch.relu(x)
        x[0] = 5
        return torch.neg(inner) + y

    check(program, neg_relu, same_by_other_means, 0)


def test_something_else_changed_between_the_parts() -> None:
    def program(x, y):
        other = torch.add(y, 1)
        inner = torch.relu(x)
        other.add_(1)
        return torch.neg(inner) + other

    check(program, neg_relu, same_by_other_means, 1)


def test_inputs_of_the_program_may_be_the_same_tensor() -> None:
    def program(x, y):
        inner = torch.relu(x)
        y.add_(1)
        return torch.neg(inner)

    traced = check(program, neg_relu, same_by_other_means, 0)
    x = torch.randn(4)
    expected = torch.neg(torch.relu(x))
    assert torch.equal(traced(x, x), expected)


def test_pure_calls_between_the_parts_do_not_matter() -> None:
    def program(x, y):
        inner = torch.relu(x)
        other = torch.sigmoid(y) * 2
        return torch.neg(inner) + other

    check(program, neg_relu, same_by_other_means, 1)


def test_random_draws_between_the_parts_do_not_matter() -> None:
    def program(x, y):
        inner = torch.relu(x)
        noise = torch.rand_like(y) * 0
        return torch.neg(inner) + noise

    check(program, neg_relu, same_by_other_means, 1)


def test_switches_of_grad_mode_are_not_passed() -> None:
    def program(x, y):
        with torch.no_grad():
            inner = torch.relu(x)
        return torch.neg(inner) + y

    check(program, neg_relu, same_by_other_means, 0)


def test_a_match_inside_a_region_stays_inside() -> None:
    def program(x, y):
        with torch.no_grad():
            inner = torch.neg(torch.relu(x))
        return inner * y

    traced = torchgraft.symbolic_trace(program)
    assert len(replace_pattern(traced, neg_relu, same_by_other_means)) == 1
    x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    traced(x, y).sum().backward()
    assert x.grad is None
    assert y.grad is not None


# ---- effects inside a match ----


def test_in_place_pattern_side_by_side() -> None:
    def program(x, y):
        return torch.relu(x.add_(1)) + y

    check(program, lambda a: torch.relu(a.add_(1)), lambda a: torch.clamp(a.add_(1), min=0), 1)


def test_in_place_pattern_with_a_reader_between() -> None:
    def program(x, y):
        changed = x.add_(1)
        seen = x * 2
        return torch.relu(changed) + seen

    check(program, lambda a: torch.relu(a.add_(1)), lambda a: torch.clamp(a.add_(1), min=0), 0)


def test_in_place_pattern_with_a_stranger_between() -> None:
    def program(x, y):
        mine = torch.mul(x, 1)
        changed = mine.add_(1)
        seen = torch.sigmoid(y)
        return torch.relu(changed) + seen

    check(program, lambda a: torch.relu(a.add_(1)), lambda a: torch.clamp(a.add_(1), min=0), 1)


def add_then_relu(a):
    a.add_(1)
    return torch.relu(a)


def test_call_made_only_for_its_effect_is_part_of_the_pattern() -> None:
    def program(x, y):
        x.add_(1)
        return torch.relu(x) + y

    def replacement(a):
        a.sub_(-1)
        return torch.relu(a)

    traced = check(program, add_then_relu, replacement, 1)
    assert "add_" not in [node.target for node in traced.graph.nodes]


def test_effects_in_another_order_are_another_program() -> None:
    def program(x, y):
        result = torch.relu(x)
        x.add_(1)
        return result + y

    check(program, add_then_relu, lambda a: torch.relu(a.add_(1)), 0)


def test_replacement_reads_before_a_later_change() -> None:
    """torch.fx puts the replacement before its first user, after the change."""

    def program(x, y):
        inner = torch.neg(torch.relu(x))
        x.add_(1)
        return inner + x

    check(program, neg_relu, same_by_other_means, 1)


def test_leaf_modules_that_change_their_input() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.activation = nn.ReLU(inplace=True)

        def forward(self, x, y):
            doubled = x * 2
            inner = torch.sigmoid(doubled)
            changed = self.activation(doubled)
            return torch.neg(inner) + changed

    check(Model(), lambda a: torch.neg(torch.sigmoid(a)), lambda a: torch.sigmoid(a) * -1, 0)


def test_state_that_the_match_does_not_read_may_change() -> None:
    root = nn.Module()
    root.register_buffer("count", torch.zeros(()))
    for state_is_read in (False, True):
        graph = torchgraft.Graph()
        x = graph.placeholder("x")
        inner = graph.call_function(torch.relu, (graph.get_attr("count") if state_is_read else x,))
        graph.call_method("add_", (graph.get_attr("count"), 1))
        graph.output((graph.call_function(torch.neg, (inner,)), x))
        assert len(replace_pattern(torchgraft.GraphModule(root, graph), neg_relu, same_by_other_means)) != state_is_read


# ---- several results ----


def both(a, b):
    first = torch.relu(a)
    return first, torch.add(first, b)


def both_by_other_means(a, b):
    first = torch.clamp(a, min=0)
    return first, first + b


def test_place_between_the_last_input_and_the_first_user() -> None:
    def program(x, y):
        first = torch.relu(x)
        late_input = torch.sigmoid(y)
        early_user = torch.neg(first)
        second = torch.add(first, late_input)
        return early_user * second

    check(program, both, both_by_other_means, 1)


def test_no_place_between_inputs_and_users() -> None:
    def program(x, y):
        first = torch.relu(x)
        early_user = torch.neg(first)
        late_input = torch.sigmoid(y)
        second = torch.add(first, late_input)
        return early_user * second

    check(program, both, both_by_other_means, 0)


def test_input_computed_from_a_result() -> None:
    def program(x, y):
        first = torch.relu(x)
        return torch.add(first, torch.neg(first))

    check(program, both, both_by_other_means, 0)


def test_matches_with_several_results_that_feed_each_other() -> None:
    def program(x, y):
        for _ in range(5):
            x, y = both(x, y)
        return x * y

    traced = check(program, both, both_by_other_means, 5)
    assert torch.relu not in [node.target for node in traced.graph.nodes]


def test_matches_whose_places_depend_on_each_other() -> None:
    def program(x, y):
        first = torch.relu(x)
        other_first = torch.relu(y)
        early_user = torch.neg(other_first)
        second = torch.add(first, early_user)
        other_second = torch.add(other_first, first)
        return second * other_second

    traced = torchgraft.symbolic_trace(program)
    matches = replace_pattern(traced, both, both_by_other_means)
    assert matches
    traced.graph.lint()
    x, y = torch.randn(4), torch.randn(4)
    torch.testing.assert_close(traced(x, y), program(x, y))


def test_result_that_is_an_input() -> None:
    def pattern(a):
        return a, torch.relu(a)

    def program(x, y):
        return torch.neg(x) + torch.relu(x) * x

    check(program, pattern, lambda a: (a, torch.clamp(a, min=0)), 1)


def test_unused_results() -> None:
    def program(x, y):
        return functional.relu(x) + 0 * both(x, y)[0]

    check(program, lambda a, b: torch.add(a, b), lambda a, b: a - (-b), 1)


@pytest.mark.parametrize("inplace", [False, True])
def test_training_models_keep_their_values(inplace: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)
            self.norm = nn.BatchNorm2d(3)
            self.activation = nn.ReLU(inplace=inplace)

        def forward(self, x, y):
            left = self.activation(self.norm(self.conv(x)))
            right = self.activation(self.norm(self.conv(y)))
            return torch.relu(left + right)

    torch.manual_seed(0)
    model = Block()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = torch.rand(2, 3, 4, 4), torch.rand(2, 3, 4, 4)
    expected = model(*inputs)
    statistics = model.norm.running_mean.clone()
    model.load_state_dict(state)
    traced = torchgraft.symbolic_trace(model)
    replace_pattern(traced, lambda a, b: torch.relu(a + b), lambda a, b: torch.clamp(torch.add(a, b), min=0))
    assert torch.equal(traced(*inputs), expected)
    assert torch.equal(model.norm.running_mean, statistics)
