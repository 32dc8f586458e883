"""A case: one model of a collection, how it is built, and the inputs it is captured with and tried on.
Which cases there are is said by `torchvision_models`, `timm_models` and `language_models`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Inputs:
    """What a model is called with."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


MakeInputs = Callable[[], Inputs]


@dataclass(frozen=True)
class Case:
    """One model. `example` is what it is captured with; `others` are the situations its program is then tried in."""

    collection: str
    name: str
    build: Callable[[], nn.Module]
    example: MakeInputs
    others: dict[str, MakeInputs]


def images(*shape: int, count: int = 1) -> MakeInputs:
    """Makes `count` batches of random images."""
    return lambda: Inputs(tuple(torch.randn(shape) for _ in range(count)))
