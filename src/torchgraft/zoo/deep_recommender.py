"""DeepRecommender (Kuchaiev and Ginsburg, 2017): an autoencoder that fills in the ratings a user has not given.
Sizes default to those for the Netflix prize data; data and training are not here.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def dense(sizes: Sequence[int], last_activation: bool = True) -> nn.Sequential:
    """Linear layers through the given sizes with a SELU after each, or after each but the last."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.SELU()]
    return nn.Sequential(*layers if last_activation else layers[:-1])


class DeepRecommender(nn.Module):
    """Ratings of all items in (0 where there is none), predicted ratings of all items out."""

    def __init__(
        self,
        items: int = 17768,
        hidden: Sequence[int] = (512, 512, 1024),
        dropout: float = 0.8,
        last_activation: bool = True,
    ) -> None:
        super().__init__()
        sizes = [items, *hidden]
        self.encoder = dense(sizes)
        self.dropout = nn.Dropout(dropout)
        self.decoder = dense(sizes[::-1], last_activation)

    def forward(self, ratings: Tensor) -> Tensor:
        return self.decoder(self.dropout(self.encoder(ratings)))


def rating_inputs(generator: torch.Generator, batch: int, items: int = 17768) -> tuple[Tensor, ...]:
    """Users who rated about one item in a hundred with 1 to 5 stars."""
    stars = torch.randint(1, 6, (batch, items), generator=generator)
    rated = torch.rand(batch, items, generator=generator) < 0.01
    return (stars * rated.float(),)
