"""Spellings of one call: each matches every other, and they compute the same. And calls that look alike and are not the same."""

from __future__ import annotations

import itertools
import math
import operator
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchgraft
from torchgraft.rewriting import rewrite
from torchgraft.rewriting.meaning import meaning_of_call


def plain(call: Any) -> Any:
    """A program that is this call; functions written in C cannot be captured themselves."""
    return call if isinstance(call, nn.Module) or getattr(call, "__name__", "") == "<lambda>" else lambda x: call(x)


def sequential(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers).eval()


# Each line: ways to say one thing about one input of shape (2, 4, 6, 6).
SPELLINGS: dict[str, list[Any]] = {
    "softmax": [
        lambda x: torch.softmax(x, 1), lambda x: x.softmax(dim=1), lambda x: functional.softmax(x, 1),
        lambda x: functional.softmax(x, dim=1, dtype=None), lambda x: torch.softmax(input=x, dim=1), sequential(nn.Softmax(1)),
        lambda x: torch.ops.aten.softmax.int(x, 1), lambda x: torch.special.softmax(x, 1),
    ],
    "relu": [
        torch.relu, lambda x: x.relu(), functional.relu, lambda x: functional.relu(x, inplace=False), sequential(nn.ReLU()),
        lambda x: torch.ops.aten.relu.default(x),
    ],
    "twice": [
        lambda x: x * 2, lambda x: 2 * x, lambda x: torch.mul(x, 2), lambda x: x.mul(2), lambda x: torch.multiply(x, 2),
        lambda x: x.mul(other=2),
    ],
    "plus itself": [
        lambda x: x + x, lambda x: torch.add(x, x), lambda x: x.add(x), lambda x: torch.add(x, x, alpha=1),
        lambda x: torch.add(input=x, other=x),
    ],
    "difference": [lambda x: x - 3, lambda x: torch.sub(x, 3), lambda x: x.subtract(3), lambda x: x.sub(3, alpha=1)],
    "quotient": [lambda x: x / 4.0, lambda x: torch.div(x, 4.0), lambda x: torch.true_divide(x, 4.0), lambda x: x.divide(4.0),
                 lambda x: torch.div(x, 4.0, rounding_mode=None)],
    "number minus": [lambda x: 3 - x, lambda x: torch.rsub(x, 3), lambda x: torch.rsub(x, other=3, alpha=1)],
    "the larger": [lambda x: torch.maximum(x, x), lambda x: torch.max(x, x), lambda x: x.max(x), lambda x: x.max(other=x),
                   lambda x: torch.ops.aten.max.other(x, x)],
    "gelu": [functional.gelu, lambda x: functional.gelu(x, approximate="none"), sequential(nn.GELU())],
    "silu": [functional.silu, lambda x: functional.silu(x, inplace=False), sequential(nn.SiLU())],
    "leaky": [
        lambda x: functional.leaky_relu(x, 0.2), sequential(nn.LeakyReLU(0.2)),
        lambda x: functional.leaky_relu(x, negative_slope=0.2, inplace=False),
    ],
    "elu": [lambda x: functional.elu(x, 2.0), sequential(nn.ELU(2.0)), lambda x: functional.elu(x, alpha=2.0)],
    "sigmoid": [torch.sigmoid, lambda x: x.sigmoid(), sequential(nn.Sigmoid()), torch.special.expit],
    "tanh": [torch.tanh, lambda x: x.tanh(), sequential(nn.Tanh()), functional.tanh],
    "max pool": [
        lambda x: functional.max_pool2d(x, 2), lambda x: torch.max_pool2d(x, (2, 2)), lambda x: torch.max_pool2d(x, 2, 2),
        sequential(nn.MaxPool2d(2)), lambda x: functional.max_pool2d(x, kernel_size=2, stride=None),
    ],
    "average pool": [lambda x: functional.avg_pool2d(x, 3, 1), sequential(nn.AvgPool2d(3, stride=1))],
    "adaptive pool": [lambda x: functional.adaptive_avg_pool2d(x, 1), sequential(nn.AdaptiveAvgPool2d(1))],
    "flatten": [
        lambda x: torch.flatten(x, 1), lambda x: x.flatten(1), sequential(nn.Flatten()),
        lambda x: torch.flatten(x, start_dim=1, end_dim=-1),
    ],
    "permute": [lambda x: x.permute(0, 2, 3, 1), lambda x: torch.permute(x, (0, 2, 3, 1)), lambda x: x.permute([0, 2, 3, 1])],
    "view": [lambda x: x.view(2, -1), lambda x: x.view((2, -1)), lambda x: x.view([2, -1])],
    "reshape": [lambda x: x.reshape(2, -1), lambda x: torch.reshape(x, (2, -1))],
    "transpose": [lambda x: x.transpose(1, 2), lambda x: torch.transpose(x, 1, 2), lambda x: torch.swapaxes(x, 1, 2)],
    "sum": [lambda x: x.sum(1), lambda x: torch.sum(x, dim=1), lambda x: x.sum([1], keepdim=False), lambda x: x.sum(axis=1)],
    "mean": [lambda x: x.mean((2, 3), True), lambda x: torch.mean(x, dim=[2, 3], keepdim=True)],
    "clamp": [lambda x: x.clamp(min=0.0), lambda x: torch.clamp(x, 0.0), lambda x: torch.clip(x, min=0.0, max=None)],
    "cat": [
        lambda x: torch.cat([x, x], 1), lambda x: torch.cat((x, x), dim=1), lambda x: torch.concat([x, x], axis=1),
        lambda x: torch.concatenate([x, x], dim=1),
    ],
    "layer norm": [
        lambda x: functional.layer_norm(x, (6,)), lambda x: torch.layer_norm(x, [6], None, None, 1e-5),
        sequential(nn.LayerNorm(6, elementwise_affine=False)),
    ],
    "dropout": [
        lambda x: functional.dropout(x, 0.25, False), lambda x: torch.dropout(x, 0.25, False),
        lambda x: functional.dropout(x, p=0.25, training=False),
    ],
    "power": [lambda x: x**2, lambda x: torch.pow(x, 2), lambda x: x.pow(2)],
    "negative": [lambda x: -x, torch.neg, lambda x: x.negative()],
    "absolute": [abs, torch.abs, lambda x: x.absolute()],
    "greater": [lambda x: x > 0, lambda x: torch.gt(x, 0), lambda x: torch.greater(x, 0), lambda x: x.gt(0)],
    "chunk": [lambda x: torch.chunk(x, 2, 1), lambda x: x.chunk(2, dim=1), lambda x: x.chunk(chunks=2, dim=1)],
    "split": [
        lambda x: torch.split(x, 2, dim=1), lambda x: x.split(2, 1),
        lambda x: torch.split(x, split_size_or_sections=2, dim=1),
    ],
    "user function": [lambda x: scaled(x, 2), lambda x: scaled(x, factor=2), lambda x: scaled(value=x)],
}  # fmt: skip


def scaled(value: torch.Tensor, factor: int = 2) -> torch.Tensor:
    return value * factor


torchgraft.wrap("scaled")

PAIRS = [(name, i, j) for name, ways in SPELLINGS.items() for i, j in itertools.product(range(len(ways)), repeat=2)]


@pytest.mark.parametrize(("name", "first", "second"), PAIRS, ids=lambda value: str(value))
def test_every_spelling_matches_every_other(name: str, first: int, second: int) -> None:
    program, pattern = plain(SPELLINGS[name][first]), plain(SPELLINGS[name][second])
    module = torchgraft.symbolic_trace(program)
    found = rewrite(module, pattern, lambda x: torch.tan(x))
    assert len(found) == 1
    x = torch.randn(2, 4, 6, 6)
    assert torch.equal(module(x), torch.tan(x))
    for a, b in zip(
        *[value if isinstance(value, tuple) else (value,) for value in (program(x), pattern(x))], strict=True
    ):
        assert torch.equal(a, b)


DIFFERENT: list[tuple[Any, Any]] = [
    (lambda x: torch.softmax(x, 1), lambda x: torch.softmax(x, 2)),
    (lambda x: torch.softmax(x, 1), lambda x: torch.log_softmax(x, 1)),
    (lambda x: functional.softmax(x, 1, dtype=torch.float64), lambda x: torch.softmax(x, 1)),
    (lambda x: x * 2, lambda x: x * 2.0),
    (lambda x: x * True, lambda x: x * 1),
    (lambda x: torch.add(x, x, alpha=2), lambda x: x + x),
    (lambda x: x - 1, lambda x: 1 - x),
    (lambda x: x / 2, lambda x: 2 / x),
    (lambda x: functional.unfold(x, 2, 1, 0), lambda x: x.unfold(2, 1, 0)),
    (lambda x: functional.relu(x * 1, inplace=True), lambda x: torch.relu(x * 1)),
    (lambda x: (x * 1).relu_(), lambda x: torch.relu(x * 1)),
    (lambda x: functional.gelu(x, approximate="tanh"), functional.gelu),
    (lambda x: functional.max_pool2d(x, 2, 1), lambda x: functional.max_pool2d(x, 2)),
    (lambda x: torch.sum(x), lambda x: torch.sum(x, 1)),
    (lambda x: x.clamp(0.0, 1.0), lambda x: x.clamp(0.0)),
    (lambda x: x.view(2, -1), lambda x: x.reshape(2, -1)),
    (sequential(nn.LeakyReLU(0.1)), sequential(nn.LeakyReLU(0.2))),
    (sequential(nn.Softmax(1)), sequential(nn.Softmax(2))),
    (sequential(nn.BatchNorm2d(4, eps=1e-3)), sequential(nn.BatchNorm2d(4))),
    (lambda x: scaled(x, 3), lambda x: scaled(x)),
]


@pytest.mark.parametrize("number", range(len(DIFFERENT)))
def test_what_is_not_the_same_does_not_match(number: int) -> None:
    program, pattern = map(plain, DIFFERENT[number])
    assert rewrite(torchgraft.symbolic_trace(program), pattern, lambda x: x) == []
    assert rewrite(torchgraft.symbolic_trace(pattern), program, lambda x: x) == []


def test_arithmetic_of_sizes_is_not_arithmetic_of_tensors() -> None:
    module = torchgraft.symbolic_trace(lambda x: x.view(x.size(0) * 2, x.shape[1] * 2) * 2)
    assert len(rewrite(module, lambda a: torch.mul(a, 2), lambda a: torch.add(a, a))) == 1
    assert module(torch.ones(0, 4)).shape == (0, 8)


def captured(function: Any, *inputs: Any) -> torchgraft.GraphModule:
    return torchgraft.capture(function, inputs)


def annotated(x: torch.Tensor, n: int, m: int = 3) -> Any:
    return x * 1, n + m


@pytest.mark.parametrize("capture", [lambda function, *inputs: torchgraft.symbolic_trace(function), captured])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, n, m: x.size(0) + x.shape[1],
        lambda x, n, m: x.nelement() + torch.numel(x),
        lambda x, n, m: x.itemsize + x.ndim,
        lambda x, n, m: random.random() + random.uniform(1, 2),
        lambda x, n, m: x.sum().item() + x.max().item(),
        lambda x, n, m: x.get_device() + x.storage_offset(),
        lambda x, n, m: x.split(1) + x.split(1),
        lambda x, n, m: math.sqrt(x.size(0)) + math.floor(x.size(1)),
        annotated,
    ],
)
def test_arithmetic_of_python_values_is_left_alone(function: Any, capture: Any) -> None:
    program = capture(function, torch.ones(2, 3), 4, 5)
    assert rewrite(program, lambda a, b: a + b, lambda a, b: torch.add(a, b)) == []


def test_numbers_that_a_program_was_captured_with_are_no_tensors() -> None:
    program = torchgraft.capture(lambda x, n, m: (x * 1, n + m), (torch.ones(2), 2, 3))
    assert rewrite(program, lambda a, b: a + b, lambda a, b: torch.add(a, b)) == []
    assert type(program(torch.ones(2), 2, 3)[1]) is int


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n, m: x + n,
        lambda x, n, m: x.split(1)[0] + x.unbind(0)[1],
        lambda x, n, m: x.topk(1).values + x.topk(1)[0],
        lambda x, n, m: x.T + x.size(0),
        lambda x, n, m: torch.relu(x) + x.mean(),
    ],
)
def test_arithmetic_with_a_tensor_is_arithmetic_of_tensors(function: Any) -> None:
    program = torchgraft.symbolic_trace(function)
    assert len(rewrite(program, lambda a, b: a + b, lambda a, b: torch.add(a, b))) == 1


def test_modules_and_functions_with_weights() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))

        def forward(self, x):
            return functional.linear(x, self.weight, self.bias)

    for model in (nn.Sequential(nn.Linear(4, 3)), Functional()):
        for pattern in (
            lambda x, w, b: functional.linear(x, w, b),
            lambda x, w, b: functional.linear(x, weight=w, bias=b),
        ):
            module = torchgraft.symbolic_trace(model)
            x = torch.randn(2, 4)
            expected = model(x)
            found = rewrite(module, pattern, lambda x, w, b: x @ w.t() + b)
            assert len(found) == 1
            torch.testing.assert_close(module(x), expected)
            assert found[0].shape("w") == (3, 4)
            assert len(list(module.parameters())) == 2
        module = torchgraft.symbolic_trace(model)
        assert len(rewrite(module, nn.Linear(4, 3), lambda x: x)) == 1  # any weights
        assert len(rewrite(torchgraft.symbolic_trace(model), nn.Linear(4, 3, bias=False), lambda x: x)) == 0


def test_a_module_with_hooks_is_not_the_call_in_its_forward() -> None:
    layer = nn.ReLU()
    layer.register_forward_hook(lambda module, args, result: result + 1)
    module = torchgraft.symbolic_trace(nn.Sequential(layer))
    assert rewrite(module, plain(torch.relu), plain(torch.abs)) == []


def test_meaning_of_odd_calls() -> None:
    graph = torchgraft.Graph()
    x = graph.placeholder("x")

    class Unhashable:
        __hash__ = None  # type: ignore[assignment]
        __name__ = "unhashable"

        def __call__(self, value: Any) -> Any:
            return value

    assert meaning_of_call(graph.call_function(Unhashable(), (x,))).arguments == {0: x}
    assert meaning_of_call(graph.call_method("no_such_method", (x, 1))).key == ("method", "no_such_method")
    assert meaning_of_call(graph.call_function(operator.getitem, (x, 0))).key == ("function", operator.getitem)
    assert meaning_of_call(graph.call_function(torch.add, (x, x), {"out": x})).key == ("function", torch.add)
    assert meaning_of_call(graph.call_function(torch.relu, (x, x, x))).key == ("function", torch.relu)
