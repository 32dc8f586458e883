"""What depends on constants alone is computed once; what is written, drawn, trained, returned or too large is not."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchgraft
from tests.passes.contract import check_edit
from torchgraft.passes import FoldConstants, Pipeline

X = torch.tensor([1.0, -2.0, 3.0])


def folded(function, *args, edit=None):
    program = torchgraft.symbolic_trace(function)
    torch.manual_seed(0)
    expected = torchgraft.symbolic_trace(function)(*args)
    count = check_edit(edit or FoldConstants(), program)
    for _ in range(2):
        torch.manual_seed(0)
        torch.testing.assert_close(program(*args), expected, rtol=0, atol=0)
    return count


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x: x + torch.arange(3.0).sqrt().neg(), 3),
        (lambda x: x * torch.tensor([1.0, 2.0, 3.0]).flip(0), 2),
        (lambda x: x * torch.ones(4, 3).unbind(0)[1].sum(), 4),
        (lambda x: x.exp() + torch.ones(4, 3).unbind(0)[1], 3),
        (lambda x: torch.zeros(3) + x * torch.zeros(3), 2),
        (lambda x: x + torch.rand(3), 0),
        (lambda x: x + torch.zeros(3).add_(1), 0),
        (lambda x: (x, torch.ones(3)), 0),
        (lambda x: (x, torch.ones(3).view(3, 1)), 0),
        (lambda x: x + torch.ones(3, requires_grad=True), 0),
    ],
)
def test_what_is_folded(function, count):
    assert folded(function, X) == count


def test_the_largest_value():
    program = torchgraft.symbolic_trace(lambda x: x + torch.ones(1024).cumsum(0).sum())
    assert check_edit(FoldConstants(max_bytes=4096), program) == 3
    program = torchgraft.symbolic_trace(lambda x: x + torch.ones(1024).cumsum(0).sum())
    assert FoldConstants(max_bytes=4095)(program).changes == 0


def test_what_is_too_large_is_not_even_made():
    # Tracing would make the constants, so the graph is written by hand.
    graph = torchgraft.Graph()
    x = graph.placeholder("x")
    huge = graph.call_function(torch.ones, (1 << 45,))
    row = graph.call_function(torch.arange, (1000.0,))
    wide = graph.call_method("expand", (row, 1 << 40, -1))
    copied = graph.call_method("contiguous", (wide,))
    graph.output((x, graph.call_method("sum", (huge,)), graph.call_method("sum", (copied,))))
    program = torchgraft.GraphModule(nn.Module(), graph)
    assert FoldConstants()(program).changes == 1  # the row alone
    assert [node.name for node in program.graph.nodes][1:3] == ["ones", "_folded_0"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x):
        return x * self.weight.exp() + self.table.sqrt()


def test_parameters_and_buffers_are_no_constants():
    model = Model()
    assert folded(model, X) == 0
    program = torchgraft.symbolic_trace(model)
    FoldConstants()(program)
    model.table.add_(1)
    assert torch.equal(program(X), model(X))


def test_frozen_parameters_and_buffers_are():
    model = Model()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    program = torchgraft.symbolic_trace(model)
    expected = model(X)
    assert check_edit(FoldConstants(freeze=True), program) == 2
    assert torch.equal(program(X), expected)


def test_views_of_frozen_parameters_are_constants_though_they_ask_for_gradients():
    model = nn.Conv2d(2, 3, 3)

    def standardized(x):
        weight = functional.batch_norm(model.weight.reshape(1, 3, -1), None, None, training=True)
        return functional.conv2d(x, weight.reshape_as(model.weight))

    x = torch.randn(2, 2, 5, 5)
    program = torchgraft.capture(standardized, x)
    expected = standardized(x)
    FoldConstants(freeze=True)(program)
    assert not [node for node in program.graph.nodes if node.target is functional.batch_norm]
    assert torch.equal(program(x), expected) and not program(x).requires_grad


def test_a_returned_constant_can_be_written_by_the_caller():
    program = torchgraft.symbolic_trace(lambda x: (x, torch.ones(3).view(-1)))
    FoldConstants()(program)
    program(X)[1].zero_()
    assert torch.equal(program(X)[1], torch.ones(3))


def test_settings_are_asked_in_every_run():
    graph = torchgraft.Graph()
    graph.output(graph.call_function(torch.is_grad_enabled))
    program = torchgraft.GraphModule(nn.Module(), graph)
    assert FoldConstants()(program).changes == 0
    assert program() is True
    with torch.no_grad():
        assert program() is False


def test_what_raises_goes_on_raising_in_the_run():
    graph = torchgraft.Graph()
    x = graph.placeholder("x")
    bad = graph.call_function(torch.reshape, (graph.call_function(torch.ones, (3,)), (2, 2)))
    graph.output(graph.call_function(torch.add, (x, bad)))
    program = torchgraft.GraphModule(nn.Module(), graph)
    FoldConstants()(program)
    with pytest.raises(RuntimeError, match="invalid for input of size 3"):
        program(X)


def test_autocast_regions_are_left_alone():
    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x + (torch.ones(3, 3) @ torch.ones(3, 3)).sum()

    program = torchgraft.symbolic_trace(function)
    FoldConstants()(program)
    assert any("matmul" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program(X), function(X))


def test_conversions_of_the_program_do_not_reach_what_was_made_inside_it():
    def function(x):
        return x + torch.arange(3.0).sqrt()

    program = torchgraft.symbolic_trace(function)
    FoldConstants()(program)
    assert program.double()(X).dtype == function(X).dtype == torch.float32


def test_copies_pickles_and_metadata():
    program = torchgraft.symbolic_trace(lambda x: x + torch.arange(3.0).sqrt())
    FoldConstants()(program)
    expected = program(X)
    for other in (copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        assert torch.equal(other(X), expected)
    assert torch.equal(torchgraft.GraphModule(program, copy.deepcopy(program.graph))(X), expected)
    (fetch,) = program.graph.find_nodes(op="get_attr")
    assert "arange" in fetch.stack_trace


def test_a_captured_program():
    program = torchgraft.capture(
        lambda x: x.view(x.shape[0], -1) + torch.arange(3.0).sqrt(), (X[None],), level="function"
    )
    report = Pipeline("fold-constants")(program, check=X[None])
    assert report.changes >= 1
    assert program(torch.ones(4, 3)).shape == (4, 3)
