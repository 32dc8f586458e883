"""A symbolic trace of code that has no trap in it has the nodes torch.fx has, with the same users, and no more.
Models of torchvision and timm are compared in the same way by `make test-clients`.
"""

from __future__ import annotations

import collections.abc
import importlib
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchgraft import zoo

torch_fx = importlib.import_module("torch.fx")


def lines(graph: Any) -> list[str]:
    return [
        f"{node.name} = {node.op}[{node.target}](*{node.args}, **{dict(node.kwargs)}) -> {list(node.users)}"
        for node in graph.nodes
    ]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", zoo.names())
def test_models_of_the_zoo(graft: ModuleType, name: str, training: bool) -> None:
    model = zoo.create(name).train(training)
    assert lines(graft.symbolic_trace(model).graph) == lines(torch_fx.symbolic_trace(model).graph)


class Layers(nn.Module):
    """Layers of torch's, and a parameter, a buffer and plain values of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.1)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))
        self.extra: Any = None
        self.sizes = [1, 2]


class AsksForALayersResult(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        if isinstance(y, (list, tuple)):
            y = y[0]
        return y + self.scale


class AsksForAnAnnotatedInput(Layers):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        if isinstance(mask, (list, tuple)):
            mask = mask[0]
        return self.norm(x) * mask


class AsksForItsOwnAttributes(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        if self.extra is not None or len(self.sizes) != 2 or not isinstance(self.layer, nn.Linear):
            return x
        if hasattr(self, "nothing") or not isinstance(self.sizes, collections.abc.Sequence):
            return x
        return self.drop(self.layer(x)) + self.shift


class Constants(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        return x * math.sqrt(self.layer.in_features) + float(self.layer.in_features // 2)


class Sizes(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        batch, width = x.shape
        return x.view(batch, 2, width // 2).transpose(1, 2).reshape(x.size(0), -1)[..., :3]


class Functions(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        y = functional.gelu(functional.linear(x, self.layer.weight, self.layer.bias))
        z = torch.cat([y, torch.relu(y)], dim=-1).chunk(2, -1)
        return {"sum": z[0] + z[1], "all": (y.softmax(-1), [functional.layer_norm(y, (4,))])}


class Loops(Layers):
    def forward(self, x: torch.Tensor, count: int = 3) -> Any:
        for index in range(len(self.sizes)):
            x = self.layer(x) + index
        return x * count


class Keywords(Layers):
    def forward(self, x: torch.Tensor, *, scale: float = 2.0, **others: Any) -> Any:
        return torch.add(input=x, other=self.scale, alpha=scale)


MODELS: list[Callable[[], nn.Module]] = [
    *(
        AsksForALayersResult,
        AsksForAnAnnotatedInput,
        AsksForItsOwnAttributes,
        Constants,
        Sizes,
        Functions,
        Loops,
        Keywords,
    ),
]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_code_without_a_trap(graft: ModuleType, make: Callable[[], nn.Module]) -> None:
    model = make()
    assert lines(graft.symbolic_trace(model).graph) == lines(torch_fx.symbolic_trace(model).graph)


LAYERS = {
    "Linear": lambda: nn.Linear(4, 4),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "Conv2d": lambda: nn.Conv2d(2, 2, 3),
    "Embedding": lambda: nn.Embedding(3, 4),
    "GELU": nn.GELU,
    "MaxPool2d": lambda: nn.MaxPool2d(2),
    "Softmax": lambda: nn.Softmax(-1),
    "Sequential": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Tanh())),
    "PixelShuffle": lambda: nn.PixelShuffle(2),
    "CosineSimilarity": nn.CosineSimilarity,
    "Bilinear": lambda: nn.Bilinear(2, 3, 4),
    "Upsample": lambda: nn.Upsample(scale_factor=2.0),
    "MSELoss": nn.MSELoss,
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_traced_through(graft: ModuleType, name: str) -> None:
    model = LAYERS[name]()
    graphs = []
    for library in (graft, torch_fx):

        class Through(library.Tracer):  # type: ignore[misc, name-defined]
            def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
                return False

        graphs.append(lines(Through().trace(model)))
    assert graphs[0] == graphs[1]
