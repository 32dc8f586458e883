"""What a model of transformers is fed, found by trying: from the names of its forward's parameters, its configuration, and the
errors that it raises itself. Which models there are is in `other_models`.
"""

from __future__ import annotations

import inspect
import itertools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.cases import Inputs
from benchmarks.coverage.shrinking import FIRST_MARKER

FIRST_WORD = 8
MOST_ATTEMPTS = 60
MOST_SECONDS = 6.0
# Given a batch and whether it is to be another size than the example's, a value.
Make = Callable[[int, bool], Any]


class Feeder:
    """Finds inputs that a model runs on, and makes more of the same kind."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = inspect.signature(model.forward).parameters
        self.recipe: dict[str, Make] = {}
        self.markers: dict[int, int] = {}

    def inputs(self, batch: int, other_size: bool = False) -> Inputs:
        """One batch by the recipe that was found."""
        values = {name: make(batch, other_size) for name, make in self.recipe.items()}
        return Inputs((), values)

    def search(self, run: Callable[[Inputs], Any]) -> None:
        """Find a recipe; raises the model's first error if there is none."""
        names = self._first_names()
        first: Exception | None = None
        tried = 0
        until = time.perf_counter() + MOST_SECONDS
        while tried < MOST_ATTEMPTS:
            wanted: list[str] = []
            for recipe in self._recipes(names):
                self.recipe = recipe
                tried += 1
                try:
                    torch.manual_seed(7)
                    run(self.inputs(3))
                    return
                except Exception as error:
                    first = first or error
                    wanted += [name for name in self._mentioned(str(error)) if name not in names]
                if tried >= MOST_ATTEMPTS or time.perf_counter() > until:
                    tried = MOST_ATTEMPTS
                    break
            if not wanted:
                break
            names = [*names, wanted[0]]
        raise first or ValueError(f"nothing is known about the inputs {list(self.parameters)}")

    def add_labels(self, run: Callable[[Inputs], Any]) -> None:
        """Give the model something to learn from, if it takes that and a way is found."""
        if "labels" not in self.parameters:
            return
        without = self.recipe
        for make in LABELS:
            self.recipe = {**without, "labels": make}
            try:
                torch.manual_seed(7)
                if getattr(run(self.inputs(3)), "loss", None) is not None:
                    return
            except Exception:
                continue
        self.recipe = without

    def _first_names(self) -> list[str]:
        required = [
            name
            for name, parameter in self.parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        ]
        main = getattr(self.model, "main_input_name", None)
        if isinstance(main, str) and main in self.parameters and main not in required:
            required.append(main)
        if "decoder_input_ids" in self.parameters and "decoder_input_ids" not in required:
            required.append("decoder_input_ids")
        if not required:
            required = [name for name in self.parameters if name in MAKERS][:1]
        return required

    def _mentioned(self, message: str) -> Iterator[str]:
        for word in re.findall(r"\w+", message):
            if word in self.parameters and word in MAKERS:
                yield word
        if "decoder" in message or "NoneType" in message:
            for name in ("decoder_input_ids", "attention_mask", "pixel_values", "input_ids", "input_features"):
                if name in self.parameters:
                    yield name

    def _recipes(self, names: list[str]) -> Iterator[dict[str, Make]]:
        configuration = self.model.config
        choices = [list(MAKERS[name](configuration)) if name in MAKERS else [] for name in names]
        for chosen in itertools.islice(itertools.product(*choices), MOST_ATTEMPTS):
            yield dict(zip(names, chosen, strict=True))


def find(configuration: Any, *names: str) -> Any:
    """The first field of a configuration, or of one inside it, that goes by one of the names."""
    for name in names:
        value = getattr(configuration, name, None)
        if value is not None:
            return value
    for value in vars(configuration).values():
        if hasattr(value, "attribute_map"):
            found = find(value, *names)
            if found is not None:
                return found
    return None


def _number(configuration: Any, default: int, *names: str) -> int:
    value = find(configuration, *names)
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value if isinstance(value, int) else default


# ---- one function a kind of input: the ways it may look, the likeliest first ----


def _words(configuration: Any, length: int = 7, longer: int = 11) -> Iterator[Make]:
    yield lambda batch, other: torch.randint(FIRST_WORD, FIRST_MARKER, (batch, longer if other else length))
    yield lambda batch, other: torch.randint(FIRST_WORD, FIRST_MARKER, (batch, 32 if other else 16))
    choices = 2
    yield lambda batch, other: torch.randint(FIRST_WORD, FIRST_MARKER, (batch, choices, longer if other else length))


def _ones(configuration: Any) -> Iterator[Make]:
    yield lambda batch, other: torch.ones(batch, 11 if other else 7, dtype=torch.long)
    yield lambda batch, other: torch.ones(batch, 32 if other else 16, dtype=torch.long)


def _pictures(configuration: Any) -> Iterator[Make]:
    channels = _number(configuration, 3, "num_channels", "in_channels", "in_chans", "n_channels")
    size = find(configuration, "image_size")
    sizes = [size] if isinstance(size, int) else [tuple(size)] if isinstance(size, (list, tuple)) else []
    frames = _number(configuration, 4, "num_frames", "frames_per_clip", "tubelet_size")
    for side in (*sizes, 64, 32, 224, 16):
        height, width = (
            side if isinstance(side, tuple) and len(side) == 2 else (side, side) if isinstance(side, int) else (64, 64)
        )
        for count in dict.fromkeys((channels, 3)):
            yield _picture(count, height, width)
            yield _video(frames, count, height, width)


def _picture(channels: int, height: int, width: int) -> Make:
    return lambda batch, other: torch.randn(batch, channels, height * (1 + other), width * (1 + other))


def _video(frames: int, channels: int, height: int, width: int) -> Make:
    return lambda batch, other: torch.randn(batch, frames, channels, height * (1 + other), width * (1 + other))


def _sound(configuration: Any) -> Iterator[Make]:
    bins = _number(configuration, 80, "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels")
    frames = _number(configuration, 100, "max_length")
    for length in (4000, 16000, 48000):
        yield lambda batch, other, length=length: torch.randn(batch, length + 1600 * other)
        yield lambda batch, other, length=length: torch.randn(batch, 1, length + 1600 * other)
    yield lambda batch, other: torch.randn(batch, frames, bins)
    yield lambda batch, other: torch.randn(batch, 1, frames, bins)


def _spectrum(configuration: Any) -> Iterator[Make]:
    bins = _number(
        configuration, 80, "num_mel_bins", "feature_size", "input_feat_size", "feature_projection_input_dim",
        "input_feat_per_channel", "n_mels", "mel_bins", "input_dim",
    )  # fmt: skip
    frames = 2 * _number(configuration, 50, "max_source_positions")
    for count in dict.fromkeys((bins, 80, 128, 160)):
        yield lambda batch, other, count=count: torch.randn(batch, count, frames * (1 + other))
        yield lambda batch, other, count=count: torch.randn(batch, frames * (1 + other), count)
        yield lambda batch, other, count=count: torch.randn(batch, count, 400 * (1 + other))
        yield lambda batch, other, count=count: torch.randn(batch, 1, 256 * (1 + other), count)


def _boxes(configuration: Any) -> Iterator[Make]:
    def boxes(batch: int, other: bool) -> torch.Tensor:
        corner = torch.randint(0, 30, (batch, 11 if other else 7, 2))
        return torch.cat([corner, corner + torch.randint(1, 30, corner.shape)], -1)

    yield boxes
    yield lambda batch, other: torch.randn(batch, 11 if other else 7, 8)


def _series(configuration: Any) -> Iterator[Make]:
    length = _number(configuration, 32, "context_length")
    channels = _number(configuration, 1, "num_input_channels", "input_size")
    lags = find(configuration, "lags_sequence") or [0]
    past = length + (max(lags) if isinstance(lags, (list, tuple)) else 0)
    yield lambda batch, other: torch.randn(batch, past, channels)
    yield lambda batch, other: torch.rand(batch, past)
    yield lambda batch, other: [torch.randn(20 + 8 * index + 4 * other) for index in range(batch)]


def _series_features(key: str) -> Callable[[Any], Iterator[Make]]:
    def features(configuration: Any) -> Iterator[Make]:
        lags = find(configuration, "lags_sequence") or [0]
        past = _number(configuration, 32, "context_length") + max(lags)
        length = past if key == "past" else _number(configuration, 8, "prediction_length")
        count = _number(configuration, 1, "num_time_features") if key != "values" else 1
        yield lambda batch, other: torch.randn(batch, length, count)
        yield lambda batch, other: torch.randn(batch, length)

    return features


def _observed(configuration: Any) -> Iterator[Make]:
    for make in _series(configuration):
        yield lambda batch, other, make=make: torch.ones_like(make(batch, other))


def _like_words(count: int) -> Callable[[Any], Iterator[Make]]:
    def makes(configuration: Any) -> Iterator[Make]:
        yield lambda batch, other: torch.randint(0, count, (batch, 11 if other else 7))

    return makes


def _width(configuration: Any) -> int:
    return _number(configuration, 32, "hidden_size", "d_model", "dim", "embed_dim")


def _embeddings(configuration: Any) -> Iterator[Make]:
    width = _width(configuration)
    yield lambda batch, other: torch.randn(batch, 11 if other else 7, width)


def _patches(configuration: Any) -> Iterator[Make]:
    """Pictures that were cut into patches already, one row each, all in one heap."""
    patch = _number(configuration, 14, "patch_size")
    channels = _number(configuration, 3, "num_channels", "in_channels", "in_chans")
    frames = _number(configuration, 2, "temporal_patch_size")
    for length in dict.fromkeys((channels * patch * patch * frames, channels * patch * patch)):
        yield lambda batch, other, length=length: torch.randn(batch * 16 * (1 + 3 * other), length)
        yield lambda batch, other, length=length: torch.randn(batch, 16, length)
    yield lambda batch, other: torch.randn(batch * 16, channels, patch, patch)
    yield from _embeddings(configuration)


def _grid(configuration: Any) -> Iterator[Make]:
    yield lambda batch, other: torch.tensor([[1, 8 if other else 4, 8 if other else 4]] * batch)
    yield lambda batch, other: torch.tensor([[4, 4]] * batch)


def _sides(configuration: Any) -> Iterator[Make]:
    yield lambda batch, other: torch.tensor([[4, 4]] * batch)


def _seen(configuration: Any) -> Iterator[Make]:
    yield lambda batch, other: torch.ones(batch, 16, dtype=torch.long)


def _heard(configuration: Any) -> Iterator[Make]:
    frames = 2 * _number(configuration, 50, "max_source_positions")
    for length in (frames, 400, 256):
        yield lambda batch, other, length=length: torch.ones(batch, length * (1 + other), dtype=torch.bool)


def _state(name: str) -> Callable[[Any], Iterator[Make]]:
    def makes(configuration: Any) -> Iterator[Make]:
        count = _number(configuration, 4, name) if name else 1
        yield lambda batch, other: torch.randn(batch, 11 if other else 7, count)

    return makes


def _codes(configuration: Any) -> Iterator[Make]:
    count = _number(configuration, 2, "num_codebooks", "num_quantizers", "codebook_num")
    yield lambda batch, other: torch.randint(0, 16, (batch, count, 11 if other else 7))
    yield lambda batch, other: torch.randint(0, 16, (batch, 11 if other else 7, count))
    yield lambda batch, other: torch.randint(0, 16, (batch, 11 if other else 7))


def _visual(name: str) -> Callable[[Any], Iterator[Make]]:
    def makes(configuration: Any) -> Iterator[Make]:
        width = _number(configuration, 32, name)
        yield lambda batch, other: torch.randn(batch, 5, width)

    return makes


def _points(configuration: Any) -> Iterator[Make]:
    yield lambda batch, other: torch.rand(batch, 1, 3 if other else 2, 2) * 10
    yield lambda batch, other: torch.rand(batch, 2, 9 if other else 5, 2)


MAKERS: dict[str, Callable[[Any], Iterator[Make]]] = {
    **dict.fromkeys(("input_ids", "decoder_input_ids", "qformer_input_ids", "task_inputs"), _words),
    **dict.fromkeys(("attention_mask", "decoder_attention_mask", "conditioning_attention_mask"), _ones),
    **dict.fromkeys(("pixel_values", "images", "prompt_pixel_values", "pixel_values_videos", "image_pixel_values"), _pictures),
    **dict.fromkeys(("input_values", "audio_values", "waveform", "conditioning_input_values"), _sound),
    **dict.fromkeys(("input_features", "spectrogram", "audio_mel", "audio_features"), _spectrum),
    "bbox": _boxes,
    "past_values": _series,
    "past_observed_mask": _observed,
    "past_time_features": _series_features("past"),
    "future_time_features": _series_features("future"),
    "future_values": _series_features("values"),
    "token_type_ids": _like_words(2),
    "inputs_embeds": _embeddings,
    "hidden_states": _patches,
    "flattened_patches": _patches,
    "grid_thw": _grid,
    "image_grid_thw": _grid,
    "spatial_shapes": _sides,
    "target_sizes": _sides,
    "input_features_mask": _heard,
    "audio_mel_mask": _heard,
    "pixel_attention_mask": _seen,
    "states": _state("state_dim"),
    "actions": _state("act_dim"),
    "rewards": _state(""),
    "returns_to_go": _state(""),
    "timesteps": _like_words(5),
    "audio_codes": _codes,
    "codes": _codes,
    "visual_feats": _visual("visual_feat_dim"),
    "visual_pos": _visual("visual_pos_dim"),
    "input_points": _points,
    "keypoints": _points,
}  # fmt: skip

LABELS: tuple[Make, ...] = (
    lambda batch, other: torch.randint(0, 2, (batch,)),
    lambda batch, other: torch.randint(FIRST_WORD, FIRST_MARKER, (batch, 11 if other else 7)),
    lambda batch, other: torch.randint(0, 2, (batch, 11 if other else 7)),
    lambda batch, other: torch.rand(batch, 2),
)
