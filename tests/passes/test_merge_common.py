"""Equal calls are merged, and nothing that somebody could tell apart."""

import copy
import operator
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgraft
from tests.passes.contract import check_edit
from torchgraft.analysis.aliases import Aliases
from torchgraft.passes import MergeCommon, Pipeline


def merged(function, *args):
    """The number of merges, checked against the program as it was."""
    program = torchgraft.symbolic_trace(function)
    torch.manual_seed(0)
    expected = torchgraft.symbolic_trace(copy.deepcopy(function))(*[arg.clone() for arg in args])
    count = check_edit(MergeCommon(), program)
    torch.manual_seed(0)
    found = program(*[arg.clone() for arg in args])
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    return count


X = torch.tensor([[1.0, -2.0], [3.0, 4.0]])


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x: torch.sin(x) + torch.sin(x), 1),
        (lambda x: x.sin().cos() + x.sin().cos(), 2),
        (lambda x: F.softmax(x, dim=1) * F.softmax(x, dim=1), 1),
        (lambda x: x[0, :] + x[0, :], 1),
        (lambda x: torch.cat([x, x]) + torch.cat([x, x]), 1),
        (lambda x: x.reshape(x.shape[0], -1).sum() + x.shape[0], 2),
        (lambda x: x.clamp(0, 1) + x.clamp(0, 1.0) + x.clamp(False, 1), 0),
        (lambda x: torch.add(x, 0.0) / torch.add(x, -0.0), 0),
        (lambda x: x.to(torch.float64) + x.to(torch.float32), 0),
        (lambda x: F.softmax(x, dim=1) * F.softmax(x, dim=0), 0),
        (lambda x: torch.rand(2) * torch.rand(2) + x, 0),
        (lambda x: F.dropout(x) + F.dropout(x), 0),
        (lambda x: torch.empty(2).fill_(1.0) + torch.empty(2).fill_(2.0) + x, 0),
        (lambda x: (x.sin(), x.sin()), 0),
        (lambda x: (x.sin(), x.sin().cos()), 1),
        (lambda x: (x[0], x[0]), 0),
        (lambda x: (x.sin().cos(), x.sin(), x.sin()), 1),
        (lambda x: x.sin() + x.sin().mul_(2), 0),
        (lambda x: x * x + x * x, 1),
        (lambda x: (x + 1) * 2 - (x + 1) * 2 + -x * -x, 3),
        (lambda x: x * 2 + x * 2.0, 0),
        (lambda x: (x * x, x * x), 0),
        (lambda x: ((x * x)[0], (x * x)[0]), 0),
        (lambda x: (x * x) + (x * x).add_(1), 0),
        (lambda x: [x * x + x * x, (x * x).cos()], 2),
    ],
)
def test_what_is_merged(function, count):
    assert merged(function, X) == count


@pytest.mark.parametrize("value", [[1, 2], (1, 2), 3, 2.5])
def test_operators_on_lists_and_numbers(value):
    def function(a, b):
        return (a + b) + (a + b), a + b, a + b

    program = torchgraft.symbolic_trace(function)
    assert check_edit(MergeCommon(), program) == 2
    whole, first, second = program(value, value)
    assert whole == value + value + value + value and first == second == value + value
    if isinstance(value, list):
        first.append(3)
        assert second == [1, 2, 1, 2] and whole == [1, 2] * 4


def test_what_lists_hold_stays_apart():
    """A sum of lists hands on what they hold, so merging the calls that made it would give the caller one tensor twice."""

    def nested(x, y):
        first, second = operator.add([x.sin()], y), operator.add([x.sin()], y)
        return first + second

    program = torchgraft.symbolic_trace(nested)
    assert MergeCommon()(program).changes == 0
    first, second = program(X, [])
    assert first.data_ptr() != second.data_ptr()
    program = torchgraft.symbolic_trace(lambda x: torch.sort(x) + torch.sort(x))
    assert MergeCommon()(program).changes == 0
    results = program(X.clone())
    assert len({value.data_ptr() for value in results}) == 4


def test_a_write_between_two_reads():
    def function(x):
        y = x * 1.5
        first = y.sin()
        y.add_(1)
        return first + y.sin() + y.sin()

    assert merged(function, X) == 1


def test_a_write_through_a_view_between_two_reads():
    def function(x):
        y = x * 1.5
        view = y.view(-1)
        first = y.sum()
        view[0] = 7
        return first + y.sum()

    assert merged(function, X) == 0


def test_a_write_of_an_input():
    def function(x, y):
        first = y.sum()
        x.add_(1)  # may be the same tensor
        return first + y.sum()

    assert merged(function, X, X) == 0


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2)
        self.alias = self.linear
        self.register_buffer("memory", torch.ones(2))


def parts(forward, training=False):
    torch.manual_seed(0)
    return type("Model", (Parts,), {"forward": forward})().train(training)


def test_modules():
    assert merged(parts(lambda self, x: self.linear(x) * self.linear(x)), X) == 1
    assert merged(parts(lambda self, x: self.norm(x) * self.norm(x), training=True), X) == 0


def test_a_dropout_that_is_off_may_be_switched_on():
    program = torchgraft.symbolic_trace(parts(lambda self, x: self.drop(x) - self.drop(x)))
    assert MergeCommon()(program).changes == 0
    assert program.train()(torch.ones(64, 2)).abs().sum() > 0
    model = parts(lambda self, x: self.norm(x) + self.norm(x))
    assert merged(model, X) == 0


def test_a_buffer_written_between():
    def forward(self, x):
        first = x * self.memory
        self.memory.add_(1)
        return first + x * self.memory

    assert merged(parts(forward), X) == 1  # the two fetches of the buffer, which is one object


def test_tied_weights_written_under_another_name():
    def forward(self, x):
        first = F.linear(x, self.linear.weight)
        with torch.no_grad():
            self.alias.weight.add_(1)
        return first + F.linear(x, self.linear.weight)

    model = parts(forward)
    program = torchgraft.symbolic_trace(model)
    MergeCommon()(program)
    kept = [node for node in program.graph.nodes if node.target is F.linear]
    assert len(kept) == 2


def test_regions_are_kept_apart():
    def function(x):
        first = x.sin()
        with torch.no_grad():
            second = x.sin()
        with torch.no_grad():
            third = x.sin() * x.sin()
        return first + second + third

    x = X.clone().requires_grad_()
    program = torchgraft.symbolic_trace(function)
    assert check_edit(MergeCommon(), program) == 1
    (found,) = torch.autograd.grad(program(x).sum(), x)
    assert torch.equal(found, x.cos())


def test_guards_stay_where_they_are():
    def function(x, y):
        if x.sum() > 0:
            return x.sin() + y.sin()
        return x

    program = torchgraft.capture(function, (X, X.clone()))
    guards = [str(guard) for guard in program.guards]
    Pipeline("merge-common, remove-dead-code")(program, check=(X, X.clone()))
    assert [str(guard) for guard in program.guards] == guards
    with pytest.raises(torchgraft.GuardError):
        program(-10 * torch.ones(2, 2), X)


def test_not_a_number_and_objects_that_cannot_be_keys():
    assert merged(lambda x: torch.nan_to_num(x, float("nan")) + torch.nan_to_num(x, float("nan")), X) == 1
    assert merged(lambda x: x[{"a": 0}["a"]] + x[[0]].sum() + x[[0]].sum(), X) >= 1


def test_metadata_stays():
    program = torchgraft.symbolic_trace(lambda x: torch.sin(x) + torch.sin(x))
    MergeCommon()(program)
    assert "lambda x: torch.sin(x)" in program.graph.find_nodes(op="call_function", target=torch.sin)[0].stack_trace


def test_empty_program():
    assert MergeCommon()(torchgraft.symbolic_trace(lambda: None)).changes == 0


def test_long_chains_do_not_recurse():
    def function(x):
        for _ in range(3000):
            x = x + x
        return x * (x.sum() + x.sum())

    program = torchgraft.symbolic_trace(function)
    assert MergeCommon()(program).changes == 1
    assert Aliases(program.graph).is_pure(program.graph.output_node().args[0])


def test_a_call_with_many_equal_inputs_is_written_once():
    def work(width):
        program = torchgraft.symbolic_trace(lambda x: torch.stack([torch.sin(x) for _ in range(width)]))
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            assert MergeCommon().run(program) == width - 1
        finally:
            sys.setprofile(None)
        return calls

    work(2)  # what is remembered from the first time on
    assert work(1000) <= 15 * work(100)
