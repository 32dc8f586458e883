"""The models that simulations are judged by, of many kinds, with the sizes of their inputs; and which took part in fitting.
They are made without weights of anyone: what is measured does not depend on values.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.simulating.llama import Llama


@dataclass(frozen=True)
class Case:
    """One model. `fit` says that its times were used to find what the host takes; all others are held out."""

    name: str
    kind: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any] | tuple[Any, ...]]
    fit: bool = False


def _image(side: int = 224) -> Callable[[int], tuple[Any, ...]]:
    return lambda batch: (torch.randn(batch, 3, side, side),)


def _tokens(length: int = 128, words: int = 30000) -> Callable[[int], dict[str, Any]]:
    return lambda batch: {"input_ids": torch.randint(0, words, (batch, length))}


def _vision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        place = _torchvision().models
        for part in name.split(".")[:-1]:
            place = getattr(place, part)
        if name in ("googlenet", "inception_v3"):
            options.update(init_weights=False)
        return getattr(place, name.split(".")[-1])(weights=None, **options)

    return build


def _torchvision() -> ModuleType:
    """torchvision, also where it was built for another torch than the one without CUDA that is here."""
    if torch.version.cuda is None:
        from benchmarks.coverage.torchvision_models import import_torchvision

        return import_torchvision()
    return importlib.import_module("torchvision")


def _language(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with contextlib.suppress(ModuleNotFoundError):
            _torchvision()  # transformers imports it where it is installed
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return build


# ---- models of our own, for kinds that the libraries have not ----


class UNet(nn.Module):
    """Contracting and expanding, with shortcuts."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = [width, width * 2, width * 4, width * 8]
        self.down = nn.ModuleList([_double(inner, outer) for inner, outer in zip([3, *sizes], sizes, strict=False)])
        self.middle = _double(sizes[-1], sizes[-1] * 2)
        self.up = nn.ModuleList([nn.ConvTranspose2d(size * 2, size, 2, 2) for size in reversed(sizes)])
        self.join = nn.ModuleList([_double(size * 2, size) for size in reversed(sizes)])
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join, skip in zip(self.up, self.join, reversed(kept), strict=True):
            x = join(torch.cat([up(x), skip], 1))
        return self.last(x)


def _double(inner: int, outer: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for first in (inner, outer):
        layers += [nn.Conv2d(first, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def generator(width: int = 64) -> nn.Sequential:
    """The generator of a DCGAN for images of 64x64."""
    layers: list[nn.Module] = [
        nn.ConvTranspose2d(100, width * 8, 4, 1, 0, bias=False),
        nn.BatchNorm2d(width * 8),
        nn.ReLU(True),
    ]
    for size in (8, 4, 2):
        layers += [nn.ConvTranspose2d(width * size, width * size // 2, 4, 2, 1, bias=False)]
        layers += [nn.BatchNorm2d(width * size // 2), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())


class Recommender(nn.Module):
    """Tables of categories and an MLP over their products with dense features."""

    def __init__(self, tables: int = 26, rows: int = 20000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, width) for _ in range(tables)])
        self.bottom = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU()
        )
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)
        )
        self.register_buffer("places", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = [table(categories[:, place]) for place, table in enumerate(self.tables)]
        features = torch.stack([x, *rows], 1)
        products = features @ features.transpose(1, 2)
        return self.top(torch.cat([x, products[:, self.places[0], self.places[1]]], 1))


class WordModel(nn.Module):
    """Two recurrent layers over words."""

    def __init__(self, words: int = 10000, width: int = 650) -> None:
        super().__init__()
        self.table, self.recurrent = nn.Embedding(words, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.recurrent(self.table(words))[0])


class Speech(nn.Module):
    """Convolutions over a spectrogram, then recurrent layers in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(80, 256, 5, 2, 2), nn.ReLU(), nn.Conv1d(256, 256, 5, 1, 2), nn.ReLU())
        self.recurrent = nn.GRU(256, 256, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(512, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(self.front(x).transpose(1, 2))[0]).log_softmax(-1)


class Mixer(nn.Module):
    """MLPs over places and over channels in turn."""

    def __init__(self, depth: int = 12, width: int = 768, places: int = 196) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.ModuleList([_MixerBlock(width, places) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class _MixerBlock(nn.Module):
    def __init__(self, width: int, places: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places = nn.Sequential(nn.Linear(places, 384), nn.GELU(), nn.Linear(384, places))
        self.channels = nn.Sequential(nn.Linear(width, width * 4), nn.GELU(), nn.Linear(width * 4, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Points(nn.Module):
    """PointNet: the same MLP for every point, then the largest of all."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inner, outer in ((3, 64), (64, 64), (64, 128), (128, 1024)):
            layers += [nn.Conv1d(inner, outer, 1), nn.BatchNorm1d(outer), nn.ReLU()]
        self.each = nn.Sequential(*layers)
        self.all = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 40))

    def forward(self, points: Tensor) -> Tensor:
        return self.all(self.each(points).amax(-1))


class Translator(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(512, 8, 4, 4, 2048, batch_first=True)
        self.head = nn.Linear(512, 8000)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.transformer(source, target))


class Decoder(nn.Module):
    """A language model of GPT-2's form and size; its head is the table of words."""

    def __init__(
        self, depth: int = 12, width: int = 768, heads: int = 12, words: int = 50257, longest: int = 1024
    ) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList([_DecoderBlock(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.table.weight)


class _DecoderBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.inner(self.norm1(x)).split(width, -1)
        query, key, value = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.outer(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm2(x))


class Encoder(nn.Module):
    """torch's own encoder, at the size of BERT."""

    def __init__(self, words: int = 30522, width: int = 768) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, activation="gelu", batch_first=True)
        self.table, self.layers = nn.Embedding(words, width), nn.TransformerEncoder(layer, 12)

    def forward(self, words: Tensor) -> Tensor:
        return self.layers(self.table(words))


class Listener(nn.Module):
    """Convolutions over a spectrogram, then an encoder over 1500 places, as in Whisper."""

    def __init__(self, width: int = 384) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(80, width, 3, padding=1), nn.GELU(), nn.Conv1d(width, width, 3, 2, 1), nn.GELU()
        )
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.front(x).transpose(1, 2))


def _words(length: int = 128, words: int = 30000) -> Callable[[int], tuple[Any, ...]]:
    return lambda batch: (torch.randint(0, words, (batch, length)),)


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


_LLAMA = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32000, "use_cache": False,
}  # fmt: skip

CASES = (
    Case("resnet50", "residual", _vision("resnet50"), _image(), fit=True),
    Case("mobilenet_v2", "inverted residual", _vision("mobilenet_v2"), _image(), fit=True),
    Case("bert", "encoder", _language("BertModel", "BertConfig"), _tokens(), fit=True),
    Case("vit_b_16", "vision transformer", _vision("vit_b_16"), _image(), fit=True),
    Case("word_lstm", "recurrent", WordModel, lambda batch: (torch.randint(0, 10000, (batch, 64)),), fit=True),
    Case("mlp", "mlp", _mlp, lambda batch: (torch.randn(batch, 784),), fit=True),
    Case("alexnet", "plain", _vision("alexnet"), _image()),
    Case("vgg16", "plain", _vision("vgg16"), _image()),
    Case("densenet121", "dense", _vision("densenet121"), _image()),
    Case("googlenet", "inception", _vision("googlenet", aux_logits=False), _image()),
    Case("inception_v3", "inception", _vision("inception_v3", aux_logits=False), _image(299)),
    Case("squeezenet1_1", "fire", _vision("squeezenet1_1"), _image()),
    Case("shufflenet_v2_x1_0", "shuffled", _vision("shufflenet_v2_x1_0"), _image()),
    Case("efficientnet_b0", "squeeze and excite", _vision("efficientnet_b0"), _image()),
    Case("mobilenet_v3_large", "squeeze and excite", _vision("mobilenet_v3_large"), _image()),
    Case("regnet_y_800mf", "grouped", _vision("regnet_y_800mf"), _image()),
    Case("resnext50_32x4d", "grouped", _vision("resnext50_32x4d"), _image()),
    Case("convnext_tiny", "convnext", _vision("convnext_tiny"), _image()),
    Case("swin_t", "windows", _vision("swin_t"), _image()),
    Case("maxvit_t", "hybrid", _vision("maxvit_t"), _image()),
    Case("fcn_resnet50", "segmentation", _vision("segmentation.fcn_resnet50", weights_backbone=None), _image()),
    Case(
        "deeplabv3_mobilenet",
        "segmentation",
        _vision("segmentation.deeplabv3_mobilenet_v3_large", weights_backbone=None),
        _image(),
    ),
    Case("r3d_18", "video", _vision("video.r3d_18"), lambda batch: (torch.randn(batch, 3, 8, 112, 112),)),
    Case("unet", "u-net", UNet, _image(128)),
    Case("dcgan", "generator", generator, lambda batch: (torch.randn(batch, 100, 1, 1),)),
    Case("gpt2", "decoder", _language("GPT2LMHeadModel", "GPT2Config", use_cache=False), _tokens(words=50000)),
    Case("llama", "decoder", _language("LlamaForCausalLM", "LlamaConfig", **_LLAMA), _tokens()),
    Case(
        "t5_small",
        "encoder and decoder",
        _language("T5Model", "T5Config", use_cache=False),
        lambda batch: {**_tokens()(batch), "decoder_input_ids": torch.randint(0, 30000, (batch, 32))},
    ),
    Case(
        "whisper_tiny",
        "audio",
        lambda: _language("WhisperModel", "WhisperConfig", d_model=384, encoder_layers=4, decoder_layers=4,
                          encoder_attention_heads=6, decoder_attention_heads=6)().encoder,
        lambda batch: (torch.randn(batch, 80, 3000),),
    ),
    Case(
        "clip",
        "image and text",
        _language("CLIPModel", "CLIPConfig"),
        lambda batch: {"input_ids": torch.randint(0, 40000, (batch, 77)), "pixel_values": torch.randn(batch, 3, 224, 224)},
    ),
    Case(
        "translator",
        "torch.nn.Transformer",
        Translator,
        lambda batch: (torch.randn(batch, 64, 512), torch.randn(batch, 48, 512)),
    ),
    Case("decoder", "decoder", Decoder, _words()),
    Case(
        "turned_decoder",
        "decoder",
        lambda: Llama(layers=12, width=1024, hidden=2816, heads=16, key_heads=8, words=32000),
        _words(),
    ),
    Case("encoder", "torch.nn.TransformerEncoder", Encoder, _words()),
    Case("listener", "audio", Listener, lambda batch: (torch.randn(batch, 80, 3000),)),
    Case("mixer", "mlp-mixer", Mixer, _image()),
    Case("speech_gru", "speech", Speech, lambda batch: (torch.randn(batch, 80, 400),)),
    Case("pointnet", "points", Points, lambda batch: (torch.randn(batch, 3, 1024),)),
    Case(
        "recommender",
        "recommender",
        Recommender,
        lambda batch: (torch.randn(batch, 13), torch.randint(0, 20000, (batch, 26))),
    ),
)  # fmt: skip

BATCHES = (1, 16, 128)
PRECISIONS = ("fp32", "tf32", "fp16")


def call_of(case: Case, batch: int, dtype: torch.dtype, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a case on a device."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else None)

    found = case.inputs(batch)
    if isinstance(found, dict):
        return (), {name: moved(value) for name, value in found.items()}
    return tuple(map(moved, found)), {}
