"""Random programs (views, in-place writes, random draws, regions, shared modules), split in every way: the parts joined do
what eager does: results, gradients, state, random numbers, aliases.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchgraft
from tests.properties.strategies import Program, programs
from tests.properties.ways import compare, observed
from torchgraft.splitting import Size, Split, Stages, Supported, split, split_module
from torchgraft.splitting.balance import balanced_cuts
from torchgraft.splitting.order import Order


def check(program: Program, cut: Any) -> None:
    seen = observed(program)
    if seen is None:
        return
    expected, module, model = seen
    found = cut(module)
    if found is None:
        return
    result = found.module if isinstance(found, Split) else found
    result.graph.lint()
    for part in result.children():
        if isinstance(part, torchgraft.GraphModule):
            part.graph.lint()
    compare(expected, result, result, model, program, "split")
    if isinstance(found, Split):
        calls = Order(module.graph).calls
        assert sorted(node for part in found.parts for node in part.nodes) == sorted(node.name for node in calls)
        assert all(found.reasons[node.name] for node in calls)
        str(found)


@given(programs(), st.integers(1, 5))
@settings(max_examples=80)
def test_by_size(program: Program, size: int) -> None:
    check(program, lambda module: split(module, by=Size(size)))


@given(programs(), st.integers(0, 2**32), st.integers(1, 4))
@settings(max_examples=150)
def test_by_predicate(program: Program, seed: int, min_size: int) -> None:
    chance = random.Random(seed)

    def cut(module: Any) -> Split:
        found = split(module, by=Supported(lambda node: chance.random() < 0.6, min_size))
        assert all(len(part.nodes) >= min_size for part in found.parts if part.supported)
        kinds = [part.supported for part in found.parts]
        assert all(first != second for first, second in itertools.pairwise(kinds))
        return found

    check(program, cut)


@given(programs(), st.integers(1, 4))
@settings(max_examples=60)
def test_by_cost(program: Program, count: int) -> None:
    def cut(module: Any) -> Split:
        return split(module, by=Stages(max(1, min(count, len(Order(module.graph).units)))))

    check(program, cut)


@given(programs(), st.integers(1, 4), st.integers(0, 2**32), st.booleans())
@settings(max_examples=150)
def test_split_module_at_random(program: Program, count: int, seed: int, keep: bool) -> None:
    """Any assignment either is refused because parts wait for each other, or computes the same."""
    chance = random.Random(seed)

    def cut(module: Any) -> Any:
        try:
            return split_module(module, None, lambda node: chance.randrange(count), keep_original_order=keep)
        except torchgraft.GraphError as error:
            assert "cycle exists between partitions" in str(error)
            return None

    check(program, cut)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=10), st.integers(1, 6))
def test_balanced_cuts_are_the_best(weights: list[int], count: int) -> None:
    count = min(count, len(weights))

    def heaviest(cuts: Any) -> int:
        bounds = [0, *cuts, len(weights)]
        assert all(a < b for a, b in itertools.pairwise(bounds))
        return max(sum(weights[a:b]) for a, b in itertools.pairwise(bounds))

    best = min(heaviest(cuts) for cuts in itertools.combinations(range(1, len(weights)), count - 1))
    assert heaviest(balanced_cuts(weights, count)) == best
    assert heaviest(balanced_cuts(weights, count, [place % 3 for place in range(len(weights) + 1)])) == best


def test_a_thousand_parts() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(1000):
            x = torch.sin(torch.cos(x))
        return x

    module = torchgraft.symbolic_trace(chain)
    found = split(module, by=lambda node: node.target is torch.sin)
    assert len(found.parts) == 2000
    assert torch.equal(found.module(torch.ones(2)), module(torch.ones(2)))
    assert len(split(module, by=lambda node: node.target is torch.sin, min_size=2).parts) == 1
