"""Traps: kinds of tensors and parts of torch that programs seldom use: sparse, quantised, nested, masked, complex, distributions,
observers, embeddings in bags, packed weights. Common layers are in `layers.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, rnn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from tests.traps.trap import Call, Collection

TRAPS = Collection()
_NO_COPIES = frozenset({"pickled", "deep copy"})


@TRAPS.function(
    "sparse tensors given",
    inputs=lambda n=3: (torch.eye(n, 4).to_sparse(), torch.randn(4, 2)),
    skip=frozenset({"gradients", "captured without gradients", "double"}),
    sizes=(5, 1),
)
def sparse_given(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(x, y) + x.coalesce().values().sum()


@TRAPS.function("compressed rows", sizes=(5, 1))
def compressed_rows(x: torch.Tensor) -> torch.Tensor:
    rows = (x > 0).to(x.dtype).to_sparse_csr()
    return rows @ torch.ones(4, 2, dtype=x.dtype) + rows.values().sum()


@TRAPS.function("nested tensors", sizes=(5, 2))
def nested(x: torch.Tensor) -> torch.Tensor:
    parts = torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)
    return torch.nested.to_padded_tensor(parts * 2, 0.0).sum(1)


@TRAPS.function("quantised on the way", sizes=(5, 1))
def quantised(x: torch.Tensor) -> torch.Tensor:
    small = torch.quantize_per_tensor(x.float().detach(), 0.1, 10, torch.quint8)
    return small.dequantize() + small.q_scale() + small.int_repr().float()


@TRAPS.function("fake quantisation", sizes=(5, 1))
def fake_quantised(x: torch.Tensor) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127) * 2


@TRAPS.model("observers", sizes=(5, 1), skip=frozenset({"double"}))
class Observed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.observer = torch.ao.quantization.MinMaxObserver()
        self.quantise = torch.ao.quantization.FakeQuantize()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.observer(self.linear(x))
        return self.quantise(x) + self.observer.max_val


def _dynamically_quantised() -> nn.Module:
    torch.backends.quantized.engine = "onednn" if "onednn" in torch.backends.quantized.supported_engines else "fbgemm"
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), {nn.Linear})


TRAPS.add(
    "a model quantised dynamically",
    _dynamically_quantised,
    mode="eval",
    sizes=(5, 1),
    skip=frozenset({"double", "other mode"}),
)


@TRAPS.function("complex numbers on the way", sizes=(5, 1))
def complex_numbers(x: torch.Tensor) -> torch.Tensor:
    z = torch.view_as_complex(x.reshape(-1, 2, 2).contiguous())
    z = z * torch.polar(torch.ones_like(z.real), z.imag) + z.conj().resolve_conj()
    return torch.view_as_real(z).flatten(1) + (z.is_complex() + z.real.dtype.itemsize)


@TRAPS.function(
    "complex numbers given",
    inputs=lambda n=3: torch.randn(n, 4, dtype=torch.complex64),
    others={"real": lambda: torch.randn(3, 4)},
    skip=frozenset({"double"}),
)
def complex_given(x: torch.Tensor) -> torch.Tensor:
    return x.abs() if x.is_complex() else x * 2


@TRAPS.function(
    "half precision given",
    inputs=lambda n=3: torch.randn(n, 4).half(),
    others={"brain": lambda: torch.randn(3, 4).bfloat16()},
    skip=frozenset({"double"}),
)
def half_given(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * 2).type_as(x) + x.new_ones(4)


@TRAPS.model("embeddings in bags", inputs=lambda n=3: (torch.arange(2 * n) % 5, torch.arange(n) * 2), sizes=(5, 1))
class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(5, 4, mode="max")
        self.sums = nn.EmbeddingBag(5, 4, mode="sum", include_last_offset=False, padding_idx=0)
        self.limited = nn.Embedding(5, 4, max_norm=0.5, scale_grad_by_freq=True)

    def forward(self, tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.bag(tokens, offsets) + self.sums(tokens, offsets) + self.limited(tokens[: offsets.shape[0]])


@TRAPS.model("recurrent layers of every kind", inputs=lambda n=3: torch.randn(n, 5, 4), sizes=(5, 1))
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=2, batch_first=True, bidirectional=True, dropout=0.5, proj_size=2)
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.rnn = nn.RNN(4, 4, batch_first=True, nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> Any:
        first, (hidden, cell) = self.lstm(x)
        second, state = self.gru(first, torch.zeros(1, x.size(0), 4, dtype=x.dtype))
        return self.rnn(second)[0], hidden, cell, state


@TRAPS.model(
    "packed sequences through layers",
    inputs=lambda n=3: (torch.randn(n, 5, 4), torch.arange(n, 0, -1).clamp(max=5)),
    others={"shorter": lambda: (torch.randn(3, 5, 4), torch.tensor([1, 3, 2]))},
    sizes=(4, 1),
)
class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, state = self.gru(packed)
        padded, found = rnn.pad_packed_sequence(output, batch_first=True, total_length=x.shape[1])
        return padded * 2, state, found


@TRAPS.model(
    "attention with masks and weights",
    inputs=lambda n=3: Call(
        (torch.randn(2, n, 4), torch.randn(2, n, 4)), {"mask": torch.zeros(2, n, dtype=torch.bool)}
    ),
    sizes=(5, 1),
)
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True, add_bias_kv=True)
        self.decoder = nn.TransformerDecoderLayer(4, 2, 8, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> Any:
        causal = nn.Transformer.generate_square_subsequent_mask(x.size(1), dtype=x.dtype)
        y, weights = self.attention(x, memory, memory, key_padding_mask=mask, average_attn_weights=False)
        return self.decoder(y, memory, tgt_mask=causal, tgt_is_causal=True), weights


@TRAPS.model("a whole transformer", inputs=lambda n=3: (torch.randn(2, n, 4), torch.randn(2, 3, 4)), sizes=(5, 1))
class WholeTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(4, 2, 1, 1, 8, batch_first=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.transformer(x, y)


@TRAPS.model("every way to reparametrise", sizes=(5, 1), skip=_NO_COPIES)
class Reparametrised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = weight_norm(nn.Linear(4, 4), dim=None)
        self.second = spectral_norm(nn.Linear(4, 4), n_power_iterations=2)
        self.third = orthogonal(nn.Linear(4, 4), use_trivialization=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)))


class Symmetric(nn.Module):
    """A symmetric matrix."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Noisy(nn.Module):
    """Noise while training."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + torch.randn_like(weight) if self.training else weight


@TRAPS.model("parametrisations on top of one another", sizes=(5, 1), skip=_NO_COPIES)
class Parametrised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        parametrize.register_parametrization(self.linear, "weight", Symmetric())
        parametrize.register_parametrization(self.linear, "weight", Noisy())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            y = self.linear(x) + self.linear(x)
        return y + self.linear.weight.sum()


@TRAPS.model("weights tied in three ways", inputs=lambda n=3: torch.arange(n) % 4, sizes=(5, 1))
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.alias = self.embedding

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.alias(tokens)
        return self.head(x) + F.linear(x, self.head.weight.t()) + self.embedding.weight.sum()


@TRAPS.model("norms with running statistics", inputs=lambda n=3: torch.randn(n, 4, 5), sizes=(5, 2))
class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(4, momentum=None)
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True)
        self.free = nn.BatchNorm1d(4, track_running_stats=False)
        self.group = nn.GroupNorm(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.group(self.free(self.instance(self.batch(x))))


@TRAPS.model("layers that draw", inputs=lambda n=3: torch.randn(n, 4, 6, 6), sizes=(5, 1))
class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Dropout2d(0.3),
            nn.AlphaDropout(0.3),
            nn.FeatureAlphaDropout(0.3),
            nn.RReLU(),
            nn.FractionalMaxPool2d(2, output_size=3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@TRAPS.function("draws of every kind", sizes=(5, 1))
def every_draw(x: torch.Tensor) -> torch.Tensor:
    y = (
        torch.bernoulli(x.sigmoid())
        + x.sigmoid().bernoulli()
        + torch.empty_like(x).exponential_()
        + torch.poisson(x.exp().detach())
    )
    y = (
        y
        + torch.normal(x.detach(), 1.0)
        + torch.multinomial(x.softmax(-1), 2).sum()
        + torch.randint_like(x, 3)
        + torch.rand_like(x)
    )
    return (
        y
        + F.gumbel_softmax(x, hard=True)
        + F.rrelu(x, training=True)
        + torch.nn.init.normal_(torch.empty(4))
        + x.clone().uniform_()
    )


@TRAPS.function("seeds and states on the way", sizes=(5, 1))
def seeds(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(x.shape[0])
    y = torch.rand(4)
    state = torch.get_rng_state()
    z = torch.rand(4)
    torch.set_rng_state(state)
    return x + y + z - torch.rand(4)


@TRAPS.function("the seed asked for")
def seed_asked(x: torch.Tensor) -> torch.Tensor:
    return x * (torch.initial_seed() % 7 + 1)


@TRAPS.function("distributions of every kind", sizes=(5, 1))
def distributions(x: torch.Tensor) -> torch.Tensor:
    normal = torch.distributions.Normal(x, x.exp())
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(logits=x), torch.distributions.Normal(x, torch.ones_like(x))
    )
    bound = torch.distributions.TransformedDistribution(normal, [torch.distributions.transforms.TanhTransform()])
    sample = bound.rsample()
    kl = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0))
    return normal.log_prob(normal.rsample()) + mixture.sample().unsqueeze(-1) + sample + kl + normal.entropy()


@TRAPS.function("losses of every kind", inputs=lambda n=3: (torch.randn(n, 4), torch.arange(n) % 4), sizes=(5, 1))
def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    target = F.one_hot(y, 4).to(x.dtype)
    total = (
        F.cross_entropy(x, y, label_smoothing=0.1)
        + F.nll_loss(x.log_softmax(-1), y)
        + F.binary_cross_entropy_with_logits(x, target)
    )
    total = (
        total
        + F.kl_div(x.log_softmax(-1), target, reduction="batchmean")
        + F.huber_loss(x, target)
        + F.cosine_similarity(x, target).mean()
    )
    return (
        total
        + F.triplet_margin_loss(x, target, x + 1)
        + nn.CTCLoss()(x.log_softmax(-1).unsqueeze(1), y.unsqueeze(0)[:, :1] + 1, (x.shape[0],), (1,))
    )


@TRAPS.function(
    "linear algebra",
    inputs=lambda n=3: torch.randn(n, 3, 3),
    sizes=(5, 1),
    skip=frozenset({"gradients", "captured without gradients"}),
)
def linear_algebra(x: torch.Tensor) -> Any:
    square = x @ x.transpose(-1, -2) + torch.eye(3, dtype=x.dtype)
    return (
        torch.linalg.cholesky(square),
        torch.linalg.eigh(square).eigenvalues,
        torch.linalg.solve(square, x),
        torch.linalg.qr(x).R.abs(),
        torch.linalg.slogdet(square),
    )


@TRAPS.function("writes through odd views", sizes=(5, 2))
def odd_views(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.diagonal().fill_(1)
    y.t()[0].mul_(2)
    y[..., 1:3].transpose(0, 1).add_(1)
    y.unfold(1, 2, 2)[:, 0].zero_()
    torch.as_strided(y, (2, 2), (1, 1)).add_(0)
    y.view(-1)[::3].neg_()
    y.masked_scatter_(y > 2, torch.full_like(y, 9.0))
    return y.index_add_(0, torch.zeros(1, dtype=torch.long), torch.ones(1, 4, dtype=y.dtype)).scatter_(
        1, torch.zeros(2, 1, dtype=torch.long), 5.0
    )


@TRAPS.function("written where it is expanded", sizes=(5, 2))
def expanded_written(x: torch.Tensor) -> torch.Tensor:
    row = x.sum(0, keepdim=True)
    wide = row.expand(x.shape[0], -1)
    row.add_(1)
    return wide * x


@TRAPS.function("many tensors at once", sizes=(5, 1))
def many_at_once(x: torch.Tensor) -> Any:
    parts = [x * 1, x * 2]
    torch._foreach_add_(parts, 1.0)
    scaled = torch._foreach_mul(parts, [2.0, 3.0])
    return parts, scaled, torch._foreach_norm(parts)


@TRAPS.function("out of every kind", sizes=(5, 1))
def out_of_every_kind(x: torch.Tensor) -> Any:
    values, indices = torch.empty(0, dtype=x.dtype), torch.empty(0, dtype=torch.long)
    torch.max(x.detach(), 1, out=(values, indices))
    total = torch.empty(4, dtype=x.dtype)
    torch.sum(x.detach(), 0, out=total)
    torch.add(total, 1, out=total)
    return values, indices, total


@TRAPS.function("tensors swapped", sizes=(5, 1))
def swapped(x: torch.Tensor) -> torch.Tensor:
    y, z = x * 2, x * 3
    y, z = z, y
    y.set_(y.detach()) if not y.requires_grad else None
    return y - z


@TRAPS.model("the running mean by formula", sizes=(5, 1))
class RunningFormula(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.count += x.shape[0]
                self.mean += (x - self.mean).sum(0) / self.count
        return (x - self.mean) / (self.count.clamp(min=1).sqrt() + 1)


@TRAPS.model(
    "a memory that is written by position",
    sizes=(2, 1),
    inputs=lambda n=3: (torch.randn(n, 4), 1),
    others={"later": lambda: (torch.randn(3, 4), 2)},
)
class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(8, 4), persistent=False)

    def forward(self, x: torch.Tensor, position: int) -> torch.Tensor:
        self.memory[position : position + x.shape[0]] = x.detach()
        return self.memory[: position + x.shape[0]].clone() * 2


@TRAPS.model("a queue of features", sizes=(2, 1))
class FeatureQueue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(6, 4))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = int(self.pointer)
        self.queue[start : start + x.shape[0]] = x.detach()[: 6 - start]
        self.pointer[0] = (start + x.shape[0]) % 6
        return x @ self.queue.t().clone()


@TRAPS.model("an exponential average of weights", sizes=(5, 1), skip=_NO_COPIES)
class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.average = torch.optim.swa_utils.AveragedModel(self.linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.update_parameters(self.linear)
        return self.linear(x) - self.average(x)
