"""Which nodes could notice that others moved past them, asked of small graphs directly.
That replacements are refused accordingly is in `test_placement.py`.
"""

import operator

import pytest
import torch

import torchgraft
from torchgraft.analysis.interference import Interference


def moved_past(build) -> bool:
    """`build` makes nodes and returns the region; everything after the region's first node is moved past."""
    graph = torchgraft.Graph()
    region = build(graph, graph.placeholder("x"), graph.placeholder("y"))
    graph.output(None)
    nodes = list(graph.nodes)
    positions = sorted(nodes.index(node) for node in region)
    return Interference(graph).between(positions[0], len(nodes) - 1, region)


def reads_while(write):
    """A region that reads `x` or a fresh value, and a write in between."""

    def build(graph, x, y):
        fresh = graph.call_function(torch.add, (x, 1))
        region = [graph.call_function(torch.relu, (fresh,))]
        write(graph, x, y, fresh)
        return region

    return build


@pytest.mark.parametrize(
    ("write", "noticed"),
    [
        (lambda graph, x, y, fresh: graph.call_function(torch.sin, (fresh,)), False),
        (lambda graph, x, y, fresh: graph.call_function(torch.rand, (3,)), False),
        (lambda graph, x, y, fresh: graph.call_method("add_", (fresh, 1)), True),
        (lambda graph, x, y, fresh: graph.call_method("add_", (x, 1)), False),
        (lambda graph, x, y, fresh: graph.call_method("add_", (y, fresh)), False),
        (lambda graph, x, y, fresh: graph.call_method("add_", (graph.call_method("view", (fresh, -1)), 1)), True),
        (lambda graph, x, y, fresh: graph.call_function(torch.relu_, (fresh,)), True),
        (lambda graph, x, y, fresh: graph.call_function(torch.sin, (x,), {"out": fresh}), True),
        (lambda graph, x, y, fresh: graph.call_function(operator.setitem, (fresh, 0, 1.0)), True),
        (lambda graph, x, y, fresh: graph.call_function(torch.ops.aten.add_.Tensor, (fresh, 1)), True),
        (lambda graph, x, y, fresh: graph.call_function(print, (y,)), True),
    ],
)
def test_reading_past_a_write(write, noticed: bool) -> None:
    assert moved_past(reads_while(write)) is noticed


def test_writing_past_a_read() -> None:
    def build(graph, x, y, reader):
        fresh = graph.call_function(torch.add, (x, 1))
        region = [graph.call_method("add_", (fresh, 1))]
        graph.call_function(torch.sin, (fresh if reader else x,))
        return region

    assert moved_past(lambda *arguments: build(*arguments, reader=True))
    assert not moved_past(lambda *arguments: build(*arguments, reader=False))


def test_a_list_shares_what_was_put_into_it() -> None:
    def build(graph, x, y):
        values = graph.call_function(list, ((),))
        fresh = graph.call_function(torch.add, (x, 1))
        graph.call_method("append", (values, fresh))
        region = [graph.call_function(torch.stack, (values,))]
        graph.call_method("add_", (fresh, 1))
        return region

    assert moved_past(build)


def test_a_tensor_can_be_made_to_share_another() -> None:
    def build(graph, x, y):
        first = graph.call_function(torch.add, (x, 1))
        second = graph.call_function(torch.add, (y, 1))
        graph.call_method("set_", (first, second))
        region = [graph.call_function(torch.relu, (first,))]
        graph.call_method("add_", (second, 1))
        return region

    assert moved_past(build)


def test_inputs_may_be_one_tensor() -> None:
    def build(graph, x, y):
        region = [graph.call_function(torch.relu, (x,))]
        graph.call_method("add_", (y, 1))
        return region

    assert moved_past(build)


@pytest.mark.parametrize("length", [10, 1_000])
def test_long_chains_of_perhaps(length: int) -> None:
    """`+` may join lists, so each sum may share memory with all before; that must stay quick, and on the safe side."""

    def build(graph, x, y):
        value = first = graph.call_function(list, ((),))
        for _ in range(length):
            value = graph.call_function(operator.add, (value, graph.call_function(list, ((),))))
        region = [graph.call_function(torch.stack, (value,))]
        graph.call_method("append", (first, 1))
        return region

    assert moved_past(build)


def test_too_many_writers_are_not_looked_at() -> None:
    def build(graph, x, y, count):
        fresh = graph.call_function(torch.sin, (x,))
        region = [graph.call_function(torch.relu, (x,))]
        for _ in range(count):
            graph.call_method("add_", (fresh, 1))
        return region

    assert not moved_past(lambda *arguments: build(*arguments, count=100))
    assert moved_past(lambda *arguments: build(*arguments, count=1_000))


class Tied(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        if kind == "tied":
            self.second.weight = self.first.weight
        elif kind == "view":
            del self.second.weight
            self.second.register_buffer("weight", self.first.weight.detach()[:2])
        elif kind == "module":
            self.second = self.first


@pytest.mark.parametrize(("kind", "noticed"), [("apart", False), ("tied", True), ("view", True), ("module", True)])
@pytest.mark.parametrize("reads", ["weight", "module"])
def test_state_is_one_under_two_names(kind: str, noticed: bool, reads: str) -> None:
    model = Tied(kind)
    graph = torchgraft.Graph(owning_module=model)
    x = graph.placeholder("x")
    weight = graph.get_attr("first.weight")
    other = graph.get_attr("second.weight")
    read = graph.call_function(torch.sin, (weight,)) if reads == "weight" else graph.call_module("first", (x,))
    graph.call_method("mul_", (other, 2))
    graph.output(read)
    nodes = list(graph.nodes)
    assert Interference(graph).between(nodes.index(read), len(nodes) - 1, [read]) is noticed


def test_a_replacement_stays_on_its_side_of_a_write_under_another_name() -> None:
    """The replacement would stand where the match ends: after the write of what it reads."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("first", torch.ones(3))
            self.register_buffer("second", self.first.view(3, 1))

        def forward(self, x):
            read = torch.sin(self.first)
            self.second.mul_(2)
            return torch.neg(read + x)

    program, x = torchgraft.symbolic_trace(Model()), torch.ones(3)
    assert not torchgraft.rewrite(program, lambda w, x: torch.neg(torch.sin(w) + x), lambda w, x: -x - torch.sin(w))
    assert torch.equal(program(x), -torch.sin(torch.ones(3)) - x)
