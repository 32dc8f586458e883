"""Calls that change nothing go; copies stay wherever somebody could tell them from the original."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgraft
from tests.passes.contract import check_edit
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.passes import Pipeline, PropagateShapes, RemoveNoOps

X = torch.tensor([[1.0, -2.0], [3.0, -0.0]])


def removed(function, edit=None, x=X, shapes=False):
    program = torchgraft.symbolic_trace(function)
    expected = torchgraft.symbolic_trace(function)(x.clone())
    if shapes:
        PropagateShapes(inputs=(x,))(program)
    count = check_edit(edit or RemoveNoOps(), program)
    torch.testing.assert_close(program(x.clone()), expected, rtol=0, atol=0)
    return count


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x: x.exp().clone() + 1, 1),
        (lambda x: torch.clone(x.exp()).clone(), 2),
        (lambda x: x.clone(), 0),
        (lambda x: (x.exp(), x.exp().clone()), 1),
        (lambda x: x.exp().clone().add_(1), 0),
        (lambda x: x.exp()[None, None].clone(memory_format=torch.channels_last) + 1, 0),
        (lambda x: torch.relu(torch.relu(x)), 1),
        (lambda x: F.relu(F.relu(F.relu(x))), 2),
        (lambda x: x.contiguous().contiguous() + 1, 1),
        (lambda x: x.abs().abs().abs() + 1, 2),
        (lambda x: x.t().t() + 1, 1),
        (lambda x: x.transpose(0, 1).transpose(1, 0) + 1, 1),
        (lambda x: x.transpose(0, 1).transpose(0, 0) + 1, 0),
        (lambda x: x.exp().view_as(x) + 1, 0),
        (lambda x: F.dropout(x.exp(), 0.5, False) + 1, 1),
        (lambda x: F.dropout(x.exp(), p=0.0) + 1, 1),
        (lambda x: x * 1 + 0, 0),
    ],
)
def test_what_goes(function, count):
    assert removed(function) == count


def test_a_clone_that_protects_from_a_later_write():
    def function(x):
        y = x * 2.0
        kept = y.clone()
        y.add_(1)
        return kept + y

    assert removed(function) == 0


def test_a_clone_of_an_input_that_is_returned_is_the_callers_own():
    def function(x):
        return x.clone(), x + 1

    program = torchgraft.symbolic_trace(function)
    RemoveNoOps()(program)
    x = X.clone()
    program(x)[0].zero_()
    assert torch.equal(x, X)


def test_modules():
    identity = nn.Sequential(nn.Identity(), nn.Linear(2, 2), nn.Identity(), nn.ReLU(), nn.ReLU(), nn.Dropout(0.0))
    assert removed(identity) == 4
    hooked = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    hooked[0].register_forward_hook(lambda module, args, result: result * 2)
    assert removed(hooked) == 0


def test_dropout_goes_for_good_only_on_request():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval()
    assert removed(model) == 0
    assert removed(model, RemoveNoOps(inference=True)) == 1
    assert removed(model.train(), RemoveNoOps(inference=True), x=torch.zeros(0, 2)) == 0


def test_arithmetic_needs_known_types_and_keeps_every_bit():
    trusting = RemoveNoOps(trust_types=True)
    assert removed(lambda x: (x.exp() * 1 - 0) / 1, trusting, shapes=True) == 3
    assert removed(lambda x: x.neg() + 0, trusting, shapes=True) == 0  # -0.0 + 0 is 0.0
    assert removed(lambda x: x.exp() * 1, trusting) == 0
    assert removed(lambda x: (x > 0) * 1, trusting, shapes=True) == 0
    assert removed(lambda x: x.exp().float() + x.exp().double(), trusting, shapes=True) == 1


def test_gradient_modes_keep_copies():
    def function(x):
        with torch.no_grad():
            y = x.exp().clone()
        return x.exp() * y

    program = torchgraft.symbolic_trace(function)
    with program.graph.inserting_before(program.graph.output_node()):
        region = program.graph.call_function(enter_context, (torch.no_grad,))
        program.graph.call_function(exit_context, (region,))
    assert check_edit(RemoveNoOps(), program) == 2  # the empty region
    x = X.clone().requires_grad_()
    (found,) = torch.autograd.grad(program(x).sum(), x)
    assert torch.equal(found, (x.exp() * x.exp()).detach())


def test_guards_stay():
    def function(x):
        y = x.exp().clone()
        return y if y.sum() > 0 else x

    program = torchgraft.capture(function, (X,))
    report = Pipeline("remove-no-ops, remove-dead-code")(program, check=X)
    assert report.passes[0].changes == 1 and len(program.guards) >= 1
