"""replace_pattern and replace_pattern_with_filters: what counts as a match and what is left in its place.

Single-node edits are examined with Node and Graph.
"""

import operator
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional


def targets(module) -> list[object]:
    return [node.target for node in module.graph.nodes]


def test_example_of_the_documentation(port) -> None:
    program = port("""
        import torch
        from torch.fx import symbolic_trace, subgraph_rewriter

        class M(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()

            def forward(self, x, w1, w2):
                m1 = torch.cat([w1, w2]).sum()
                m2 = torch.cat([w1, w2]).sum()
                return x + torch.max(m1) + torch.max(m2)

        def pattern(w1, w2):
            return torch.cat([w1, w2])

        def replacement(w1, w2):
            return torch.stack([w1, w2])

        traced_module = symbolic_trace(M())
        matches = subgraph_rewriter.replace_pattern(traced_module, pattern, replacement)
    """)
    assert len(program.matches) == 2
    assert torch.cat not in targets(program.traced_module)
    assert targets(program.traced_module).count(torch.stack) == 2
    program.traced_module.graph.lint()
    x, w = torch.tensor(1.0), torch.arange(3.0)
    expected = x + 2 * torch.stack([w, w]).sum()
    assert torch.equal(program.traced_module(x, w, w), expected)


def test_function_is_exported_at_the_top_too(fx: ModuleType) -> None:
    assert fx.replace_pattern is fx.subgraph_rewriter.replace_pattern


def test_match_tells_anchor_and_nodes(fx: ModuleType) -> None:
    def program(x):
        return torch.neg(torch.relu(x)) + 1

    def pattern(y):
        return torch.neg(torch.relu(y))

    traced = fx.symbolic_trace(program)
    (relu,) = traced.graph.find_nodes(op="call_function", target=torch.relu)
    (negation,) = traced.graph.find_nodes(op="call_function", target=torch.neg)
    x = next(iter(traced.graph.nodes))
    (match,) = fx.replace_pattern(traced, pattern, lambda y: torch.abs(y))
    assert isinstance(match, fx.subgraph_rewriter.Match)
    assert match.nodes_map[match.anchor] is negation
    by_name = {node.name: found for node, found in match.nodes_map.items()}
    assert by_name["relu"] is relu
    assert by_name["neg"] is negation
    assert by_name["y"] is x


def test_no_match_changes_nothing(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: torch.relu(x))
    before = traced.code
    assert fx.replace_pattern(traced, lambda x: torch.neg(x), lambda x: torch.abs(x)) == []
    assert traced.code == before


def test_module_is_ready_to_run_after_replacing(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: torch.relu(x) * 2)
    fx.replace_pattern(traced, lambda x: torch.relu(x), lambda x: torch.neg(x))
    assert traced(torch.tensor(3.0)).item() == -6.0
    assert "torch.neg" in traced.code


def test_chain_of_matches(fx: ModuleType) -> None:
    def program(x):
        for _ in range(5):
            x = torch.relu(x) + 1
        return x

    traced = fx.symbolic_trace(program)
    matches = fx.replace_pattern(traced, lambda x: torch.relu(x) + 1, lambda x: x - 2)
    assert len(matches) == 5
    assert targets(traced) == ["x"] + [operator.sub] * 5 + ["output"]
    assert traced(10) == 0


def test_overlapping_matches_take_the_first(fx: ModuleType) -> None:
    def program(x):
        return torch.relu(torch.relu(torch.relu(x)))

    traced = fx.symbolic_trace(program)
    matches = fx.replace_pattern(traced, lambda x: torch.relu(torch.relu(x)), lambda x: torch.neg(x))
    assert len(matches) == 1
    assert sorted(str(target) for target in targets(traced)[1:3]) == sorted([str(torch.relu), str(torch.neg)])


def test_value_used_outside_the_pattern_prevents_the_match(fx: ModuleType) -> None:
    def program(x):
        inner = torch.relu(x)
        return torch.neg(inner) + inner

    traced = fx.symbolic_trace(program)
    assert fx.replace_pattern(traced, lambda x: torch.neg(torch.relu(x)), lambda x: x) == []


def test_literals_must_be_equal(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: (x + 1) * (x + 2))
    assert len(fx.replace_pattern(traced, lambda x: x + 2, lambda x: x - 2)) == 1
    assert targets(traced) == ["x", operator.add, operator.sub, operator.mul, "output"]


def test_pattern_with_two_inputs_used_twice(fx: ModuleType) -> None:
    def program(x, y):
        return torch.neg(x) + torch.relu(y)

    traced = fx.symbolic_trace(program)
    matches = fx.replace_pattern(traced, lambda x, y: torch.neg(x) + torch.relu(y), lambda x, y: torch.relu(x))
    assert len(matches) == 1
    assert targets(traced) == ["x", "y", torch.relu, "output"]


def test_same_input_twice_must_be_the_same_value(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x, y: (x * y, x * x))
    assert len(fx.replace_pattern(traced, lambda a: a * a, lambda a: a**2)) == 1
    assert targets(traced).count(operator.mul) == 1


def test_method_and_function_patterns_are_different(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: x.relu())
    assert fx.replace_pattern(traced, lambda x: x.relu(), lambda x: x.neg())
    assert targets(traced) == ["x", "neg", "output"]


def test_keyword_arguments_take_part(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: (functional.dropout(x, p=0.5), functional.dropout(x, p=0.1)))
    matches = fx.replace_pattern(traced, lambda x: functional.dropout(x, p=0.5), lambda x: torch.neg(x))
    assert len(matches) == 1


def test_pattern_at_the_output(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: torch.relu(x))
    fx.replace_pattern(traced, lambda x: torch.relu(x), lambda x: torch.sigmoid(torch.neg(x)))
    assert targets(traced) == ["x", torch.neg, torch.sigmoid, "output"]
    traced.graph.lint()


def test_pattern_with_several_results(fx: ModuleType) -> None:
    def program(x):
        a = torch.relu(x)
        b = torch.sigmoid(x)
        return a + b

    def pattern(x):
        return torch.relu(x), torch.sigmoid(x)

    def replacement(x):
        return torch.neg(x), torch.abs(x)

    traced = fx.symbolic_trace(program)
    assert len(fx.replace_pattern(traced, pattern, replacement)) == 1
    assert traced(torch.tensor(-3.0)).item() == 6.0


def test_modules_as_pattern_and_replacement(fx: ModuleType) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.relu = nn.ReLU()

        def forward(self, x):
            return self.relu(self.linear(x)) + 1

    class Pattern(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.relu = nn.ReLU()

        def forward(self, x):
            return self.relu(self.linear(x))

    class Replacement(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(3, 3)

        def forward(self, x):
            return torch.tanh(self.other(x))

    traced = fx.symbolic_trace(Model())
    new = Replacement()
    matches = fx.replace_pattern(traced, fx.symbolic_trace(Pattern()), fx.symbolic_trace(new))
    assert len(matches) == 1
    assert sorted(name for name, _ in traced.named_children()) == ["other"]
    x = torch.rand(1, 3)
    assert torch.equal(traced(x), new(x) + 1)


def test_get_attr_in_the_replacement_is_copied_over(fx: ModuleType) -> None:
    class Replacement(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((1,), 5.0))

        def forward(self, x):
            return x * self.weight

    traced = fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    fx.replace_pattern(traced, lambda x: torch.relu(x), fx.symbolic_trace(Replacement()))
    assert traced(torch.tensor([2.0])).item() == 11.0


def test_filters_choose_among_matches(fx: ModuleType) -> None:
    def program(x):
        return torch.relu(x) + torch.relu(torch.neg(x))

    def input_is_placeholder(match, original_graph, pattern_graph):
        assert isinstance(original_graph, fx.Graph)
        assert isinstance(pattern_graph, fx.Graph)
        return all(node.op == "placeholder" for node in match.placeholder_nodes)

    traced = fx.symbolic_trace(program)
    replaced = fx.subgraph_rewriter.replace_pattern_with_filters(
        traced, lambda x: torch.relu(x), lambda x: torch.abs(x), [input_is_placeholder]
    )
    assert len(replaced) == 1
    assert targets(traced).count(torch.relu) == 1
    assert targets(traced).count(torch.abs) == 1


def test_result_with_filters_tells_the_new_nodes(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    (replaced,) = fx.subgraph_rewriter.replace_pattern_with_filters(
        traced, lambda x: torch.relu(x), lambda x: torch.neg(torch.abs(x))
    )
    assert isinstance(replaced, fx.subgraph_rewriter.ReplacedPatterns)
    assert [node.target for node in replaced.replacements] == [torch.abs, torch.neg]
    assert replaced.anchor.name == "relu"
    assert len(replaced.nodes_map) == 2


def test_literals_can_be_ignored(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: (x + 1) * (x + 2))
    replaced = fx.subgraph_rewriter.replace_pattern_with_filters(
        traced, lambda x: x + 0, lambda x: x - 1, ignore_literals=True
    )
    assert len(replaced) == 2
    assert operator.add not in targets(traced)


def test_replacement_can_be_made_from_the_match(fx: ModuleType) -> None:
    def program(x):
        return functional.relu(x, inplace=False) + 7

    def pattern(x):
        return x + 7

    def make(match, original_graph, pattern_graph):
        replacement = fx.Graph()
        x = replacement.placeholder("x")
        replacement.output(replacement.call_function(operator.mul, (x, len(match.nodes_map))))
        return replacement

    traced = fx.symbolic_trace(program)
    fx.subgraph_rewriter.replace_pattern_with_filters(traced, pattern, replacement_callback=make)
    (product,) = traced.graph.find_nodes(op="call_function", target=operator.mul)
    assert product.args[1] == 2


def test_graphs_are_accepted(fx: ModuleType) -> None:
    pattern = fx.symbolic_trace(lambda x: torch.relu(x)).graph
    replacement = fx.symbolic_trace(lambda x: torch.neg(x)).graph
    traced = fx.symbolic_trace(lambda x: torch.relu(x))
    assert len(fx.subgraph_rewriter.replace_pattern_with_filters(traced, pattern, replacement)) == 1
    assert targets(traced) == ["x", torch.neg, "output"]


def test_replacement_must_take_the_same_inputs(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: torch.relu(x))
    with pytest.raises(Exception):  # noqa: B017
        fx.replace_pattern(traced, lambda x: torch.relu(x), lambda x, y: x + y)
