"""The two calls that open and close a region inside a program.
How regions are recorded is in tests/capturing/patching/test_regions.py.
"""

import pytest
import torch
from torch import nn

import torchgraft as fx
from torchgraft.ir.contexts import enter_context, exit_context


class Noting:
    def __init__(self, *args, **kwargs) -> None:
        self.calls = [("made", args, kwargs)]

    def __enter__(self):
        self.calls.append("entered")
        return "something else"

    def __exit__(self, *details):
        self.calls.append(("left", details))


def test_entering_returns_the_context_itself_so_that_it_can_be_left() -> None:
    context = enter_context(Noting, 1, option=2)
    assert isinstance(context, Noting)
    assert exit_context(context) is None
    assert context.calls == [("made", (1,), {"option": 2}), "entered", ("left", (None, None, None))]


def test_both_calls_change_the_mode_of_torch() -> None:
    context = enter_context(torch.no_grad)
    try:
        assert not torch.is_grad_enabled()
    finally:
        exit_context(context)
    assert torch.is_grad_enabled()


def region_graph() -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    context = graph.call_function(enter_context, (torch.no_grad,))
    y = graph.call_function(torch.relu, (x,))
    graph.call_function(exit_context, (context,))
    graph.output(y)
    return graph


def test_a_region_is_never_dead_code() -> None:
    graph = region_graph()
    assert not graph.eliminate_dead_code()
    assert len(graph.nodes) == 5


def test_a_region_made_by_hand_runs_as_a_with_block() -> None:
    module = fx.GraphModule(nn.Module(), region_graph())
    assert "with torch.no_grad():" in module.code
    x = torch.ones(1, requires_grad=True)
    assert not module(x).requires_grad
    assert not fx.Interpreter(module).run(x).requires_grad


def test_a_region_that_is_left_empty_by_edits_still_runs() -> None:
    graph = region_graph()
    relu = graph.find_nodes(op="call_function", target=torch.relu)[0]
    relu.replace_all_uses_with(relu.args[0])
    graph.erase_node(relu)
    module = fx.GraphModule(nn.Module(), graph)
    assert module(torch.ones(1)) == 1


def test_a_function_of_the_user_may_be_the_context() -> None:
    graph = fx.Graph()
    context = graph.call_function(enter_context, (Noting, 3))
    graph.call_function(exit_context, (context,))
    graph.output(1)
    assert fx.GraphModule(nn.Module(), graph)() == 1


@pytest.mark.parametrize("side", ["enter", "exit"])
def test_half_a_region_is_refused_by_lint_and_by_code_generation(side: str) -> None:
    graph = region_graph()
    leaving = graph.find_nodes(op="call_function", target=exit_context)[0]
    if side == "enter":
        graph.erase_node(leaving)
    else:
        entering = leaving.args[0]
        leaving.args = (graph.find_nodes(op="placeholder")[0],)
        graph.erase_node(entering)
    with pytest.raises(fx.GraphError, match="context"):
        graph.lint()
    with pytest.raises(fx.GraphError, match="contexts must nest"):
        fx.GraphModule(nn.Module(), graph).code
