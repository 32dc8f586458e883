"""Lining programs up: pairs are one to one, and edits at random places are found."""

from __future__ import annotations

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchgraft import Graph, GraphModule, record
from torchgraft.recording.alignment import line_up

FUNCTIONS = [torch.sin, torch.sigmoid, torch.tanh, torch.neg, torch.abs]


def chain(choices: list[int]) -> GraphModule:
    graph = Graph()
    value = graph.placeholder("x")
    for choice in choices:
        value = graph.call_function(FUNCTIONS[choice], (value,))
    graph.output(value)
    return GraphModule({}, graph)


def values(program: GraphModule) -> dict:
    recording = record(program, torch.linspace(-1, 1, 7))
    return {recording.node(name): recording[name] for name in recording}


@given(st.lists(st.integers(0, 4), max_size=12), st.lists(st.integers(0, 4), max_size=12))
@settings(max_examples=60)
def test_pairs_are_one_to_one_and_in_order(first, second) -> None:
    one, two = values(chain(first)), values(chain(second))
    pairs = line_up(one, two)
    assert len({pair.first for pair in pairs}) == len({pair.second for pair in pairs}) == len(pairs)
    assert [pair.second for pair in pairs] == [node for node in two if node in {pair.second for pair in pairs}]
    assert (pairs[0].first.op, pairs[-1].first.op) == ("placeholder", "output")
    assert {pair.how for pair in pairs} <= {"name", "value", "structure", "position"}


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.data())
@settings(max_examples=60)
def test_a_renamed_copy_is_lined_up_completely(choices, data) -> None:
    program = chain(choices)
    other = copy.deepcopy(program)
    for number, node in enumerate(list(other.graph.nodes)[1:-1]):
        if data.draw(st.booleans()):
            node.name = f"renamed_{number}"
    one, two = values(program), values(other)
    pairs = line_up(one, two)
    assert len(pairs) == len(choices) + 2
    # Equal values have equal partners; which of several equal ones it is does not matter.
    assert all(torch.equal(one[pair.first], two[pair.second]) for pair in pairs)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=12), st.integers(0, 11), st.integers(0, 4))
@settings(max_examples=60)
def test_an_inserted_node_is_the_only_one_without_partner(choices, place, extra) -> None:
    place %= len(choices)
    one, two = values(chain(choices)), values(chain([*choices[:place], extra, *choices[place:]]))
    pairs = line_up(one, two)
    assert len(pairs) == len(choices) + 2
