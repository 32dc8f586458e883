"""The texts of generated code and of `print_readable`, kept in `tests/golden/code/`, so that they are read as texts.

File names and line numbers are replaced. To change a text, look at what has become different, then write them anew:

    python -m tests.codegen.test_golden_code
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import torchgraft as fx

GOLDEN = Path(__file__).parent.parent / "golden" / "code"

# Name of the text, and a function that makes the program.
PROGRAMS: dict[str, Callable[[], fx.GraphModule]] = {}


def program(function: Callable[[], fx.GraphModule]) -> Callable[[], fx.GraphModule]:
    PROGRAMS[function.__name__] = function
    return function


class Mode(enum.Enum):
    SUM = "sum"


@dataclasses.dataclass
class Options:
    scale: float
    mode: Mode


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def combine(pair: Pair, options: Options, mode: Mode, dtype: torch.dtype):
    return (pair.first + pair.second).to(dtype) * options.scale


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# `wrap` works at the top level of a module, and this file is also run as a program of another name.
fx.wrap("combine")
fx.wrap("len")


@program
def mlp() -> fx.GraphModule:
    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.layers(x)
            return torch.softmax(hidden, dim=-1)

    traced = fx.symbolic_trace(MLP())
    shapes = {"x": (3, 4), "layers_0": (3, 8), "layers_1": (3, 8), "layers_2": (3, 2), "softmax": (3, 2)}
    for node in traced.graph.nodes:
        if node.name in shapes:
            node.meta["val"] = torch.empty(shapes[node.name])
    return traced


@program
def regions() -> fx.GraphModule:
    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            with torch.no_grad():
                target = self.linear(x)
                with torch.enable_grad():
                    y = x * 2
            with torch.autocast("cpu", dtype=torch.bfloat16):
                z = x @ y
            with torch.inference_mode():
                score = z.sum()
            return target, z, score

    return fx.symbolic_trace(Regions())


@program
def in_place_operators() -> fx.GraphModule:
    def forward(x, y):
        x += 1
        view = x.view(-1)
        view *= y
        z = x + y
        z -= 2
        z.mul_(3)
        return z

    return fx.symbolic_trace(forward)


@program
def stores() -> fx.GraphModule:
    def forward(x, index):
        x[0] = 5
        x[index, 1:] = x[0]
        mask = torch.zeros(4)
        mask[0] = 1
        mask[1:] += x[0, 0]
        return x, mask

    return fx.symbolic_trace(forward)


@program
def structured_inputs() -> fx.GraphModule:
    def forward(batch, scale=2.0):
        left, right = batch["pair"]
        return {"sum": left + right, "scaled": [batch["x"] * scale]}

    return fx.symbolic_trace(forward, concrete_args={"batch": {"x": fx.PH, "pair": (fx.PH, fx.PH)}})


@program
def leaf_functions() -> fx.GraphModule:
    def forward(x, y):
        return combine(Pair(x, y), Options(2.0, Mode.SUM), Mode.SUM, torch.float64) * len(x)

    return fx.symbolic_trace(forward)


@program
def training() -> fx.GraphModule:
    class Training(nn.Module):
        def forward(self, x):
            x = nn.functional.dropout(x, 0.5, self.training)
            if self.training:
                x = x + torch.rand(2)
            return x

    return fx.symbolic_trace(Training())


@program
def buffers_and_constants() -> fx.GraphModule:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x, *rest, eps: float = 1e-5, **options):
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return (x - self.mean) * self.weight + outside + rest[0] * eps - options["shift"]

    outside = torch.ones(2)
    return fx.symbolic_trace(Buffers())


@program
def operators_and_indices() -> fx.GraphModule:
    def forward(x, i):
        y = (-x) ** 2 // 3 @ x.T
        z = ~(x[:, None, ..., 1:i] > 0) & (y != 1)
        return abs(y), z, (-2) ** i, x.shape[-1], divide(x, i)

    def divide(x, i):
        return torch.div(x, i, rounding_mode="floor").to(torch.device("cpu"), torch.float16)

    return fx.symbolic_trace(forward)


@program
def autograd_function() -> fx.GraphModule:
    return fx.symbolic_trace(lambda x: Straight.apply(x) * 2)


def text_of(name: str) -> str:
    module = PROGRAMS[name]()
    readable = module.print_readable(print_output=False, include_stride=True)
    text = f"{module.code.strip()}\n\n\n# print_readable\n\n{readable.strip()}\n"
    text = re.sub(r"[^\s'\"]*test_golden_code\.py:\d+", "test_golden_code.py:N", text)
    # This file is `__main__` when it writes the texts.
    return text.replace("tests_codegen_test_golden_code", "golden").replace("__main__", "golden")


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_text_is_as_it_was(name: str) -> None:
    assert text_of(name) == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_is_well_formed_and_compiles(name: str) -> None:
    module = PROGRAMS[name]()
    module.graph.lint()
    assert callable(module.forward)


def test_no_text_is_left_over() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == sorted(PROGRAMS)


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        (GOLDEN / f"{name}.txt").write_text(text_of(name))
