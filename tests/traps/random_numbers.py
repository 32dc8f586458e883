"""Traps: random numbers of torch, Python and numpy, seeds, states and generators.
Dropout and its like are in `modes.py`.
"""

from __future__ import annotations

import random
import time
from random import uniform
from typing import Any

import numpy
import torch
from torch import nn

from tests.traps.trap import Collection

TRAPS = Collection()


@TRAPS.function("draws by sizes")
def draws(x: torch.Tensor) -> torch.Tensor:
    noise = torch.rand(x.shape[0], 4) + torch.randn_like(x) + torch.randn(4) * torch.randint(0, 5, (1,))
    return x + noise + torch.empty(4).uniform_() + torch.bernoulli(torch.full((4,), 0.5)) + torch.normal(0.0, 1.0, (4,))


@TRAPS.function("draws that nobody uses")
def unused_draws(x: torch.Tensor) -> torch.Tensor:
    torch.rand(3)
    return x + torch.rand(4)


@TRAPS.function("a permutation")
def permutation(x: torch.Tensor) -> torch.Tensor:
    return x[torch.randperm(x.size(0))]


@TRAPS.function("a choice by chance")
def chance(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.rand(()) < 0.5 else x - 1


@TRAPS.function("a number by chance")
def number_by_chance(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(1).item() + int(torch.randint(0, 10, ()).item())


@TRAPS.function("manual seed")
def manual_seed(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    return x + torch.rand(4)


@TRAPS.function("state saved and set back")
def state_set_back(x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    first = torch.rand(4)
    torch.set_rng_state(state)
    return x + first - torch.rand(4)


@TRAPS.function("a fork of the state")
def fork(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        noise = torch.rand(4)
    return x + noise + torch.rand(4)


@TRAPS.function("a generator made inside")
def generator_inside(x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return x + torch.rand(4, generator=generator) + torch.randperm(4, generator=generator)


@TRAPS.model("a generator on self")
class GeneratorOnSelf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(4, generator=self.generator)


@TRAPS.function("Python's random numbers")
def python_random(x: torch.Tensor) -> torch.Tensor:
    return x * random.random() + random.randint(0, 9) + random.gauss(0, 1)


@TRAPS.function("Python's random numbers imported by name")
def python_random_by_name(x: torch.Tensor) -> torch.Tensor:
    return x * uniform(0, 1)


@TRAPS.function("Python's random choices")
def python_choices(x: torch.Tensor) -> torch.Tensor:
    order = [0, 1, 2, 3]
    random.shuffle(order)
    return x[:, order] * random.choice([1.0, 2.0, 3.0]) + random.sample(range(10), 2)[0]


@TRAPS.function("branch on Python's random numbers")
def python_branch(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if random.random() < 0.5 else x - 1


@TRAPS.function("a Random of its own")
def own_random(x: torch.Tensor) -> torch.Tensor:
    return x * random.Random(4).random()


_SHARED = random.Random(4)


def shared_random(x: torch.Tensor) -> torch.Tensor:
    return x * _SHARED.random()


def _fresh() -> Any:
    _SHARED.seed(4)
    return shared_random


TRAPS.add("a Random shared by all calls", _fresh)


@TRAPS.function("numpy's random numbers")
def numpy_random(x: torch.Tensor) -> torch.Tensor:
    return x * float(numpy.random.rand()) + torch.from_numpy(numpy.random.randn(4)).to(x.dtype)


@TRAPS.function("a beta distribution")
def distribution(x: torch.Tensor) -> torch.Tensor:
    weight = torch.distributions.Beta(torch.tensor(1.0), torch.tensor(1.0)).sample()
    return x * weight + (1 - weight) * x.flip(0)


@TRAPS.function("a normal distribution that can be differentiated")
def reparametrised(x: torch.Tensor) -> torch.Tensor:
    normal = torch.distributions.Normal(x, x.exp())
    sample = normal.rsample()
    return normal.log_prob(sample) + torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0))


@TRAPS.function("a categorical sample")
def categorical(x: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(x.softmax(-1), 2) + torch.distributions.Categorical(logits=x).sample().unsqueeze(1)


@TRAPS.function("gumbel softmax")
def gumbel(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gumbel_softmax(x, hard=True)


@TRAPS.function("initialised inside")
def initialised(x: torch.Tensor) -> torch.Tensor:
    weight = torch.empty(4, 4, dtype=x.dtype)
    nn.init.kaiming_uniform_(weight)
    nn.init.trunc_normal_(weight[0:1])
    return x @ weight


@TRAPS.function("the clock", skip=frozenset())
def clock(x: torch.Tensor) -> torch.Tensor:
    return x * (1 if time.time() > 0 else 2)
