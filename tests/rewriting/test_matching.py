"""What counts as an occurrence of a pattern, and what is said about a pattern that cannot be matched.
Examples on which torch.fx agrees are in `test_against_torch_fx.py`; the order of effects is in `test_placement.py`.
"""

import pytest
import torch
from torch.fx import subgraph_rewriter as their_rewriter
from torch.fx import symbolic_trace as their_symbolic_trace

import torchgraft
from tests.torch_versions import TORCH
from torchgraft.errors import GraphError
from torchgraft.rewriting import replace_pattern, replace_pattern_with_filters
from torchgraft.rewriting.matching import same_value


def rewrite(program, pattern, replacement, **options):
    traced = torchgraft.symbolic_trace(program)
    replaced = replace_pattern_with_filters(traced, pattern, replacement, **options)
    traced.graph.lint()
    return traced, replaced


def targets(module) -> list[object]:
    return [node.target for node in module.graph.nodes if node.op.startswith("call")]


# ---- inputs of the pattern ----


def test_two_inputs_that_are_one_node_are_found_by_meaning_alone() -> None:
    program, pattern = lambda x: torch.add(x, x), lambda a, b: torch.add(a, b)
    replacement = lambda a, b: torch.mul(a, torch.neg(b))
    assert rewrite(program, pattern, replacement)[1] == []
    traced = torchgraft.symbolic_trace(program)
    assert torchgraft.rewrite(traced, pattern, replacement, mode="spelling") == []
    (found,) = torchgraft.rewrite(traced, pattern, replacement)
    assert {node.name for node in found.inputs.values()} == {"x"}
    assert traced(torch.tensor(3.0)) == -9


def test_one_input_must_be_one_literal() -> None:
    def pattern(a, amount):
        return torch.mul(torch.add(a, amount), amount)

    def program(x):
        return (
            torch.mul(torch.add(x, 2), 2),
            torch.mul(torch.add(x, 2), 3),
            torch.mul(torch.add(x, 1), True),
            torch.mul(torch.add(x, 1), 1.0),
        )

    for ignore in (False, True):
        _, replaced = rewrite(program, pattern, lambda a, amount: a - amount, ignore_literals=ignore)
        assert [list(each.nodes_map.values())[-1] for each in replaced] == [2]


def test_input_must_not_be_taken_away_with_the_match() -> None:
    def program(x):
        inner = torch.relu(x)
        return torch.add(inner, inner)

    for pattern in (lambda a, b: torch.add(torch.relu(a), b), lambda a, b: torch.add(b, torch.relu(a))):
        assert rewrite(program, pattern, lambda a, b: a - b)[1] == []


def test_input_bound_to_a_list_must_not_hold_a_part_of_the_match() -> None:
    def program(x):
        inner = torch.relu(x)
        return torch.block_diag(inner, torch.cat([inner, x]))

    def pattern(a, tensors):
        inner = torch.relu(a)
        return inner, torch.block_diag(inner, torch.cat(tensors))

    assert rewrite(program, pattern, lambda a, tensors: (a, a))[1] == []


def test_two_calls_of_the_pattern_are_two_nodes() -> None:
    def program(x):
        inner = torch.relu(x)
        return inner + inner

    assert rewrite(program, lambda a: torch.relu(a) + torch.relu(a), lambda a: a)[1] == []


# ---- arguments ----


def test_nodes_inside_slices_and_dicts_are_found_by_meaning_alone() -> None:
    def until(a, stop):
        return a[1:stop]

    def call(value):
        return takes_dict({"first": value, "second": [value, 1]})

    def called(a):
        return call(torch.relu(a))

    assert rewrite(until, until, lambda a, stop: a.narrow(0, 1, stop))[1] == []
    assert rewrite(called, called, lambda a: torch.neg(a))[1] == []
    traced = torchgraft.symbolic_trace(lambda x, n: until(x, n) + 1)
    assert len(torchgraft.rewrite(traced, until, lambda a, stop: a.narrow(0, 1, stop))) == 1
    assert torch.equal(traced(torch.arange(5.0), 3), torch.arange(1.0, 4.0) + 1)
    traced = torchgraft.symbolic_trace(called)
    assert torchgraft.rewrite(traced, lambda a: takes_dict({"first": a, "other": [a, 1]}), lambda a: a) == []
    assert len(torchgraft.rewrite(traced, called, lambda a: torch.neg(a))) == 1
    assert targets(traced) == [torch.neg]


def test_nodes_inside_slices_agree_where_literals_are_ignored() -> None:
    """torch.fx takes the slice for a literal there, so that it finds both."""
    traced, replaced = rewrite(
        lambda x, n, m: (takes_slice(x[1:n], n), takes_slice(x[1:n], m)),
        lambda a, stop: takes_slice(a[2:stop], stop),
        lambda a, stop: torch.neg(a),
        ignore_literals=True,
    )
    assert targets(traced).count(torch.neg) == len(replaced) == 1
    assert traced(torch.arange(5.0), 3, 4)[1].tolist() == [5.0, 6.0]


@torchgraft.wrap
def takes_slice(values, amount):
    return values + amount


@torchgraft.wrap
def takes_dict(values):
    return values["first"] + values["second"][0] * values["second"][1]


def test_shape_of_nested_lists_counts() -> None:
    def program(x):
        return torch.nn.functional.pad(x, (1, 2)), torch.nn.functional.pad(x, (1, 2, 3, 4))

    _, replaced = rewrite(program, lambda a: torch.nn.functional.pad(a, (1, 2)), lambda a: a)
    assert len(replaced) == 1
    _, replaced = rewrite(program, lambda a: torch.nn.functional.pad(a, (0, 0)), lambda a: a, ignore_literals=True)
    assert len(replaced) == 1


def test_literals_ignored_do_not_stand_for_calls_of_the_pattern() -> None:
    _, replaced = rewrite(
        lambda x: torch.add(x, 3), lambda a, b: torch.add(a, torch.relu(b)), lambda a, b: a, ignore_literals=True
    )
    assert replaced == []


def test_an_ignored_literal_may_be_a_value_of_the_match() -> None:
    def program(x):
        late = torch.relu(x)
        return torch.add(torch.sigmoid(late), late)

    def pattern(a, b):
        early = torch.sigmoid(a)
        return torch.relu(b), torch.add(early, 1)

    traced, _ = rewrite(program, pattern, lambda a, b: (torch.sin(b), torch.cos(a)), ignore_literals=True)
    assert traced(torch.tensor(0.5)).isfinite()


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (1, True, False),
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        ([1, 2], (1, 2), True),
        ([1, 2], [1, 2, 3], False),
        ([1], 1, False),
        (slice(1, None), slice(1, None), True),
        (slice(1, None), slice(2, None), False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"a": 1.0}, False),
        ({"a": 1}, {"b": 1}, False),
        (torch.float32, torch.float32, True),
        (torch.float32, torch.float64, False),
        (torch.ones(2), torch.ones(2), False),
        (..., ..., True),
        (None, 0, False),
    ],
)
def test_literals_are_the_same_by_type_and_value(first, second, same: bool) -> None:
    assert same_value(first, second) is same
    assert same_value(second, first) is same


def test_overloads_match_however_the_arguments_are_given() -> None:
    aten = torch.ops.aten

    def program(x):
        return (
            aten.sum.dim_IntList(x, [1]),
            aten.sum.dim_IntList(x, dim=[1], keepdim=False),
            aten.sum.dim_IntList(x, [0]),
        )

    _, replaced = rewrite(program, lambda a: aten.sum.dim_IntList(a, [1], False), lambda a: a)
    assert len(replaced) == 2


# ---- matches beside, above and across each other ----


def test_matches_that_feed_each_other_through_a_list() -> None:
    """torch.fx leaves a node that was erased (pytorch issue 159613)."""

    def program(x, y, z):
        return torch.cat([torch.cat([x, y], 1), z], 2)

    traced, replaced = rewrite(
        program, lambda tensors, dim: torch.cat(tensors, dim), lambda tensors, dim: torch.concat(tensors, dim)
    )
    assert targets(traced) == [torch.concat, torch.concat]
    (first, second) = replaced
    assert (
        second.nodes_map[next(node for node in second.nodes_map if node.name == "tensors")][0] is first.replacements[0]
    )
    inputs = torch.rand(1, 3, 2), torch.rand(1, 2, 2), torch.rand(1, 5, 4)
    assert torch.equal(traced(*inputs), program(*inputs))


def test_maps_lead_to_nodes_of_the_new_program() -> None:
    traced, replaced = rewrite(lambda x: torch.relu(torch.relu(x)), lambda a: torch.relu(a), lambda a: torch.neg(a))
    live = set(traced.graph.nodes)
    for each in replaced:
        (placeholder,) = [node for node in each.nodes_map if node.op == "placeholder"]
        assert each.nodes_map[placeholder] in live
        assert set(each.replacements) <= live


def test_chains_of_matches_that_vanish() -> None:
    traced, replaced = rewrite(
        lambda x: torch.relu(torch.relu(torch.relu(torch.neg(x)))) + 1, lambda a: torch.relu(a), lambda a: a
    )
    assert targets(traced)[0] is torch.neg and len(targets(traced)) == 2
    assert [each.replacements for each in replaced] == [[], [], []]
    assert {list(each.nodes_map.values())[-1].name for each in replaced} == {"neg"}


def test_a_match_that_is_refused_stands_in_nobodys_way_by_meaning_alone() -> None:
    def program(x):
        return torch.relu(torch.relu(torch.relu(x)))

    def reads_a_call(match, graph, pattern):
        return match.placeholder_nodes[0].op != "placeholder"

    pattern = lambda a: torch.relu(torch.relu(a))
    traced, replaced = rewrite(program, pattern, lambda a: torch.neg(a), match_filters=[reads_a_call])
    assert replaced == []
    torchgraft.rewrite(
        traced, pattern, lambda a: torch.neg(a), where=lambda found: reads_a_call(found.match, None, None)
    )
    assert targets(traced) == [torch.relu, torch.neg]


def test_results_are_paired_in_the_order_of_the_program() -> None:
    def program(x):
        return torch.stack([torch.relu(x), torch.neg(x), torch.relu(x + 1), torch.neg(x + 1)])

    def pattern(a):
        return torch.relu(a), torch.neg(a)

    traced, replaced = rewrite(program, pattern, lambda a: (torch.sin(a), torch.cos(a)))
    assert len(replaced) == 1  # the second pair adds 1 twice, and so has no input in common
    traced, replaced = rewrite(
        program, lambda a, b: (torch.relu(a), torch.neg(b)), lambda a, b: (torch.sin(a), torch.cos(b))
    )
    assert len(replaced) == 2
    x = torch.rand(3)
    assert torch.equal(traced(x), torch.stack([x.sin(), x.cos(), (x + 1).sin(), (x + 1).cos()]))


def test_a_result_without_counterpart_prevents_the_match() -> None:
    _, replaced = rewrite(lambda x: torch.relu(x) + 1, lambda a: (torch.relu(a), torch.neg(a)), lambda a: (a, a))
    assert replaced == []


def test_a_pattern_as_deep_as_the_program() -> None:
    def deep(x):
        for _ in range(5_000):
            x = torch.relu(x)
        return x

    traced, replaced = rewrite(deep, deep, lambda a: torch.neg(a))
    assert len(replaced) == 1
    assert targets(traced) == [torch.neg]


# ---- patterns that cannot be matched ----


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (lambda a: a, "cannot match a pattern without operations: it only returns its inputs or constants"),
        (lambda a: (torch.relu(a), torch.neg(a))[0], "nothing uses node 'neg'"),
        (lambda a, b: torch.relu(a), "nothing uses 'b', so it would be bound to no value"),
        (
            lambda a, b: (torch.relu(a), b),
            "cannot match a pattern that returns its input 'b' without computing with it",
        ),
        (3, "cannot use 3 as a pattern: it is int; give a function, a torch.nn.Module, a GraphModule or a Graph"),
        (torchgraft.Graph(), "cannot match an empty pattern"),
    ],
)
def test_patterns_that_mean_nothing_are_refused(pattern, text: str) -> None:
    traced = torchgraft.symbolic_trace(lambda x: torch.relu(x))
    before = traced.code
    with pytest.raises(GraphError, match=text):
        replace_pattern(traced, pattern, lambda a: a)
    assert traced.code == before


def test_only_graph_modules_are_rewritten() -> None:
    with pytest.raises(GraphError, match="cannot rewrite a Linear: patterns are replaced in a GraphModule"):
        replace_pattern(torch.nn.Linear(1, 1), lambda a: torch.relu(a), lambda a: a)


def test_torch_fx_has_no_answer_to_these() -> None:
    """If this fails, torch.fx has caught up and the examples belong in `test_against_torch_fx.py`."""
    traced = their_symbolic_trace(lambda x, y, z: torch.cat([torch.cat([x, y], 1), z], 2))
    their_rewriter.replace_pattern(traced, lambda a, b: torch.cat(a, b), lambda a, b: torch.concat(a, b))
    if TORCH <= (2, 13):  # mended in 2.15 at the latest
        with pytest.raises(RuntimeError, match="used before it has been defined"):
            traced.graph.lint()


@pytest.mark.parametrize(
    ("program", "pattern", "options"),
    [
        (lambda x: torch.clamp(x, 1, True), lambda a, b: torch.clamp(a, b, b), {}),
        (lambda x: torch.add(x, -0.0), lambda a: torch.add(a, 0.0), {}),
        (lambda x: x[1:2], lambda a: a[True:2], {}),
        (lambda x: torch.clamp(x, 1, 2), lambda a, b: torch.clamp(a, b, b), {"ignore_literals": True}),
        (lambda x: torch.add(x, 2), lambda a: torch.add(a, a), {"ignore_literals": True}),
    ],
)
def test_torch_fx_takes_these_for_the_same(program, pattern, options) -> None:
    """Replacing what it finds would give another program, so these are not found here."""
    one_input, two_inputs = lambda a: torch.neg(a), lambda a, b: torch.neg(a)
    replacement = one_input if pattern.__code__.co_argcount == 1 else two_inputs
    traced = their_symbolic_trace(program)
    found = their_rewriter.replace_pattern_with_filters(traced, pattern, replacement, **options)
    assert len(found) == 1
    assert rewrite(program, pattern, replacement, **options)[1] == []


def test_results_without_a_place_for_all_are_not_found() -> None:
    """torch.fx finds them, and a replacement that mixes the inputs is left using what is not yet defined."""

    def program(x):
        first = torch.relu(x) + 1
        return first, torch.neg(torch.sin(x))

    def pattern(a, b):
        return torch.relu(a), torch.neg(b)

    def replacement(a, b):
        return a + b, b

    traced = their_symbolic_trace(program)
    assert len(their_rewriter.replace_pattern(traced, pattern, replacement)) == 1
    with pytest.raises(RuntimeError, match="used before it has been defined"):
        traced.graph.lint()
    assert rewrite(program, pattern, replacement)[1] == []
