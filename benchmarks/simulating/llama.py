"""A Llama written by hand, at any size, without weights where it is made on meta; and how it would train on many devices:

python -m benchmarks.simulating.llama --stages 8 --replicas 8
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchgraft

SIZES = {
    "70b": {"layers": 80, "width": 8192, "hidden": 28672, "heads": 64, "key_heads": 8, "words": 128256},
    "8b": {"layers": 32, "width": 4096, "hidden": 14336, "heads": 32, "key_heads": 8, "words": 128256},
    "tiny": {"layers": 8, "width": 256, "hidden": 512, "heads": 8, "key_heads": 2, "words": 1000},
}


class Norm(nn.Module):
    """RMS norm, in fp32 whatever comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Layer(nn.Module):
    """Attention with fewer keys than queries, and a gated feed-forward part."""

    def __init__(self, width: int, hidden: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head = heads, key_heads, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, key_heads * self.head, bias=False)
        self.value = nn.Linear(width, key_heads * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.before, self.after = Norm(width), Norm(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.before(x)
        q = turned(self.query(y).view(batch, length, self.heads, self.head).transpose(1, 2), cos, sin)
        k = turned(self.key(y).view(batch, length, self.key_heads, self.head).transpose(1, 2), cos, sin)
        v = self.value(y).view(batch, length, self.key_heads, self.head).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.key_heads, 1) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Positions, as turns of pairs."""
    one, other = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-other, one], dim=-1) * sin


class Llama(nn.Module):
    """Words, layers, and a head."""

    def __init__(self, layers: int, width: int, hidden: int, heads: int, key_heads: int, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList([Layer(width, hidden, heads, key_heads) for _ in range(layers)])
        self.norm, self.head = Norm(width), nn.Linear(width, words, bias=False)
        self.size = width // heads

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        places = torch.arange(ids.shape[1], device=ids.device).float()
        steps = 10000 ** (-torch.arange(0, self.size, 2, device=ids.device).float() / self.size)
        angles = torch.cat([places[:, None] * steps] * 2, dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def main() -> None:
    """Print the step, and how long it took to say so."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="70b")
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--chunks", type=int, default=1)
    chosen = parser.parse_args()
    started = time.perf_counter()
    with torch.device("meta"):
        model = Llama(**SIZES[chosen.size])
    ids = torch.empty(chosen.microbatches, chosen.length, dtype=torch.long, device="meta")
    found = torchgraft.simulate(
        model,
        ids,
        machines=[chosen.machine] * chosen.stages,
        replicas=chosen.replicas,
        microbatches=chosen.microbatches,
        schedule=chosen.schedule,
        chunks=chosen.chunks,
        precision="bf16",
        mode="graph",
        optimizer=torch.optim.AdamW,
        recompute=True,
        shard_optimizer=True,
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    sys.stdout.write(
        f"{found}\n{parameters / 1e9:.1f} billion parameters; simulated in {time.perf_counter() - started:.0f} s\n"
    )


if __name__ == "__main__":
    main()
