"""Traps: modules as they are used in models: shared, listed, made on the way, called by keyword, with tuples as results.
Modes and dropout are in `modes.py`; hooks and parametrisations in `hooks.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from tests.traps.trap import Call, Collection

TRAPS = Collection()


def _sequence(n: int = 3) -> torch.Tensor:
    return torch.randn(n, 5, 8)


@TRAPS.model("LSTM and GRU", inputs=_sequence, sizes=(5, 1))
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 4, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.gru = nn.GRU(8, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        y, (hidden, cell) = self.lstm(x)
        z, last = self.gru(x)
        return y, hidden[-1] + cell[0], self.gru(z.repeat(1, 1, 2), last)[1]


@TRAPS.model(
    "a packed sequence", inputs=lambda n=3: (torch.randn(n, 6, 8), torch.arange(n).flip(0) % 6 + 1), sizes=(5, 1)
)
class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 4, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return y


@TRAPS.model("recurrent cells in a loop", inputs=_sequence)
class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, cell = torch.zeros(x.size(0), 4).to(x), torch.zeros(x.size(0), 4).to(x)
        outputs = []
        for step in range(x.size(1)):
            hidden, cell = self.cell(x[:, step], (hidden, cell))
            outputs.append(hidden)
        return torch.stack(outputs, 1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        mask = torch.triu(torch.ones(x.size(1), x.size(1), dtype=torch.bool), 1)
        y, weights = self.attention(x, x, x, attn_mask=mask, need_weights=True)
        return y + self.attention(x, x, value=y, need_weights=False)[0], weights


TRAPS.add("multi-head attention", Attention, inputs=_sequence, sizes=(5, 1))
# Without gradients torch has a faster way, with other strides, which it does not take while it is being watched.
_NOT_FAST = frozenset({"run without gradients"})
TRAPS.add("multi-head attention in evaluation", Attention, inputs=_sequence, sizes=(5, 1), mode="eval", skip=_NOT_FAST)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=torch.zeros(x.shape[:2], dtype=torch.bool))


TRAPS.add("a transformer encoder", Encoder, inputs=_sequence, sizes=(5, 1))
TRAPS.add("a transformer encoder in evaluation", Encoder, inputs=_sequence, sizes=(5, 1), mode="eval")


@TRAPS.model("a module used twice", sizes=(5, 1))
class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.again = self.linear
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.again(self.linear(x)).relu()) + self.norm(self.linear(x))


@TRAPS.model("tied weights", inputs=lambda n=3: torch.arange(n))
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4, padding_idx=0)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embedding(x)
        return self.head(y) + F.linear(y, self.embedding.weight)


@TRAPS.model("modules in a plain list", skip=frozenset({"double"}))
class PlainList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4), nn.Dropout(0.5)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@TRAPS.model("modules made in forward", skip=frozenset({"double"}))
class MadeInForward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Softmax(dim=-1)(nn.Linear(4, 2)(x)) + nn.LayerNorm(2)(x[:, :2])


@TRAPS.model("a module copied in forward")
class CopiedInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return copy.deepcopy(self.linear)(x) + self.linear(x)


@TRAPS.model("lists and dicts of modules")
class ListsOfModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.named = nn.ModuleDict({"relu": nn.ReLU(), "tanh": nn.Tanh()})
        self.sequence = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.scales = nn.ParameterList([torch.ones(4), torch.arange(4.0)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, scale in zip(self.layers[:2], self.scales, strict=True):
            x = layer(x) * scale
        for _, module in self.named.items():
            x = module(x)
        return self.sequence[1:](x) + len(self.layers)


class _Options(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *others: Any, scale: float = 1.0, extra: Any = None, **rest: Any) -> Any:
        y = self.linear(x) * scale + sum(others)
        return {"y": y if extra is None else y + extra["bias"], "rest": rest}


@TRAPS.model("modules called by keyword")
class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.options = _Options()
        self.linear = nn.Linear(4, 4)
        self.loss = nn.MSELoss()

    def forward(self, x: torch.Tensor) -> Any:
        y = self.options(x, 1.0, x, scale=2.0, extra={"bias": x[0:1] * 2}, unused=None)
        return y, self.linear(input=y["y"]), self.loss(input=y["y"], target=x)


@TRAPS.model("methods of submodules")
class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Options()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.linear.forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x) + self.inner.forward(x)["y"] + F.linear(x, self.inner.linear.weight)


TRAPS.add("a bound method", lambda: Methods().encode, skip=frozenset({"double"}))


@TRAPS.model("a module that is called in its own way")
class OwnCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x * 2) + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@TRAPS.model(
    "decorated forward with keywords", inputs=lambda n=3: Call((), {"x": torch.randn(n, 4), "scale": torch.ones(4) * 2})
)
class DecoratedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @staticmethod
    def _passed(function: Any) -> Any:
        import functools

        @functools.wraps(function)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            return function(self, *args, **kwargs)

        return wrapper

    @_passed
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.linear(x) * kwargs.get("scale", 1.0)


@TRAPS.model("attributes looked up by name")
class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number in range(3):
            setattr(self, f"layer{number}", nn.Linear(4, 4))
            self.register_parameter(f"scale{number}", nn.Parameter(torch.ones(4) * number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(3):
            x = getattr(self, f"layer{number}")(x) + getattr(self, f"scale{number}")
        return x + sum(value.sum() for value in self.parameters())


@TRAPS.model("padded sequences", inputs=lambda n=3: ([torch.randn(n, 4), torch.randn(2, 4)],))
class PaddedSequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, sequences: list[torch.Tensor]) -> torch.Tensor:
        return self.linear(pad_sequence(sequences, batch_first=True))


@TRAPS.model("convolutions with sizes", inputs=lambda n=3: torch.randn(1, 3, n + 4, n + 4))
class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.flatten = nn.Flatten()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.convolution(x))
        return self.up(y, output_size=x.shape[-2:]) + x + self.flatten(F.adaptive_max_pool2d(y, 1)).sum()


@TRAPS.model("a loss with weights", inputs=lambda n=3: (torch.randn(n, 4), torch.arange(n) % 4))
class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(weight=torch.arange(1.0, 5.0), label_smoothing=0.1)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(x, target) + F.nll_loss(x.log_softmax(-1), target)


def _padded(n: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, max(n, 2), 8), torch.tensor([max(n, 2), 1])


class EncoderOfItsOwn(nn.TransformerEncoder):
    pass


class PaddedEncoder(nn.Module):
    """Without gradients, torch's encoder packs what is not padded, and the padding becomes zeros."""

    def __init__(self, kind: type[nn.TransformerEncoder]) -> None:
        super().__init__()
        self.encoder = kind(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=torch.arange(x.shape[1])[None] >= lengths[:, None])


TRAPS.add(
    "an encoder of padded texts", lambda: PaddedEncoder(nn.TransformerEncoder), inputs=_padded, sizes=(5,), mode="eval"
)
TRAPS.add(
    "an encoder of padded texts of its own class",
    lambda: PaddedEncoder(EncoderOfItsOwn),
    inputs=_padded,
    sizes=(5,),
    mode="eval",
)
