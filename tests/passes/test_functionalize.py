"""Writes become plain computations where nobody can tell, and stay where somebody can."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgraft
from tests.passes.contract import check_edit
from torchgraft.analysis.aliases import Aliases
from torchgraft.passes import Functionalize

X = torch.tensor([[1.0, -2.0], [3.0, 4.0]])


def converted(function, *inputs):
    inputs = inputs or (X,)
    results = []
    for edit in (False, True):
        program = torchgraft.symbolic_trace(function)
        count = check_edit(Functionalize(), program) if edit else 0
        values = [x.clone().requires_grad_() if x.is_floating_point() else x.clone() for x in inputs]
        given = [x * 1 for x in values]  # not leaves, so that they may be written
        torch.manual_seed(0)
        result = program(*given)
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        total = sum(leaf.float().sum() for leaf in leaves)
        try:
            gradients = torch.autograd.grad(total, [x for x in values if x.requires_grad], allow_unused=True)
        except RuntimeError as error:  # eager writes what its gradient needs; that a plain program can do it is no harm
            assert "modified by an inplace operation" in str(error) and not edit
            gradients = None
        results.append(([leaf.detach() for leaf in leaves], [x.detach() for x in given], gradients))
    torch.testing.assert_close(results[1][:2], results[0][:2], rtol=1e-6, atol=1e-6)
    if results[0][2] is not None:
        torch.testing.assert_close(results[1][2], results[0][2], rtol=1e-6, atol=1e-6)
    return count, program


def view_after(x):
    y = x + 1
    v = y.view(-1)
    y.mul_(2)
    return v


def view_before_only(x):
    y = x + 1
    s = y.view(-1).sum()
    y.mul_(2)
    return y + s


def chain(x):
    y = x + 1
    y.mul_(2)
    y.relu_()
    y += x
    F.relu(y, inplace=True)
    return y


def module_in_place(x):
    return nn.ReLU(inplace=True)(x - 1)


def low_precision(x):
    y = (x + 1).half()
    y += x
    return y.float()


def whole_numbers(x):
    y = torch.arange(4).view(2, 2).clone()
    y *= 2
    return y + x


def other_mode(x):
    y = x * 2
    with torch.no_grad():
        y.mul_(3)
    return y


def alias_returned(x):
    y = x + 1
    z = y.t()
    z.mul_(2)
    return y, z


def saved_and_returned(x):
    y = x.exp()
    before = y.clone()
    y.mul_(2)
    return before, y


def into_a_list(x):
    y = x + 1
    part = y.narrow(0, 0, 1)
    y.mul_(2)
    return [part, 1]


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (view_after, 0),
        (view_before_only, 1),
        (chain, 4),
        (low_precision, 1),
        (whole_numbers, 1),
        (other_mode, 0),
        (alias_returned, 0),
        (saved_and_returned, 1),
        (into_a_list, 0),
        (lambda x: torch.relu_(x + 1).mul_(2), 2),
        (lambda x: x.add_(1), 0),
        (lambda x: x[0].mul_(2), 0),
        (lambda x: (x + 1).zero_(), 0),
        (lambda x: (x + 1).copy_(x), 0),
        (lambda x: (x + 1).t_(), 0),
        (lambda x: (x + 1).masked_fill_(x > 0, 0.5), 1),
        (lambda x: F.leaky_relu(x + 1, 0.2, True), 1),
        (lambda x: F.leaky_relu_(x + 1, 0.2), 1),
        (lambda x: (x + 1).uniform_().detach() * x, 0),
        (lambda x: operator.iadd(x + 1, 2), 0),  # may be a number
        (lambda x: operator.iadd(x.exp(), 2), 1),
    ],
)
def test_what_is_converted(function, count):
    assert converted(function)[0] == count


def test_setting_items_stays():
    def function(x):
        y = x + 1
        y[0] = 5
        return y

    assert converted(function)[0] == 0


def test_modules_in_place():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.relu, self.hard = (
                nn.Linear(2, 2),
                nn.ReLU(inplace=True),
                nn.Hardtanh(-0.5, 0.5, inplace=True),
            )

        def forward(self, x):
            y = self.relu(self.linear(x))
            return self.hard(self.linear(self.relu(y)))

    torch.manual_seed(0)
    model = Model()
    expected = model(X)
    program = torchgraft.symbolic_trace(model)
    assert check_edit(Functionalize(), program) == 3
    assert torch.equal(program(X), expected) and not Aliases(program.graph).has_writes
    assert model.relu.inplace


def test_modules_with_hooks_stay():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    model[1].register_forward_hook(lambda module, args, result: None)
    assert Functionalize()(torchgraft.symbolic_trace(model)).changes == 0


def test_buffers_are_still_written_and_the_report_says_so():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x):
            self.count.add_(1)
            return x * self.count

    program = torchgraft.symbolic_trace(Counter())
    report = Functionalize()(program)
    assert report.changes == 0
    assert report.notes == ("'add_' stays: it writes 'count', which may be an input or state",)
    program(X)
    assert torch.equal(program.count, torch.ones(2))


def test_numbers_are_no_tensors():
    program = torchgraft.capture(lambda x: x * (x.shape[0] + 1), (X,))
    Functionalize()(program)
    assert torch.equal(program(X), X * 3)


def test_a_long_chain_of_writes():
    def function(x):
        y = x + 1
        for _ in range(500):
            y.mul_(1.01)
            y += x
        return y

    assert converted(function)[0] == 1000


def test_aten_operators_in_place_become_plain_ones():
    class Writing(nn.Module):
        def forward(self, x, y):
            return ((x * 2).add_(y, alpha=3).relu_() + y).mul_(y)

    inputs = (X, X.half())
    program = torchgraft.capture(Writing(), inputs, level="aten")
    expected = program(*inputs)
    assert check_edit(Functionalize(), program) == 3
    assert not [node for node in program.graph.nodes if "_." in str(node.target)]
    found = program(*inputs)
    assert torch.equal(found, expected) and found.dtype == expected.dtype


def test_what_has_no_derivative_without_the_write_stays_one():
    program = torchgraft.capture(lambda x: torch.empty_like(x).copy_(x * 2), X, level="aten")
    Functionalize()(program)
    x = X.clone().requires_grad_()
    program(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(X, 2))
