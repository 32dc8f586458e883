"""The models that torchgraft is shown, tested and timed on, written with torch.nn alone and given random weights.
Look them up by name with `create` and `example_inputs`; nothing here knows of graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgraft.errors import GraftError, suggestion
from torchgraft.zoo.deep_recommender import DeepRecommender, rating_inputs
from torchgraft.zoo.learning_to_paint import INPUT_CHANNELS, LearningToPaintActor
from torchgraft.zoo.mlp import MLP, mlp_inputs
from torchgraft.zoo.resnet import ResNet, image_inputs, resnet18, resnet34, resnet50, resnet101, resnet152
from torchgraft.zoo.transformer import Transformer, token_inputs, transformer

__all__ = [
    "MLP",
    "DeepRecommender",
    "LearningToPaintActor",
    "ResNet",
    "Transformer",
    "create",
    "example_inputs",
    "names",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "transformer",
]


class Entry(NamedTuple):
    """How to make a model, and what to feed it."""

    model: Callable[..., nn.Module]
    inputs: Callable[..., tuple[Tensor, ...]]


_ENTRIES: dict[str, Entry] = {
    "mlp": Entry(MLP, mlp_inputs),
    "resnet18": Entry(resnet18, image_inputs),
    "resnet34": Entry(resnet34, image_inputs),
    "resnet50": Entry(resnet50, image_inputs),
    "resnet101": Entry(resnet101, image_inputs),
    "resnet152": Entry(resnet152, image_inputs),
    "transformer": Entry(transformer, token_inputs),
    "deep_recommender": Entry(DeepRecommender, rating_inputs),
    "learning_to_paint": Entry(LearningToPaintActor, partial(image_inputs, channels=INPUT_CHANNELS, size=128)),
}


def names() -> list[str]:
    """The names that `create` and `example_inputs` know.

    >>> names()[:3]
    ['mlp', 'resnet18', 'resnet34']
    """
    return list(_ENTRIES)


def create(name: str, **options: Any) -> nn.Module:
    """Make a model with random weights, in training mode as any new module; `options` go to its constructor.

    >>> create("mlp", hidden_dim=8).fc1
    Linear(in_features=16, out_features=8, bias=True)
    """
    return _entry(name).model(**options)


def example_inputs(name: str, batch: int = 1, **sizes: Any) -> tuple[Tensor, ...]:
    """Arguments for a model of the zoo: the same ones on every call, without touching torch's own random state.

    >>> [tuple(x.shape) for x in example_inputs("resnet50", batch=2, size=64)]
    [(2, 3, 64, 64)]
    """
    generator = torch.Generator().manual_seed(0)
    return _entry(name).inputs(generator, batch, **sizes)


def _entry(name: str) -> Entry:
    if name in _ENTRIES:
        return _ENTRIES[name]
    plain = name.lower().replace("-", "").replace(" ", "_")
    raise GraftError(f"no model named {name!r} in torchgraft.zoo; {suggestion(plain, _ENTRIES)}")
