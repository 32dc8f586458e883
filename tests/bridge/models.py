"""Small models and values that several tests of the bridge use."""

from typing import Any, NamedTuple

import torch
from torch import nn

from torchgraft import zoo

# name: (options of the model, sizes of its inputs)
SMALL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mlp": ({}, {}),
    "resnet18": ({}, {"size": 32}),
    "transformer": ({"layers": 2}, {}),
    "deep_recommender": ({}, {}),
    "learning_to_paint": ({}, {"size": 128}),
}


class Pair(NamedTuple):
    first: Any
    second: Any


class Straight(torch.autograd.Function):
    """Rounds, and has a gradient that is not that of rounding."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def small(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model of the zoo and inputs for it, small enough to be run many times."""
    options, sizes = SMALL[name]
    return zoo.create(name, **options), zoo.example_inputs(name, batch=2, **sizes)
