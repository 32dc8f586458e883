"""Orders with a lower peak are taken; effects, guards and regions keep their places."""

import pytest
import torch
from torch import nn

import torchgraft
from tests.passes.contract import check_edit
from torchgraft.passes import Pipeline, PropagateShapes, ReorderForMemory
from torchgraft.passes.reorder_for_memory import _Plan

X = torch.randn(16, 16)


def estimated_peak(program):
    plan = _Plan(program)
    return plan.peak(plan.nodes)


def reordered(function, *args):
    args = args or (X,)
    program = torchgraft.symbolic_trace(function)
    PropagateShapes(inputs=args)(program)
    before = estimated_peak(program)
    expected = torchgraft.symbolic_trace(function)(*[arg.clone() for arg in args])
    moved = check_edit(ReorderForMemory(), program)
    torch.testing.assert_close(program(*[arg.clone() for arg in args]), expected, rtol=0, atol=0)
    after = estimated_peak(program)
    assert after < before if moved else after == before
    return program, before, after


def wide(x):
    parts = [x.repeat(8, 1) * float(number) for number in range(6)]
    return sum(part.sum() for part in parts)


def test_wide_programs_become_narrow():
    _, before, after = reordered(wide)
    assert before >= 6 * 8 * 16 * 16 * 4 and after <= 3 * 8 * 16 * 16 * 4


def test_a_result_that_is_needed_late_is_made_late():
    def function(x):
        big = x.repeat(64, 1)
        y = (x.repeat(32, 1) * 2).sum()
        return big.sum() * y

    program, before, after = reordered(function)
    names = [node.name for node in program.graph.nodes]
    assert after < before and names.index("repeat_1") < names.index("repeat")


def test_nothing_to_gain():
    def chain(x):
        return x.sin().cos().exp().sum()

    program, before, after = reordered(chain)
    assert before == after


def test_without_shapes_nothing_moves_and_the_report_says_so():
    report = ReorderForMemory()(torchgraft.symbolic_trace(wide))
    assert report.changes == 0
    assert report.notes == ("no shapes are known, so nothing was moved; run propagate-shapes before",)


def test_writes_stay_between_what_reads_before_and_after():
    def function(x):
        y = x * 2.0
        first = y.repeat(8, 1)
        y.add_(1)
        second = y.repeat(8, 1)
        return first.sum() + second.sum()

    reordered(function)


def test_random_draws_keep_their_order():
    def function(x):
        a, b = torch.rand(64, 16), torch.rand(32, 16)
        big = x.repeat(64, 1)
        return (a.sum() - b.sum()) * big.sum() + (x.repeat(9, 1)).sum()

    program = torchgraft.symbolic_trace(function)
    PropagateShapes(inputs=(X,))(program)
    torch.manual_seed(0)
    expected = program(X)
    ReorderForMemory()(program)
    torch.manual_seed(0)
    assert torch.equal(program(X), expected)


def test_nothing_moves_before_a_guard_or_out_of_a_region():
    def function(x):
        big = x.repeat(64, 1)
        if x.sum() > -1e9:
            small = x.repeat(8, 1).sum()
        with torch.no_grad():
            other = x.repeat(16, 1).sum()
        return big.sum() + small + other + x.repeat(4, 1).sum()

    program = torchgraft.capture(function, (X,))
    PropagateShapes(inputs=(X,), compute=True)(program)
    guards = [str(guard) for guard in program.guards]
    after_guards = [node.name for node in program.graph.nodes]
    last_guard = max(after_guards.index(guard.node.name) for guard in program.guards)
    protected = after_guards[last_guard + 1 :]
    inside = program.code.partition("with torch.no_grad():")[2].splitlines()[1:3]
    ReorderForMemory()(program)
    names = [node.name for node in program.graph.nodes]
    last_guard = max(names.index(guard.node.name) for guard in program.guards)
    assert [str(guard) for guard in program.guards] == guards
    assert all(names.index(name) > last_guard for name in protected)
    for line in inside:
        assert line.split(";")[0].strip() in program.code.partition("with torch.no_grad():")[2]
    assert torch.equal(program(X), function(X))


def test_state_written_by_modules():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(16)

        def forward(self, x):
            big = x.repeat(64, 1)
            y = self.norm(x.repeat(8, 1)).sum()
            return self.norm(big).sum() + y + self.norm.running_mean.sum()

    model = Model()
    program = torchgraft.symbolic_trace(model)
    PropagateShapes(inputs=(X,))(program)
    report = Pipeline([ReorderForMemory()])(program, check=X)
    assert report.passes[0].name == "reorder-for-memory"


@pytest.mark.parametrize("level", ["module", "function"])
def test_captured_models(level):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 256) for _ in range(4))

        def forward(self, x):
            return sum(part.relu().mean() for part in [layer(x) for layer in self.layers])

    torch.manual_seed(0)
    model = Model()
    program = torchgraft.capture(model, (X,), level=level)
    PropagateShapes(inputs=(X,))(program)
    before = estimated_peak(program)
    assert check_edit(ReorderForMemory(), program) > 0
    assert estimated_peak(program) <= before / 2
    torch.testing.assert_close(program(X), model(X), rtol=0, atol=0)
