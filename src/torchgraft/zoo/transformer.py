"""A Transformer over token ids with its attention written out, as decoder (each token sees those before it) or encoder.
It takes shapes apart and builds its positions and mask from traced values only, so a symbolic trace holds for any size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchgraft.errors import GraftError


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Attention spelled in matrix products and a softmax."""
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    if causal:
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return torch.softmax(scores, dim=-1) @ value


def fused_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """The same attention in one call, for which torch picks a fast kernel."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal)


ATTENTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, bool], Tensor]] = {
    "softmax": softmax_attention,
    "fused": fused_attention,
}


class Attention(nn.Module):
    """Self-attention with several heads."""

    def __init__(self, width: int, heads: int, causal: bool, attention: str) -> None:
        super().__init__()
        if width % heads:
            raise GraftError(
                f"cannot split attention: width {width} is not a multiple of {heads} heads\nchange one of them"
            )
        if attention not in ATTENTIONS:
            raise GraftError(f"unknown attention {attention!r}\nuse one of: {', '.join(ATTENTIONS)}")
        self.heads = heads
        self.causal = causal
        self.attend = ATTENTIONS[attention]
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        query = self.query(x).view(b, t, self.heads, d // self.heads).transpose(1, 2)
        key = self.key(x).view(b, t, self.heads, d // self.heads).transpose(1, 2)
        value = self.value(x).view(b, t, self.heads, d // self.heads).transpose(1, 2)
        mixed = self.attend(query, key, value, self.causal)
        return self.output(mixed.transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    """Attention, then a small network on each position, each normalised before and added to what came in."""

    def __init__(self, width: int, heads: int, causal: bool, attention: str, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal, attention)
        self.network_norm = nn.LayerNorm(width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.network(self.network_norm(x)))


class Transformer(nn.Module):
    """Token ids in; for each position, one score for each word of the vocabulary out."""

    def __init__(
        self,
        layers: int = 12,
        width: int = 256,
        heads: int = 8,
        vocabulary: int = 4096,
        positions: int = 256,
        causal: bool = True,
        attention: str = "softmax",
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, heads, causal, attention, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        # Counting ones gives 0, 1, 2, ... for any length; torch.arange(ids.shape[1]) refuses a traced size in torch.fx.
        places = torch.ones_like(ids).cumsum(dim=1) - 1
        x = self.dropout(self.tokens(ids) + self.positions(places))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def transformer(layers: int = 12, **options: Any) -> Transformer:
    """A Transformer with the given number of layers; `options` are those of the class."""
    return Transformer(layers, **options)


def token_inputs(
    generator: torch.Generator, batch: int, length: int = 32, vocabulary: int = 4096
) -> tuple[Tensor, ...]:
    """A batch of random token ids."""
    return (torch.randint(vocabulary, (batch, length), generator=generator),)
