"""Small models that the tests of `view` look at: an MLP, a value used twice, branches and tuples, and a write in place."""

from __future__ import annotations

import torch
from torch import nn


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(16, 32)
        self.fc2 = nn.Linear(32, 16)
        self.relu = nn.ReLU()

    def forward(self, x):
        x = self.relu(self.fc1(x))
        x = self.fc2(x)
        return x


class Twice(nn.Module):
    def forward(self, x):
        return x * x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)) + x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.register_buffer("scale", torch.full((3, 1, 1), 2.0))
        self.head = nn.Linear(3, 5)

    def forward(self, x):
        x = self.blocks(x) * self.scale
        first, second = torch.split(x.mean((2, 3)), [1, 2], dim=1)
        return self.head(torch.cat([first, second], dim=1)), {"pooled": second}


class WritesInPlace(nn.Module):
    def forward(self, x):
        y = x.clone()
        before = y.sum()
        y.add_(1)
        after = y.sum()
        return before, after
