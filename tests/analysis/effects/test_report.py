"""`effects`: the whole program at once, followed through views of views."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchgraft
from torchgraft.analysis.effects import effects


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        self.count.add_(1)
        view = y.t()[0]
        view.mul_(2)
        return self.dropout(torch.sqrt(y))


def test_reads_writes_aliases_and_draws() -> None:
    found = effects(torchgraft.symbolic_trace(Everything()))
    norm = found["norm"]
    assert norm.reads[0] == "x" and "self.norm.weight" in norm.reads
    assert set(norm.writes) == {"self.norm.running_mean", "self.norm.running_var", "self.norm.num_batches_tracked"}
    assert found["count"].aliases == ("self.count",)
    assert found["mul_"].writes == ("getitem",) and "norm" in found["mul_"].memory
    assert found["add_"].memory == ("add_", "self.count")
    assert found.random == ["dropout"] and found["dropout"].random
    assert found["sqrt"].is_pure and found["sqrt"].aliases == ()
    assert found.unknown == {}


def test_in_evaluation_nothing_is_written_or_drawn_by_modules() -> None:
    found = effects(torchgraft.symbolic_trace(Everything().eval()))
    assert set(found.writes) == {"add_", "mul_"} and found.random == []


def test_aliases_are_followed() -> None:
    found = effects(torchgraft.symbolic_trace(Everything()))
    assert found.may_alias("t", "getitem") and found.may_alias("norm", "mul_")
    assert not found.may_alias("sqrt", "norm") and not found.may_alias("count", "norm")
    assert found.may_alias("sqrt", "sqrt")


def test_what_is_unknown_is_listed_with_the_reason() -> None:
    graph = torchgraft.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(eval, (x,)))
    found = effects(graph)
    assert list(found.unknown) == ["eval_1"] and found.unknown["eval_1"]
    assert found.may_alias("eval_1", "x")
    assert "eval_1 is unknown: " in str(found)
    with pytest.raises(KeyError, match="no node named 'missing'"):
        found["missing"]


def test_a_module_that_is_not_there_may_read_anything() -> None:
    graph = torchgraft.Graph()
    graph.output(graph.call_module("missing", (graph.placeholder("x"),)))
    assert "<outside>" in effects(graph)["missing"].reads


def test_rows_json_and_html() -> None:
    found = effects(torchgraft.symbolic_trace(lambda x: x + 1))
    assert [row["name"] for row in json.loads(found.to_json())["rows"]] == ["x", "add", "output"]
    assert ">add</td>" in found._repr_html_()


VIEWS = {"t": (), "detach": (), "squeeze": (), "exp": (), "relu_": (), "clone": (), "view": (-1,), "sum": ()}


@given(st.lists(st.tuples(st.sampled_from(sorted(VIEWS)), st.integers(0, 20)), min_size=1, max_size=12))
def test_tensors_that_share_memory_are_said_to(calls: list[tuple[str, int]]) -> None:
    graph = torchgraft.Graph()
    nodes = [graph.placeholder("x")]
    for name, source in calls:
        nodes.append(graph.call_method(name, (nodes[source % len(nodes)], *VIEWS[name])))
    graph.output(nodes)
    program = torchgraft.GraphModule({}, graph)
    try:
        values = program(torch.ones(1, 1))
    except RuntimeError:
        return
    found = effects(program)
    for i, first in enumerate(values):
        for j, second in enumerate(values[:i]):
            if first.untyped_storage()._cdata == second.untyped_storage()._cdata:
                assert found.may_alias(nodes[i], nodes[j])
