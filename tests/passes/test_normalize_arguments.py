"""Calls in one form: named arguments with defaults, which compute the same."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgraft
from tests.passes.contract import check_edit
from torchgraft.passes import MergeCommon, NormalizeArguments

X = torch.randn(2, 3, 8, 8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        x = F.relu(self.conv(x))
        x = F.max_pool2d(x, 2)
        x = torch.softmax(x, 1) + torch.zeros(1)
        x = torch.cat([x, torch.ones_like(x)], 1).flatten(1)
        return torch.sum(x, 1), torch.randperm(3), torch.zeros(x.shape[0]), torch.full((2,), 0.5)


def test_calls_compute_the_same():
    torch.manual_seed(0)
    model = Model()
    expected = model(X)
    program = torchgraft.symbolic_trace(model)
    assert check_edit(NormalizeArguments(), program) >= 7
    torch.manual_seed(0)
    Model()
    torch.testing.assert_close(program(X), expected, rtol=0, atol=0)
    named = [node for node in program.graph.nodes if node.target in (F.relu, torch.softmax, torch.cat, "conv")]
    assert named and all(not node.args for node in named)
    assert program.graph.find_nodes(op="call_function", target=F.relu)[0].kwargs["inplace"] is False


def test_equal_calls_become_equal():
    def function(x):
        return torch.softmax(x, 1) + torch.softmax(x, dim=1) + torch.relu(x) * torch.relu(input=x)

    program = torchgraft.symbolic_trace(function)
    assert MergeCommon()(program).changes == 0
    assert NormalizeArguments()(program).changes == 3
    assert MergeCommon()(program).changes == 2
    assert torch.equal(program(X), function(X))


@pytest.mark.parametrize("keywords", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.where(x > 0, 0, x),
        lambda x: torch.where(x > 0, x, 0),
        lambda x: torch.where(x > 0, 0.0, 1.0),
        lambda x: torch.pow(2, x),
        lambda x: torch.pow(x, 2),
        lambda x: torch.float_power(2, x),
        lambda x: torch.remainder(5, x),
        lambda x: torch.xlogy(2, x),
        lambda x: torch.bitwise_and(3, x.long()),
        lambda x: torch.bitwise_left_shift(1, x.long().abs()),
        lambda x: torch.bucketize(2, x.flatten().sort().values),
        lambda x: torch.searchsorted(x.flatten().sort().values, 2),
        lambda x: torch.pow(x.size(0), x),
        lambda x: torch.range(1, 3) + x.sum(),
    ],
)
def test_numbers_in_the_place_of_tensors(function, keywords):
    program = torchgraft.symbolic_trace(function)
    check_edit(NormalizeArguments(keywords), program)
    torch.testing.assert_close(program(X), function(X), rtol=0, atol=0, equal_nan=True)


def test_positional_arguments_may_stay():
    program = torchgraft.symbolic_trace(lambda x: torch.cumsum(x, 1))
    assert check_edit(NormalizeArguments(keywords=False), program) == 1
    node = program.graph.output_node().args[0]
    assert len(node.args) == 2 and dict(node.kwargs) == {"dtype": None}


def test_what_has_no_signature_stays():
    program = torchgraft.symbolic_trace(lambda x: torch.einsum("ab->ba", x[0, 0]) + (x + 1))
    code = program.code
    assert NormalizeArguments()(program).changes == 0 and program.code == code


def test_guards_and_regions_stay():
    def function(x):
        with torch.no_grad():
            y = F.relu(x)
        return y if x.sum() > -1e9 else x

    program = torchgraft.capture(function, (X,))
    guards = [str(guard) for guard in program.guards]
    assert NormalizeArguments()(program).changes >= 1
    assert [str(guard) for guard in program.guards] == guards and "with torch.no_grad" in program.code
    assert torch.equal(program(X), function(X))


def test_operators_get_the_names_of_their_schemas():
    aten = torch.ops.aten
    program = torchgraft.symbolic_trace(lambda x: aten.slice.Tensor(aten.softmax.int(x, -1), 0, 0, 1) + aten.relu(x))
    assert check_edit(NormalizeArguments(), program) == 3
    assert torch.equal(program(X), torch.softmax(X, -1)[:1] + torch.relu(X))
    relu = program.graph.find_nodes(op="call_function", target=aten.relu)[0]
    assert not relu.args and list(relu.kwargs) == ["self"]


def test_operators_are_still_themselves_afterwards():
    before = torch.ops.aten.relu.default
    program = torchgraft.symbolic_trace(lambda x: torch.ops.aten.relu(x))
    assert NormalizeArguments()(program).changes == 1
    assert torch.ops.aten.relu.default is before
    operators = torchgraft.capture(nn.ReLU(), (X,), level="core_aten")
    assert "torch.ops.aten.relu.default(" in operators.code


def test_one_number_for_a_size_stays_one_where_it_means_something_else():
    def function(x):
        flat = torch.unfold_copy(x, 3, 2, 2).sum(-1)
        return F.interpolate(x, 4), F.local_response_norm(flat, 3), torch.ones(3), torch.nonzero_static(x, size=2)

    program = torchgraft.symbolic_trace(function)
    check_edit(NormalizeArguments(), program)
    torch.testing.assert_close(program(X), function(X), rtol=0, atol=0)


def test_modules_with_hooks_are_called_as_before():
    model = nn.Sequential(nn.ReLU(), nn.Identity())
    model[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    program = torchgraft.symbolic_trace(model)
    assert check_edit(NormalizeArguments(), program) == 1
    assert torch.equal(program(X), model(X))
