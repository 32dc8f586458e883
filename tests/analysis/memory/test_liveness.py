"""Last uses, and how long memory is needed when views look at it."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import torchgraft
from torchgraft.analysis.memory import liveness
from torchgraft.codegen.source import last_uses


def names(program: torchgraft.GraphModule) -> dict[str, tuple[str, str]]:
    return {life.node.name: (life.last_use.name, life.memory_until.name) for life in liveness(program).values()}


def test_memory_outlives_a_value_while_views_of_views_look_at_it() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        base = x.exp()
        view = base.t()
        deeper = view[0]
        return torch.add(y.exp(), deeper)

    found = names(torchgraft.symbolic_trace(function))
    assert found["exp"] == ("t", "add")
    assert found["t"] == ("getitem", "add")
    assert found["getitem"] == ("add", "add")
    assert found["y"] == ("exp_1", "exp_1")


def test_a_call_that_nothing_is_known_about_may_hand_its_input_back() -> None:
    graph = torchgraft.Graph()
    x = graph.placeholder("x")
    y = graph.call_method("exp", (x,))
    unknown = graph.call_function(eval, (y,))
    graph.output(graph.call_method("exp", (unknown,)))
    assert names(torchgraft.GraphModule({}, graph))["exp"] == ("eval_1", "exp_1")


def test_a_value_that_nothing_uses_dies_where_it_is_made() -> None:
    graph = torchgraft.Graph()
    x = graph.placeholder("x")
    graph.call_method("exp", (x,))
    graph.output(x)
    found = {life.node.name: life.last_use.name for life in liveness(graph).values()}
    assert found == {"x": "output", "exp": "exp", "output": "output"}


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=20))
def test_last_uses_are_those_of_generated_code(edges: list[tuple[int, int]]) -> None:
    graph = torchgraft.Graph()
    nodes = [graph.placeholder("x")]
    for first, second in edges:
        nodes.append(graph.call_function(torch.add, (nodes[first % len(nodes)], nodes[second % len(nodes)])))
    graph.output(nodes[-1])
    found = liveness(graph)
    frees = last_uses(graph)
    assert all(found[used].last_use is user for user, values in frees.items() for used in values)
    assert all(life.last_use <= life.memory_until for life in found.values())
