"""Linear layers of one input become one product, with the same numbers up to rounding; what could be noticed stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import torchgraft
from tests.passes.contract import check_edit
from torchgraft.passes import MergeLinears, find

LEVELS = ["symbolic", "module", "function", "aten"]


class Attention(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8, bias=bias), nn.Linear(8, 4, bias=bias)
        self.value, self.out = nn.Linear(8, 4, bias=bias), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        queries = self.query(x).view(x.shape[0], -1, 4, 2).transpose(1, 2)
        keys = self.key(x).view(x.shape[0], -1, 2, 2).transpose(1, 2)
        values = self.value(x).view(x.shape[0], -1, 2, 2).transpose(1, 2)
        found = F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
        return self.out(found.transpose(1, 2).reshape(x.shape[0], -1, 8))


def captured(model: Any, x: Any, level: str) -> Any:
    return torchgraft.symbolic_trace(model) if level == "symbolic" else torchgraft.capture(model, x, level=level)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_queries_keys_and_values_are_one_product(level: str, bias: bool) -> None:
    torch.manual_seed(0)
    model = Attention(bias).eval()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    program = captured(model, torch.randn(2, 5, 8), level)
    merges = check_edit(MergeLinears(), program)
    assert merges == (0 if level == "aten" else 2)  # operators ask for layouts by `view`
    for shape in ((2, 5, 8), (3, 1, 8), (1, 7, 8)):
        x = torch.randn(shape, requires_grad=True)
        found, expected = program(x), model(x)
        torch.testing.assert_close(found, expected)
        first, second = (torch.autograd.grad(item.sum(), x)[0] for item in (found, expected))
        torch.testing.assert_close(first, second)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


a, b = nn.Linear(3, 2), nn.Linear(3, 4)
bare, double = nn.Linear(3, 2, bias=False), nn.Linear(3, 2).double()
hooked = nn.Linear(3, 2)
hooked.register_forward_hook(lambda module, args, result: result * 2)


def written_between(x: Any) -> Any:
    first = a(x).exp()
    x.mul_(2)
    return first.sum() + b(x).exp().sum()


def written_after(x: Any) -> Any:
    first, second = a(x), b(x)
    first.mul_(2)
    return first.sum() + second.exp().sum()


STAY = {
    "another input": lambda x: a(x).exp().sum() + b(x + 1).exp().sum(),
    "one alone": lambda x: a(x).exp(),
    "results that are returned": lambda x: (a(x), b(x)),
    "views that are returned": lambda x: (a(x).t(), b(x).t()),
    "an input that is written between": written_between,
    "a result that is written": written_after,
    "one with and one without bias": lambda x: a(x).exp().sum() + bare(x).exp().sum(),
    "hooks": lambda x: a(x).exp().sum() + hooked(x).exp().sum(),
    "a look at strides": lambda x: [y.exp().sum() * y.stride(0) for y in (a(x), b(x))],
    "another way to look": lambda x: [y.as_strided((2,), (1,)).exp() for y in (a(x), b(x))],
    "weights that are computed": lambda x: (
        F.linear(x, a.weight * 2).exp().sum() + F.linear(x, b.weight * 3).exp().sum()
    ),
}


@pytest.mark.parametrize("reason", STAY)
@pytest.mark.parametrize("level", ["module", "function"])
def test_what_could_be_noticed_stays(reason: str, level: str) -> None:
    x = torch.randn(5, 3)
    program = captured(STAY[reason], x.clone(), level)
    # In a program of functions a hook is calls like any other.
    assert check_edit(MergeLinears(), program) == (1 if (reason, level) == ("hooks", "function") else 0)
    torch.testing.assert_close(program(x.clone()), STAY[reason](x.clone()))


def test_a_layer_that_is_called_twice() -> None:
    program = captured(lambda x: a(x).exp().sum() + a(x).sin().sum(), torch.randn(5, 3), "function")
    assert check_edit(MergeLinears(), program) == 1
    x = torch.randn(2, 3)
    torch.testing.assert_close(program(x), a(x).exp().sum() + a(x).sin().sum())


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 4), st.booleans()), min_size=1, max_size=6), st.integers(1, 3)
)
@settings(max_examples=40, deadline=None)
def test_random_groups(plan: list[tuple[int, int, bool]], rows: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, width, bias=bias) for _, width, bias in plan])

        def forward(self, x: Any) -> Any:
            sources = [x, x.exp()]
            return [layer(sources[number]).relu() for (number, *_), layer in zip(plan, self.layers, strict=True)]

    model = Model()
    program = torchgraft.capture(model, torch.randn(2, 3))
    kinds = {(number, bias) for number, _, bias in plan}
    assert check_edit(MergeLinears(), program) == len(plan) - len(kinds)
    x = torch.randn(rows, 3)
    torch.testing.assert_close(program(x), model(x))


def test_by_its_name() -> None:
    assert find("merge-linears") is MergeLinears
