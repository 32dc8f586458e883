"""Random programs through NetworkX: shuffled, renamed and written to files, they compute the same."""

from __future__ import annotations

import operator
import random

import networkx as nx
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchgraft
from torchgraft.view.graph_files import _READERS, _WRITERS

UNARY = [torch.relu, torch.neg, torch.sin, torch.abs]
BINARY = [operator.add, operator.mul, torch.maximum, torch.sub]


@st.composite
def programs(draw) -> torchgraft.GraphModule:
    """A program of functions, methods, submodules, lists and writes in place, over values of one shape."""
    graph = torchgraft.Graph()
    values = [graph.placeholder("x"), graph.placeholder("y"), graph.get_attr("weight")]
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.integers(0, 5))
        first, second = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        if kind == 0:
            values.append(graph.call_function(draw(st.sampled_from(UNARY)), (first,)))
        elif kind == 1:
            values.append(graph.call_function(draw(st.sampled_from(BINARY)), (first, second)))
        elif kind == 2:
            values.append(graph.call_module("layer", (first,)))
        elif kind == 3:
            values.append(graph.call_method("clamp", (first,), {"max": second}))
        elif kind == 4:
            stacked = graph.call_function(torch.stack, ([first, second, first],), {"dim": 0})
            values.append(graph.call_method("sum", (stacked, 0)))
        else:
            copied = graph.call_method("clone", (first,))
            graph.call_method("add_", (copied, 1.5))
            values.append(copied)
    graph.output((values[-1], {"other": draw(st.sampled_from(values))}))
    root = {"weight": nn.Parameter(torch.full((2, 2), 0.5)), "layer": nn.Linear(2, 2)}
    return torchgraft.GraphModule(root, graph)


@settings(max_examples=60)
@given(programs(), st.integers(0, 2**32), st.sampled_from(["pickle", "graphml", "json"]))
def test_shuffled_renamed_and_filed(program, seed: int, format: str) -> None:
    graph = _READERS[format](_WRITERS[format](torchgraft.to_networkx(program)))
    shuffled = nx.MultiDiGraph(**graph.graph)
    dice = random.Random(seed)
    shuffled.add_nodes_from(dice.sample(list(graph.nodes(data=True)), len(graph)))
    edges = list(graph.edges(keys=True, data=True))
    shuffled.add_edges_from(dice.sample(edges, len(edges)))
    renamed = nx.relabel_nodes(shuffled, {name: f"node_{number}" for number, name in enumerate(shuffled)})
    inputs = torch.tensor([[1.0, -2.0], [0.5, 3.0]]), torch.tensor([[-1.0, 2.0], [0.25, 0.0]])
    wanted = program(*inputs)
    for root in (program, dict(program.named_parameters()) | dict(program.named_modules())):
        found = torchgraft.from_networkx(renamed, root)(*inputs)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert not torchgraft.diff(program, torchgraft.from_networkx(renamed, program))
