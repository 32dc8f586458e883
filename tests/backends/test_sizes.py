"""Programs for one size: constants in the place of shapes, and sums in the place of writes that nobody else sees."""

from __future__ import annotations

import operator

import pytest
import torch

import torchgraft
from torchgraft.backends.sizes import for_one_size


def _targets(model, *args):
    program = for_one_size(torchgraft.capture(model, args), args, {})
    assert torch.equal(program(*args), model(*args))
    return [node.target for node in program.graph.nodes if node.op in ("call_function", "call_method")]


def test_shapes_are_constants():
    targets = _targets(lambda x: x.reshape(x.shape[0] * 2, -1) + x.size(1), torch.ones(4, 6))
    assert "size" not in targets and operator.mul not in targets and getattr not in targets


def test_another_size_has_a_program_of_its_own():
    program = torchgraft.capture(lambda x: x.view(x.shape[0], -1), torch.ones(2, 3, 4))
    assert for_one_size(program, (torch.ones(5, 3, 4),), {})(torch.ones(5, 3, 4)).shape == (5, 12)


@pytest.mark.parametrize(
    ("model", "is_plain"),
    [
        (lambda x, y: torch.sin(x).add_(y), True),
        (lambda x, y: torch.sin(x).mul_(2.0), True),
        (lambda x, y: torch.sin(x).add_(y.double()), False),
        (lambda x, y: x.clone().view(-1).add_(1.0), False),
    ],
)
def test_writes(model, is_plain):
    targets = _targets(model, torch.ones(3), torch.ones(3))
    assert any(isinstance(target, str) and target.endswith("_") for target in targets) is not is_plain


def test_a_value_that_is_used_again_stays_written():
    def model(x):
        y = torch.sin(x)
        same = y.view(-1)
        y.add_(1)
        return same

    assert "add_" in _targets(model, torch.ones(3))


def test_sizes_that_depend_on_values_are_no_constants():
    def model(x):
        y = x.view(x.shape[0], 1)[x > 0]
        return y.sum() / y.shape[0]

    x = torch.tensor([1.0, -2.0, 3.0])
    program = for_one_size(torchgraft.capture(model, x), (x,), {})
    assert torch.equal(program(-x), model(-x))
    assert [node.args[1:] for node in program.graph.nodes if node.target == "view"] == [(3, 1)]
