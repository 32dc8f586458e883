"""Traps: sizes that only flow into other torch calls, where a program captured at one size must be right at another.
Python that computes with sizes or branches on them is in `sizes.py` and `branches.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.traps.trap import Collection

TRAPS = Collection()


def _picture(n: int = 3) -> torch.Tensor:
    return torch.randn(2, 3, n + 3, n + 5)


def _sequence(n: int = 3) -> torch.Tensor:
    return torch.randn(2, n, 8)


@TRAPS.function("view by sizes", inputs=_sequence)
def view_by_sizes(x: torch.Tensor) -> torch.Tensor:
    b, t, d = x.shape
    return x.view(b, t, 2, d // 2).transpose(1, 2).reshape(b * 2, t, d // 2)


@TRAPS.function("expand and repeat by sizes")
def expand_and_repeat(x: torch.Tensor) -> torch.Tensor:
    row = torch.arange(4.0, dtype=x.dtype)
    return row.expand(x.size(0), -1) + row.repeat(x.shape[0], 1) * x


@TRAPS.function("factories by sizes", devices=True)
def factories(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[0]
    zeros = torch.zeros(n, 4, device=x.device) + torch.ones(x.shape, device=x.device, dtype=x.dtype)
    return zeros + x.new_full((n, 4), 2.0) + torch.arange(n, device=x.device).unsqueeze(1) + torch.eye(n, 4).to(x)


@TRAPS.function("constants on the input's device", devices=True)
def constants_on_device(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device) * torch.linspace(0, 1, 4, device=x.device)


@TRAPS.function("padding to a multiple", inputs=lambda n=3: torch.randn(2, n), sizes=(5, 4, 1))
def padding(x: torch.Tensor) -> torch.Tensor:
    missing = (-x.shape[1]) % 4
    return F.pad(x, (0, missing)).view(2, -1, 4)


@TRAPS.function("padding if needed", inputs=lambda n=3: torch.randn(2, n), sizes=(5, 4, 1))
def padding_if_needed(x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] % 4 != 0:
        x = F.pad(x, (0, 4 - x.shape[1] % 4))
    return x.view(2, -1, 4)


@TRAPS.function("interpolation by sizes", inputs=_picture)
def interpolation(x: torch.Tensor) -> torch.Tensor:
    h, w = x.shape[-2:]
    small = F.interpolate(x, size=(h // 2, w // 2), mode="bilinear", align_corners=False)
    return F.interpolate(small, size=x.shape[2:], mode="nearest") + F.interpolate(x, scale_factor=2)[..., ::2, ::2]


@TRAPS.function("pooling over the whole picture", inputs=_picture)
def pooling(x: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(x, x.size()[2:]) + F.adaptive_avg_pool2d(x, (1, 1)) + F.max_pool2d(x, kernel_size=x.shape[2:])


@TRAPS.function("windows of a picture", inputs=lambda n=3: torch.randn(1, 2 * n, 2 * n, 3), sizes=(5, 1))
def windows(x: torch.Tensor) -> torch.Tensor:
    b, h, w, c = x.shape
    x = torch.roll(x, shifts=(-1, -1), dims=(1, 2))
    return x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 4, c)


@TRAPS.model("positional embeddings sliced", inputs=_sequence)
class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 16, 8))
        self.embedding = nn.Embedding(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = x.size(1)
        positions = torch.arange(t, device=x.device).unsqueeze(0).expand(x.size(0), t)
        return x + self.table[:, :t] + self.embedding(positions)


@TRAPS.model("a causal mask from a buffer", inputs=_sequence)
class CausalMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).bool(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = x.shape[1]
        scores = x @ x.transpose(1, 2) / x.shape[-1] ** 0.5
        return scores.masked_fill(~self.mask[:t, :t], float("-inf")).softmax(-1) @ x


@TRAPS.function("masks from lengths", inputs=lambda n=3: (torch.randn(n, 6, 2), torch.arange(n) % 5 + 1))
def masks_from_lengths(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    mask = torch.arange(x.size(1))[None, :] < lengths[:, None]
    return x.masked_fill(~mask.unsqueeze(-1), 0.0).sum(1) / lengths.unsqueeze(1)


@TRAPS.function("the longest length", inputs=lambda n=3: (torch.randn(n, 9, 2), torch.arange(n) % 5 + 1), sizes=(5, 1))
def longest_length(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    longest = int(lengths.max())
    return x[:, :longest] * (torch.arange(longest) < lengths.unsqueeze(1)).unsqueeze(-1)


@TRAPS.function("triangular indices", inputs=lambda n=3: torch.randn(n, n), sizes=(5, 2))
def triangular(x: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.triu_indices(x.size(0), x.size(1), 1)
    return x[rows, columns]


@TRAPS.function("broadcasting at one", inputs=lambda n=3: (torch.randn(n, 4), torch.randn(n, 1)))
def broadcasting(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y + y.expand_as(x) + torch.broadcast_to(y, x.shape)


@TRAPS.function("shapes broadcast", inputs=lambda n=3: (torch.randn(n, 4), torch.randn(n, 1)))
def shapes_broadcast(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.zeros(torch.broadcast_shapes(x.shape, y.shape)) + x


@TRAPS.function("strided by hand", sizes=(5, 2))
def strided(x: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(x, (x.size(0), 2), (x.stride(0), 1)) * 2


@TRAPS.function("data-dependent shapes", others={"more": lambda: torch.rand(3, 4)})
def data_dependent(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values, counts = torch.unique((x * 2).long(), return_counts=True)
    return torch.nonzero(x > 0), torch.masked_select(x, x > 0), values, counts, x[(x > 0).any(1)]


@TRAPS.function("indices where", others={"more": lambda: torch.rand(3, 4)})
def indices_where(x: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.where(x > 0)
    return torch.zeros(x.shape, dtype=x.dtype).index_put((rows, columns), x[rows, columns] * 2)


@TRAPS.function("repeat by a tensor", inputs=lambda n=3: (torch.randn(n, 2), torch.arange(n)), sizes=(5, 2, 1))
def repeat_by_tensor(x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(times, dim=0)


@TRAPS.function("one hot without a number of classes", inputs=lambda n=3: torch.arange(n), sizes=(5, 2, 1))
def one_hot(x: torch.Tensor) -> torch.Tensor:
    return F.one_hot(x)


@TRAPS.function("split by computed sizes", sizes=(5, 2))
def split_by_sizes(x: torch.Tensor) -> torch.Tensor:
    half = x.size(0) // 2
    first, second = torch.split(x, [half, x.size(0) - half])
    return first.sum(0) - second.sum(0)


@TRAPS.function("chunks of a feature", inputs=_sequence)
def feature_chunks(x: torch.Tensor) -> torch.Tensor:
    query, key = x.chunk(2, dim=-1)
    return F.scaled_dot_product_attention(query, key, key, is_causal=True)


@TRAPS.function("complex numbers", inputs=lambda n=3: torch.randn(2, n, 4))
def complex_numbers(x: torch.Tensor) -> torch.Tensor:
    angles = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), torch.tensor([1.0, 0.1], dtype=x.dtype))
    turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2) + turned.real.sum() + turned.abs().mean()


@TRAPS.function("fourier transform by size", inputs=lambda n=3: torch.randn(2, n), sizes=(5, 4, 1))
def fourier(x: torch.Tensor) -> torch.Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[-1])


@TRAPS.function("sliding windows", inputs=lambda n=3: torch.randn(2, n + 2))
def sliding(x: torch.Tensor) -> torch.Tensor:
    return x.unfold(1, 3, 1).mean(-1) + x[:, : x.size(1) - 2] + x[..., -1:] + x.narrow(1, 0, x.size(1) - 2)
