"""Small models of the kinds people trace, for comparing generated code and results between libraries.

Single features of the language are in programs.
"""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional


class OneLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x)


class ResidualBlock(nn.Module):
    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = (
            nn.Sequential(nn.Conv2d(width, width, 1, stride), nn.BatchNorm2d(width)) if stride > 1 else None
        )

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResidualNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.Sequential(ResidualBlock(4), ResidualBlock(4, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.layers(self.stem(x)))
        return self.fc(torch.flatten(x, 1))


class Attention(nn.Module):
    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x, mask=None):
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        )
        scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(4))
        mixed = functional.softmax(scores, dim=-1) @ v
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x)) * self.scale
        return x + self.mlp(self.norms[1](x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.out = nn.Linear(4, 10)

    def forward(self, tokens, state=None):
        values, (hidden, cell) = self.lstm(self.embedding(tokens))
        return {"logits": self.out(values[:, -1]), "state": (hidden, cell)}


class SharedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 2, bias=False)
        self.register_buffer("mean", torch.full((4,), 0.5))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]), persistent=False)
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        code = torch.tanh(self.encode((x - self.mean) * self.mask))
        return functional.linear(code, self.encode.weight.t(), self.bias)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({"left": nn.Linear(4, 3), "right": nn.Linear(4, 3)})

    def forward(self, left: torch.Tensor, right: torch.Tensor, *, temperature: float = 0.5):
        a = functional.normalize(self.towers["left"](left), dim=-1)
        b = functional.normalize(self.towers["right"](right), dim=-1)
        return (a * b).sum(-1).div(temperature)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "residual": (ResidualNetwork, lambda: (torch.rand(2, 3, 8, 8),)),
    "transformer": (TransformerBlock, lambda: (torch.rand(2, 5, 8),)),
    "recurrent": (Recurrent, lambda: (torch.randint(0, 10, (2, 6)),)),
    "shared": (SharedWeights, lambda: (torch.rand(3, 4),)),
    "towers": (TwoTowers, lambda: (torch.rand(3, 4), torch.rand(3, 4))),
}
