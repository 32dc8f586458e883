"""Programs that drawings are tested on: nested, repeated, wide, long, random."""

from __future__ import annotations

import random

import torch
from torch import nn

import torchgraft


class Block(nn.Module):
    """A residual block."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(size, size)
        self.second = nn.Linear(size, size)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


class Tower(nn.Module):
    """Blocks in a row, all alike, between two layers."""

    def __init__(self, blocks: int = 4, size: int = 4) -> None:
        super().__init__()
        self.start = nn.Linear(size, size)
        self.blocks = nn.ModuleList([Block(size) for _ in range(blocks)])
        self.end = nn.Linear(size, size)

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


def chain(length: int) -> torchgraft.Graph:
    graph = torchgraft.Graph()
    value = graph.placeholder("x")
    for _ in range(length):
        value = graph.call_function(torch.relu, (value,))
    graph.output(value)
    return graph


def fan(width: int) -> torchgraft.Graph:
    """One value that many take, and one node that takes all of theirs."""
    graph = torchgraft.Graph()
    value = graph.placeholder("x")
    graph.output(graph.call_function(torch.cat, ([graph.call_function(torch.relu, (value,)) for _ in range(width)],)))
    return graph


def random_program(size: int, seed: int, modules: int = 0) -> torchgraft.Graph:
    """Nodes that take values of earlier ones, in nested module calls that come and go."""
    chance = random.Random(seed)
    graph = torchgraft.Graph()
    values = [graph.placeholder(f"x{number}") for number in range(1 + size // 10)]
    path: list[str] = []
    for number in range(size):
        if modules and chance.random() < 0.3:
            if path and chance.random() < 0.5:
                path.pop()
            elif len(path) < 3:
                path.append(f"m{chance.randrange(modules)}")
        sources = [
            chance.choice(values[-12:] if chance.random() < 0.8 else values) for _ in range(chance.choice((1, 1, 2, 3)))
        ]
        value = graph.call_function(torch.add, tuple(sources))
        stack = {}
        for depth in range(len(path)):
            dotted = ".".join(path[: depth + 1])
            stack[dotted] = (dotted, nn.Module)
        value.meta["nn_module_stack"] = stack
        if chance.random() < 0.5:
            value.meta["val"] = torch.empty(chance.choice(((2, 3), (1, 64, 56, 56), ())), device="meta")
        values.append(value)
        if number % 7 == 3:
            weight = graph.create_node("get_attr", f"w{number}")
            values.append(graph.call_function(torch.mul, (value, weight)))
    graph.output(tuple(values[-3:]))
    return graph
