"""The same programs, patterns and replacements given to torch.fx and to torchgraft: both must find and leave the same.
Where torchgraft does better on purpose, see `test_matching.py` and `test_placement.py`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.fx
import torch.fx.subgraph_rewriter
from torch import nn
from torch.nn import functional

import torchgraft
import torchgraft.subgraph_rewriter


@dataclass
class Example:
    name: str
    program: Callable[..., Any]
    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    matches: int
    options: dict[str, Any] = field(default_factory=dict)


def residual(x, y):
    inner = torch.relu(x)
    return torch.neg(inner) + inner * y


def relu_and_neg(x):
    inner = torch.relu(x)
    return inner, torch.neg(inner)


def relu_and_sum_with(x, y):
    inner = torch.relu(x)
    return inner, inner + y


aten = torch.ops.aten
plus = lambda a, b: torch.add(a, b)
times = lambda a, b: torch.mul(a, b)
negated = lambda a: torch.neg(a)
NAN = float("nan")

EXAMPLES = [
    Example("nothing to find", lambda x, y: x + y, lambda a: torch.relu(a), lambda a: a, 0),
    Example("one call", lambda x, y: torch.relu(x) + y, lambda a: torch.relu(a), lambda a: torch.neg(a), 1),
    Example(
        "two calls, two places",
        lambda x, y: torch.neg(torch.relu(x)) * torch.neg(torch.relu(y)),
        lambda a: torch.neg(torch.relu(a)),
        lambda a: torch.sigmoid(a),
        2,
    ),
    Example(
        "matches that feed each other",
        lambda x, y: torch.relu(torch.relu(torch.relu(x))) + y,
        lambda a: torch.relu(a),
        lambda a: torch.neg(torch.exp(a)),
        3,
    ),
    Example(
        "overlapping matches",
        lambda x, y: torch.relu(torch.relu(torch.relu(torch.relu(torch.relu(x))))) + y,
        lambda a: torch.relu(torch.relu(a)),
        lambda a: torch.neg(a),
        2,
    ),
    Example("a list argument", lambda x, y: torch.cat([x, y]).sum(), lambda a, b: torch.cat([a, b]), plus, 1),
    Example("a list of another length", lambda x, y: torch.cat([x, y, x]), lambda a, b: torch.cat([a, b]), plus, 0),
    Example(
        "an input bound to a list",
        lambda x, y: torch.cat([x, y], 1),
        lambda a, b: torch.cat(a, b),
        lambda a, b: torch.concat(a, b),
        1,
    ),
    Example("an input bound to literals", lambda x, y: torch.add(x, 3) * torch.add(y, 4), plus, times, 2),
    Example("the inputs in another order", lambda x, y: x - y, lambda a, b: a - b, lambda a, b: b - a, 1),
    Example("one input used twice", lambda x, y: (x * x) + (x * y), lambda a: a * a, lambda a: a + 1, 1),
    Example("two inputs, one node", lambda x, y: torch.add(x, x) + torch.add(x, y), plus, times, 1),
    Example(
        "two inputs, one node given by keyword",
        lambda x, y: torch.add(x, other=x),
        lambda a, b: torch.add(a, other=b),
        times,
        0,
    ),
    Example(
        "two inputs, one literal",
        lambda x, y: torch.clamp(x, 1, 1) + y,
        lambda a, low, high: torch.clamp(a, low, high),
        lambda a, low, high: a,
        1,
    ),
    Example(
        "two inputs, equal lists",
        lambda x, y: torch.movedim(x, [0, 1], [0, 1]) + y,
        lambda a, b, c: torch.movedim(a, b, c),
        lambda a, b, c: torch.neg(a),
        1,
    ),
    Example(
        "two results never read one node by two inputs",
        lambda x, y: torch.relu(x) + torch.neg(x) + torch.relu(y) + torch.neg(y),
        lambda a, b: (torch.relu(a), torch.neg(b)),
        lambda a, b: (torch.sin(a), torch.cos(b)),
        2,
    ),
    Example(
        "results that all read one node",
        lambda x, y: torch.relu(x) + torch.neg(x) + y,
        lambda a, b: (torch.relu(a), torch.neg(b)),
        lambda a, b: (a, b),
        0,
    ),
    Example("other literals", lambda x, y: (x + 1) * (y + 2), lambda a: a + 2, lambda a: a - 2, 1),
    Example("1 is not 1.0", lambda x, y: (x + 1) * (y + 1.0), lambda a: a + 1.0, lambda a: a - 2, 1),
    Example(
        "literals ignored",
        lambda x, y: (x + 1) * (y + 2),
        lambda a: a + 3,
        lambda a: a - 2,
        2,
        {"ignore_literals": True},
    ),
    Example(
        "a node where a literal is ignored", plus, lambda a: torch.add(a, 1), negated, 1, {"ignore_literals": True}
    ),
    Example(
        "keyword arguments",
        lambda x, y: torch.sum(x, dim=1, keepdim=True) + torch.sum(y, dim=0, keepdim=True),
        lambda a: torch.sum(a, dim=1, keepdim=True),
        lambda a: torch.mean(a, 1, True),
        1,
    ),
    Example(
        "keyword arguments in another order",
        lambda x, y: torch.sum(x, keepdim=True, dim=1),
        lambda a: torch.sum(a, dim=1, keepdim=True),
        negated,
        0,
    ),
    Example(
        "keyword arguments of overloads in another order",
        lambda x, y: aten.sum.dim_IntList(x, keepdim=True, dim=[1]),
        lambda a: aten.sum.dim_IntList(a, dim=[1], keepdim=True),
        negated,
        1,
    ),
    Example("nan equals nothing", lambda x, y: x + NAN, lambda a: a + NAN, negated, 0),
    Example("nan ignored", lambda x, y: x + NAN, lambda a: a + NAN, negated, 1, {"ignore_literals": True}),
    Example("positional is not keyword", lambda x, y: torch.sum(x, 1), lambda a: torch.sum(a, dim=1), negated, 0),
    Example(
        "slices", lambda x, y: x[1:3, ..., None] + 1, lambda a: a[1:3, ..., None], lambda a: a.unsqueeze(-1)[1:3], 1
    ),
    Example("other slices", lambda x, y: x[1:3] + 1, lambda a: a[1:2], negated, 0),
    Example("other slices ignored", lambda x, y: x[1:3] + 1, lambda a: a[1:2], negated, 1, {"ignore_literals": True}),
    Example("nodes in slices", lambda x, y: x[: y.size(0)], lambda a, n: a[:n], lambda a, n: a, 0),
    Example("methods", lambda x, y: x.relu().sum(1) + y, lambda a: a.relu(), lambda a: a.sigmoid(), 1),
    Example("methods are not functions", lambda x, y: x.relu(), lambda a: torch.relu(a), lambda a: a.sigmoid(), 0),
    Example("the whole program", lambda x, y: torch.relu(x) + y, lambda a, b: torch.relu(a) + b, times, 1),
    Example("an input left unused", lambda x, y: torch.relu(x) + y, lambda a, b: torch.relu(a) + b, lambda a, b: b, 1),
    Example("an input returned", lambda x, y: torch.relu(torch.relu(x)) + y, lambda a: torch.relu(a), lambda a: a, 2),
    Example("a value used outside", residual, lambda a: torch.neg(torch.relu(a)), negated, 0),
    Example("a value used outside but returned", residual, relu_and_neg, lambda a: (torch.exp(a), torch.sin(a)), 1),
    Example("one value for two results", residual, relu_and_neg, lambda a: (torch.exp(a),) * 2, 1),
    Example(
        "a value used where a literal is ignored",
        lambda x, y: (lambda inner: torch.mul(torch.add(inner, 1), inner))(torch.relu(x)),
        lambda a: torch.mul(torch.add(torch.relu(a), 1), 2),
        negated,
        1,
        {"ignore_literals": True},
    ),
    Example(
        "a value used outside where literals are ignored",
        lambda x, y: (lambda inner: torch.mul(torch.add(inner, 1), 3) + inner)(torch.relu(x)),
        lambda a: torch.mul(torch.add(torch.relu(a), 1), 2),
        negated,
        0,
        {"ignore_literals": True},
    ),
    Example("an input that depends on the match", residual, relu_and_sum_with, lambda a, b: (a, b), 0),
    Example(
        "several results of one input",
        lambda x, y: (lambda z, w: (x @ y) + (x @ z) * (x @ w))(y.t(), y + 1),
        lambda a, b, c, d: (a @ b, a @ c, a @ d),
        lambda a, b, c, d: (a * b, a * c, a * d),
        1,
    ),
    Example(
        "two results, nothing shared",
        lambda x, y: torch.relu(x) * torch.neg(y),
        lambda a, b: (torch.relu(a), torch.neg(b)),
        lambda a, b: (torch.sin(a), torch.cos(b)),
        1,
    ),
    Example(
        "overloads with defaults spelled out",
        lambda x, y: aten.add.Tensor(x, y, alpha=1),
        lambda a, b: aten.add.Tensor(a, b),
        lambda a, b: aten.mul.Tensor(a, b),
        1,
    ),
    Example(
        "overloads with another value than the default",
        lambda x, y: aten.add.Tensor(x, y, alpha=2),
        lambda a, b: aten.add.Tensor(a, b),
        lambda a, b: aten.mul.Tensor(a, b),
        0,
    ),
    Example(
        "a node chosen by name",
        lambda x, y: torch.relu(torch.sigmoid(x)) + y,
        lambda a: torch.neg(a),
        lambda a: torch.tanh(a),
        1,
        {"node_name_match": "relu"},
    ),
    Example(
        "matches chosen by a filter",
        lambda x, y: torch.relu(x) + torch.relu(torch.neg(y)),
        lambda a: torch.relu(a),
        lambda a: torch.tanh(a),
        1,
        {"match_filters": [lambda match, graph, pattern: match.placeholder_nodes[0].op == "placeholder"]},
    ),
    Example(
        "a match that a filter refuses keeps its nodes",
        lambda x, y: torch.relu(torch.relu(torch.relu(torch.relu(torch.relu(x))))) + y,
        lambda a: torch.relu(torch.relu(a)),
        negated,
        1,
        {"match_filters": [lambda match, graph, pattern: match.placeholder_nodes[0].op != "placeholder"]},
    ),
    Example(
        "functional with in-place switch",
        lambda x, y: functional.relu(x, inplace=False) + y,
        lambda a: functional.relu(a, inplace=False),
        lambda a: functional.gelu(a),
        1,
    ),
    Example(
        "a nested tuple of results",
        lambda x, y: torch.relu(x) * y,
        lambda a: (torch.relu(a),),
        lambda a: (torch.sin(a),),
        1,
    ),
    Example("operators", lambda x, y: -(x + y) * y, lambda a, b: -(a + b), times, 1),
]


def run(library, example: Example) -> tuple[Any, list[Any]]:
    traced = library.symbolic_trace(example.program)
    rewriter = library.subgraph_rewriter
    replaced = rewriter.replace_pattern_with_filters(traced, example.pattern, example.replacement, **example.options)
    traced.graph.lint()
    return traced, replaced


def calls(module) -> Counter:
    return Counter((node.op, node.target) for node in module.graph.nodes if node.op.startswith("call"))


def names(nodes_map) -> list[tuple[str, Any]]:
    return [(node.name, getattr(value, "op", None)) for node, value in nodes_map.items()]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_same_matches_and_same_program(example: Example) -> None:
    theirs, their_matches = run(torch.fx, example)
    ours, our_matches = run(torchgraft, example)
    assert len(our_matches) == len(their_matches) == example.matches
    assert calls(ours) == calls(theirs)
    for our, their in zip(our_matches, their_matches, strict=True):
        assert our.anchor.name == their.anchor.name
        assert names(our.nodes_map) == names(their.nodes_map)
        assert [node.target for node in our.replacements] == [node.target for node in their.replacements]
    inputs = torch.rand(4, 4), torch.rand(4, 4)
    assert torch.equal(torch.nan_to_num(ours(*inputs)), torch.nan_to_num(theirs(*inputs)))


def test_same_code_where_the_result_is_used_next() -> None:
    example = Example(
        "",
        lambda x, y: torch.neg(torch.relu(torch.neg(torch.relu(x)))) + y,
        lambda a: torch.neg(torch.relu(a)),
        lambda a: torch.sigmoid(a) * 2,
        2,
    )
    assert run(torchgraft, example)[0].code.split() == run(torch.fx, example)[0].code.split()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x):
        return self.norm(self.linear(x)) * self.scale


class LinearThenNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.linear(x))


class LinearThenGelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.rand(4))
        self.activation = nn.Sequential(nn.GELU(), nn.Linear(4, 4))

    def forward(self, x):
        return self.activation(self.linear(x)) + self.shift


@pytest.mark.parametrize("traced_first", [True, False])
def test_modules_keep_replace_and_bring_their_parts(traced_first: bool) -> None:
    torch.manual_seed(0)
    model, pattern, replacement = Layers(), LinearThenNorm(), LinearThenGelu()
    results = []
    for library in (torch.fx, torchgraft):
        traced = library.symbolic_trace(model)
        prepare = library.symbolic_trace if traced_first else lambda module: module
        matches = library.subgraph_rewriter.replace_pattern(traced, prepare(pattern), prepare(replacement))
        assert len(matches) == 1
        results.append(traced)
    theirs, ours = results
    assert {name for name, _ in ours.named_modules()} == {name for name, _ in theirs.named_modules()}
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert "norm" not in dict(ours.named_children())
    assert ours.linear is model.linear  # a name that both have means the program's own module
    x = torch.rand(2, 4)
    assert torch.equal(ours(x), theirs(x))


def test_attributes_match_whatever_their_value() -> None:
    class Shifted(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.full((4,), value))

        def forward(self, x):
            return torch.add(x, self.shift)

    for library in (torch.fx, torchgraft):
        traced = library.symbolic_trace(Shifted(1.0))
        pattern = library.symbolic_trace(Shifted(2.0))
        assert len(library.subgraph_rewriter.replace_pattern(traced, pattern, lambda x: torch.neg(x))) == 1
        assert torch.equal(traced(torch.ones(4)), -torch.ones(4))


def test_replacement_callback_sees_the_same() -> None:
    def program(x, y):
        return torch.add(x, 2) * torch.add(y, 3)

    for library in (torch.fx, torchgraft):
        seen = []

        def make(match, graph, pattern_graph, library=library, seen=seen):
            seen.append((match.placeholder_nodes[1], [node.name for node in match.returning_nodes]))
            amount = match.placeholder_nodes[1]
            result = library.Graph()
            x, _ = result.placeholder("x"), result.placeholder("amount")
            for _ in range(amount):
                x = result.call_function(torch.neg, (x,))
            result.output(x)
            return result

        traced = library.symbolic_trace(program)
        replaced = library.subgraph_rewriter.replace_pattern_with_filters(traced, plus, replacement_callback=make)
        assert seen == [(2, ["add"]), (3, ["add_1"])]
        assert [len(each.replacements) for each in replaced] == [2, 3]
        assert traced(torch.tensor(2.0), torch.tensor(5.0)) == -10
