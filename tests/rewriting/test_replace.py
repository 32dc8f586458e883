"""What comes with a replacement: its modules, parameters and constants, its metadata, its results; and what is refused.
Which places match is in `test_matching.py`.
"""

import copy
import pickle

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft import subgraph_rewriter
from torchgraft.errors import GraphAttributeError, GraphError
from torchgraft.rewriting import Match, ReplacedPatterns, replace_pattern, replace_pattern_with_filters


def relu(a):
    return torch.relu(a)


def traced_relu() -> torchgraft.GraphModule:
    return torchgraft.symbolic_trace(lambda x: torch.relu(x) + 1)


def test_names_are_found_where_torch_fx_has_them() -> None:
    for name in ("Match", "ReplacedPatterns", "replace_pattern", "replace_pattern_with_filters"):
        assert getattr(subgraph_rewriter, name) is getattr(torchgraft.rewriting, name)
    assert Match._fields == ("anchor", "nodes_map")
    assert list(ReplacedPatterns.__dataclass_fields__) == ["anchor", "nodes_map", "replacements"]


# ---- the module stays a module ----


def test_the_next_call_runs_the_new_program() -> None:
    traced = traced_relu()
    assert traced(torch.tensor(-2.0)) == 1
    replace_pattern(traced, relu, lambda a: torch.neg(a))
    assert traced(torch.tensor(-2.0)) == 3


def test_the_result_can_be_edited_copied_and_pickled() -> None:
    traced = traced_relu()
    (replaced,) = replace_pattern_with_filters(traced, relu, lambda a: torch.neg(torch.abs(a)))
    traced.graph.lint()
    x = torch.tensor(-2.0)
    for module in (copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        assert module(x) == -1
    replaced.replacements[0].target = torch.sin
    assert traced(x) == 1 - torch.sin(x)


def test_hooks_hear_of_every_edit() -> None:
    traced = traced_relu()
    created, erased, rewired = [], [], []
    traced._register_create_node_hook(lambda node: created.append(node.name))
    traced._register_erase_node_hook(lambda node: erased.append(node.name))
    traced._register_replace_node_hook(lambda old, new, user: rewired.append((old.name, new, user.name)))
    replace_pattern(traced, relu, lambda a: torch.neg(a))
    assert (created, erased, rewired) == (["neg"], ["relu"], [("relu", "neg", "add")])


# ---- attributes ----


class Scale(nn.Module):
    def __init__(self, value: float = 3.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(value))
        self.register_buffer("offset", torch.tensor(1.0))
        self.register_buffer("scratch", torch.tensor(0.0), persistent=False)

    def forward(self, x):
        return x * self.factor + self.offset + self.scratch


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.scale = Scale()

    def forward(self, x):
        return self.inner.scale(x)


def test_parameters_and_buffers_come_along_as_what_they_are() -> None:
    traced, replacement = traced_relu(), Scale()
    replace_pattern(traced, relu, replacement)
    assert set(dict(traced.named_parameters())) == {"factor"}
    assert set(traced.state_dict()) == {"factor", "offset"}
    assert traced.factor is not replacement.factor  # a copy, as in torch.fx
    assert traced(torch.tensor(2.0)) == 8


def test_nested_names_come_along() -> None:
    traced = traced_relu()
    replace_pattern(traced, relu, Outer())
    assert "inner.scale.factor" in traced.state_dict()
    assert traced(torch.tensor(2.0)) == 8
    traced.graph.lint()


def test_copies_share_what_was_shared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.second = nn.Linear(2, 2)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x))

    traced = traced_relu()
    replace_pattern(traced, relu, Tied())
    assert traced.first.weight is traced.second.weight


def test_the_programs_own_attribute_goes_before() -> None:
    traced = torchgraft.symbolic_trace(Scale(5.0))
    replace_pattern(traced, lambda a, b: a * b, Scale2())
    assert traced.factor == 5
    assert traced(torch.tensor(1.0)) == 7


class Scale2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x, y):
        return x + self.factor + y * 0


def test_modules_no_longer_used_go() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    traced = torchgraft.symbolic_trace(model)
    pattern = torchgraft.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert len(replace_pattern(traced, pattern, Scale())) == 1
    assert dict(traced.named_children()) == {}
    assert len(model) == 2


TWO_AND_THREE = torch.tensor([2.0, 3.0])
ONES = torch.ones(2)
FIVES = torch.full((2,), 5.0)


def test_constants_of_functions_come_along() -> None:
    """torch.fx leaves a reference to an attribute that is not there."""
    traced = traced_relu()
    replace_pattern(traced, relu, lambda a: a * TWO_AND_THREE)
    assert torch.equal(traced(torch.ones(2)), torch.tensor([3.0, 4.0]))
    assert traced.state_dict() == {}


def test_constants_of_the_same_name_are_told_apart() -> None:
    traced = torchgraft.symbolic_trace(lambda x: torch.relu(x) + ONES)
    replace_pattern(traced, relu, lambda a: a * TWO_AND_THREE)
    assert torch.equal(traced(torch.ones(2)), torch.tensor([3.0, 4.0]))
    replace_pattern(traced, lambda a, b: a * b, lambda a, b: a * b * FIVES)
    assert torch.equal(traced(torch.ones(2)), torch.tensor([11.0, 16.0]))
    traced.graph.lint()


def test_equal_constants_are_one() -> None:
    traced = torchgraft.symbolic_trace(lambda x: torch.relu(torch.relu(x)))
    replace_pattern(traced, relu, lambda a: a * TWO_AND_THREE)
    assert len(list(traced.buffers())) == 1
    assert torch.equal(traced(torch.ones(2)), torch.tensor([4.0, 9.0]))


def test_constants_chosen_for_each_match() -> None:
    traced = torchgraft.symbolic_trace(lambda x: torch.add(torch.add(x, 1), 2))

    def shifted_by(match, graph, pattern):
        amount = torch.tensor(float(match.placeholder_nodes[1]) * 10)
        return torchgraft.symbolic_trace(lambda a, b: a + amount).graph

    replace_pattern_with_filters(traced, lambda a, b: torch.add(a, b), replacement_callback=shifted_by)
    assert traced(torch.tensor(0.0)) == 30
    traced.graph.lint()


def test_attribute_that_nobody_has() -> None:
    graph = torchgraft.Graph()
    graph.output(graph.call_module("nowhere.norm", (graph.placeholder("a"),)))
    traced = traced_relu()
    before = traced.code
    with pytest.raises(
        GraphAttributeError, match="names 'nowhere.norm', which neither the program nor the replacement"
    ):
        replace_pattern(traced, relu, graph)
    assert traced.code == before


# ---- metadata ----


def test_new_nodes_come_from_the_same_line_and_module() -> None:
    class Inner(nn.Module):
        def forward(self, x):
            return torch.neg(torch.relu(x))  # the line that counts

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x) + 1

    for look_first in (False, True):
        traced = torchgraft.symbolic_trace(Model())
        replacement = torchgraft.symbolic_trace(lambda a: torch.sin(torch.cos(a)))
        if look_first:  # metadata is made when somebody looks
            assert all(node.meta is not None for module in (traced, replacement) for node in module.graph.nodes)
        (replaced,) = replace_pattern_with_filters(traced, lambda a: torch.neg(torch.relu(a)), replacement)
        assert len(replaced.replacements) == 2
        for node in replaced.replacements:
            assert "# the line that counts" in node.stack_trace
            assert [path for path, _ in node.meta["nn_module_stack"].values()][-1] == "inner"


def test_metadata_of_the_replacement_stays() -> None:
    replacement = torchgraft.symbolic_trace(lambda a: torch.neg(a))
    for node in replacement.graph.nodes:
        node.meta["note"] = node.name
    traced = traced_relu()
    (replaced,) = replace_pattern_with_filters(traced, relu, replacement)
    (new,) = replaced.replacements
    assert new.meta["note"] == "neg"
    assert "torch.relu(x) + 1" in new.stack_trace
    new.meta["note"] = "changed"
    assert [node.meta["note"] for node in replacement.graph.nodes] == ["a", "neg", "output"]


# ---- results ----


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (lambda a: {"first": torch.relu(a), "second": torch.neg(a)}, lambda a: {"first": a + 1, "second": a + 2}),
        (lambda a: [torch.relu(a), torch.neg(a)], lambda a: (a + 1, a + 2)),
        (lambda a: (torch.relu(a), (torch.neg(a), 3)), lambda a: (a + 1, (a + 2, 3))),
    ],
)
def test_results_in_any_container(pattern, replacement) -> None:
    traced = torchgraft.symbolic_trace(lambda x: torch.relu(x) * torch.neg(x))
    assert len(replace_pattern(traced, pattern, replacement)) == 1
    assert traced(torch.tensor(1.0)) == 6


def test_one_result_returned_twice() -> None:
    def pattern(a):
        result = torch.relu(a)
        return result, result

    for replacement in (lambda a: (a * 2,) * 2, lambda a: a * 2):
        traced = traced_relu()
        assert len(replace_pattern(traced, pattern, replacement)) == 1
        assert traced(torch.tensor(-1.0)) == -1
    with pytest.raises(
        GraphError, match="the pattern returns 'relu' twice, the replacement returns add and add_1 for it"
    ):
        replace_pattern(traced_relu(), pattern, lambda a: (a + 1, a + 2))


def test_a_replacement_that_is_a_constant() -> None:
    traced = traced_relu()
    assert len(replace_pattern(traced, relu, lambda a: 5)) == 1
    assert traced(torch.tensor(1.0)) == 6


def test_a_replacement_that_is_a_bound_literal_or_list() -> None:
    traced = torchgraft.symbolic_trace(lambda x, y: torch.stack(torch.broadcast_tensors([x, y])) + torch.add(x, 7))
    replace_pattern(traced, lambda a: torch.broadcast_tensors(a), lambda a: a)
    replace_pattern(traced, lambda a, b: torch.add(a, b), lambda a, b: b)
    traced.graph.lint()
    assert torch.equal(traced(torch.ones(2), torch.zeros(2)), torch.tensor([[8.0, 8.0], [7.0, 7.0]]))


@pytest.mark.parametrize(
    ("pattern", "replacement", "text"),
    [
        (relu, lambda a, b: a, r"the pattern has 1 \(a\), the replacement 2 \(a, b\)"),
        (relu, lambda a: (a, a), "the pattern returns 1 values, the replacement 2"),
        (relu, lambda a: None, "cannot replace 'relu' by None"),
        (relu, None, "either a replacement GraphModule or a replacement callback"),
        (lambda a: (a, torch.relu(a)), lambda a: (a + 1, a), "cannot replace the input 'a' that the pattern returns"),
        (relu, "neg", "cannot use 'neg' as a replacement: it is str"),
    ],
)
def test_replacements_that_do_not_fit(pattern, replacement, text: str) -> None:
    traced = traced_relu()
    before = traced.code
    with pytest.raises(GraphError, match=text):
        replace_pattern(traced, pattern, replacement)
    assert traced.code == before


def test_a_callback_that_fails_leaves_the_program_alone() -> None:
    traced = torchgraft.symbolic_trace(lambda x: torch.relu(torch.relu(x)))
    before = traced.code
    answers = iter([lambda a: a, lambda a, b: a])
    with pytest.raises(GraphError, match="cannot replace a pattern by something with other inputs"):
        replace_pattern_with_filters(traced, relu, replacement_callback=lambda *match: next(answers))
    assert traced.code == before


# ---- regions in the replacement ----


def test_a_replacement_with_a_region() -> None:
    def detached(a):
        with torch.no_grad():
            return torch.neg(a)

    traced = traced_relu()
    replace_pattern(traced, relu, detached)
    assert not traced(torch.ones(1, requires_grad=True)).requires_grad
    traced.graph.lint()
