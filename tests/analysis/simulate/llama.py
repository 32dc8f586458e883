"""A Llama written by hand: what models of this kind compute, at any size, without weights where it is made on meta."""

import torch
from torch import nn
from torch.nn import functional as F


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, width, hidden, heads, key_heads):
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

    def forward(self, x, cos, sin):
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


def turned(x, cos, sin):
    one, other = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-other, one], dim=-1) * sin


class Llama(nn.Module):
    def __init__(self, layers, width, hidden, heads, key_heads, words):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList([Layer(width, hidden, heads, key_heads) for _ in range(layers)])
        self.norm, self.head = Norm(width), nn.Linear(width, words, bias=False)
        self.size = width // heads

    def forward(self, ids):
        x = self.embed(ids)
        places = torch.arange(ids.shape[1], device=ids.device).float()
        steps = 10000 ** (-torch.arange(0, self.size, 2, device=ids.device).float() / self.size)
        angles = torch.cat([places[:, None] * steps] * 2, dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))
