"""A dozen small models in plain torch, one for each thing that programs of models tend to stumble over.
What is done with them is in `test_what_users_do_next.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class ConvolutionNet(nn.Module):
    """Batch norm, a branch on a size, and a plain list among the attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.widths = [8, 4]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        y = y.mean((2, 3)) if y.shape[-1] > 1 else y.flatten(1)
        return self.head(y).view(x.shape[0], self.widths[1])


class AttentionBlock(nn.Module):
    """Sizes that are read and used, an optional input, and a dict as the result."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project, self.norm = nn.Embedding(50, 16), nn.Linear(16, 48), nn.LayerNorm(16)
        self.options = {"heads": 2}

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        batch, length = ids.shape
        projected = self.project(self.norm(self.embed(ids))).view(batch, length, 3, self.options["heads"], -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) + torch.full((length, length), float("-inf")).triu(1)
        if mask is not None:
            scores = scores + mask
        return {"hidden": (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, -1)}


class Recurrent(nn.Module):
    """A module of torch's that returns nested tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, (hidden, _) = self.lstm(x)
        return self.head(outputs), hidden


class Bags(nn.Module):
    """Embedding bags over integers."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(20, 8, mode="mean"), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.bag(ids))


class DropoutMLP(nn.Module):
    """Random numbers in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.layers(x), 0.2, self.training)


class Buffers(nn.Module):
    """Buffers, saved and not saved, one of them a boolean mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("mask", torch.tensor([True, False, True, True]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.scale).masked_fill(~self.mask, 0.0)


class TiedWeights(nn.Module):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(ids)))


class KeywordArguments(nn.Module):
    """Inputs by name, and further ones that go through **kwargs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        for value in kwargs.values():
            y = y + value
        return y


class TupleInputs(nn.Module):
    """An input that is a tuple, and a tuple as the result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = pair
        return self.linear(first) + second, first * 2


class InPlace(nn.Module):
    """Operators and assignments that write into tensors of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y += 1
        y[:, 0] = 0.0
        return F.relu(y, inplace=True) * 2


class Square(torch.autograd.Function):
    """A function with a backward of its own, which is not the derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * gradient


class OwnBackward(nn.Module):
    """A custom autograd function between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Square.apply(self.linear(x)) + 1


class Counting(nn.Module):
    """A part that no graph can say, because it counts its calls, and therefore stays one call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x)


class KeptWhole(nn.Module):
    """A model around a part that stays one call."""

    def __init__(self) -> None:
        super().__init__()
        self.counting, self.head = Counting(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.counting(x)))


class Pair(nn.Module):
    """A part that stays one call and gives a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.counting = Counting()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.counting(x), x * 2


class Cache:
    """An object that holds a tensor, and a dict of plain values."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys, self.is_filled = keys, {0: True}


@torch.jit.script
def halved(x: torch.Tensor, by: int) -> torch.Tensor:
    """A scripted function, as models of transformers have them."""
    return x / torch.sqrt(torch.tensor(x.size(-1) * by, dtype=torch.float))


class ManyResults(nn.Module):
    """A part kept whole that gives a tuple, a scripted function, and an OrderedDict with an object that holds a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.head = Pair(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> OrderedDict[str, Any]:
        first, second = self.pair(x)
        return OrderedDict(out=self.head(halved(first, 1)), cache=Cache(second))


class Given(NamedTuple):
    """Inputs of a model for a batch of some size."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Given]]] = {
    "convolutions": (ConvolutionNet, lambda n: Given((torch.randn(n, 3, 8, 8),))),
    "attention": (AttentionBlock, lambda n: Given((torch.randint(0, 50, (n, 7)),))),
    "recurrent": (Recurrent, lambda n: Given((torch.randn(n, 5, 4),))),
    "bags": (Bags, lambda n: Given((torch.randint(0, 20, (n, 5)),))),
    "dropout": (DropoutMLP, lambda n: Given((torch.randn(n, 4),))),
    "buffers": (Buffers, lambda n: Given((torch.randn(n, 4),))),
    "tied weights": (TiedWeights, lambda n: Given((torch.randint(0, 12, (n, 5)),))),
    "keywords": (
        KeywordArguments,
        lambda n: Given((torch.randn(n, 4),), {"bias": torch.randn(4), "shift": torch.randn(n, 4)}),
    ),
    "tuple inputs": (TupleInputs, lambda n: Given(((torch.randn(n, 4), torch.randn(n, 4)),))),
    "in place": (InPlace, lambda n: Given((torch.randn(n, 4),))),
    "own backward": (OwnBackward, lambda n: Given((torch.randn(n, 4),))),
    "kept whole": (KeptWhole, lambda n: Given((torch.randn(n, 4),))),
    "many results": (ManyResults, lambda n: Given((torch.randn(n, 4),))),
}


def asserting() -> Callable[[Any], Any]:
    """A function with an assertion; not in a file of tests, where pytest writes assertions anew."""

    def positive(x: Any) -> Any:
        assert x.sum() > 0, "positive"
        return x

    return positive
