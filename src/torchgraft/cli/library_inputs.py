"""What a model of transformers is fed on the command line: texts of --input, by the names of the parameters of its forward and
the fields of its configuration, tried until it runs. How the model is made is in `libraries.py`.
"""

from __future__ import annotations

import copy
import itertools
import re
import time
import warnings
from collections.abc import Iterable, Iterator
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_LENGTH = 16
# Trying is bounded, because a model may run for long or want what no text of --input can say.
_MOST_ATTEMPTS = 60
_MOST_SECONDS = 10.0
_WORDS = ("input_ids", "decoder_input_ids", "qformer_input_ids", "task_inputs")
_PICTURES = ("pixel_values", "pixel_values_videos", "images")
_SOUNDS = ("input_values", "audio_values")
_SPECTRA = ("input_features", "audio_features")
# What a model may miss when it complains of a None: an encoder's input rather than more of a decoder's.
_USUAL = ("pixel_values", "input_ids", "input_features", "input_values", "decoder_input_ids")


def fitting_inputs(model: nn.Module, configuration: Any) -> list[str]:
    """Texts of --input that the model runs on; none where nothing was found. The model, which may be on the meta device, stays
    as it is."""
    parameters = signature(model.forward).parameters
    names, until = _first_names(model, parameters.values()), time.perf_counter() + _MOST_SECONDS
    subject = copy.deepcopy(model).eval()
    attempts = 0
    while True:
        wanted: list[str] = []
        kinds = [list(_texts(name, configuration)) for name in names]
        for texts in itertools.product(*kinds):
            inputs = [f"{name}:{text}" for name, text in zip(names, texts, strict=True)]
            problem = _problem(subject, inputs)
            if problem is None:
                return inputs
            wanted += [name for name in _missed(problem, parameters) if name not in names]
            attempts += 1
            if attempts >= _MOST_ATTEMPTS or time.perf_counter() > until:
                return []
        if not wanted:
            return []
        names = [*names, wanted[0]]


def _problem(model: nn.Module, inputs: list[str]) -> Exception | None:
    """Why the model does not run on these inputs; it may raise anything."""
    import torch

    from torchgraft.cli.models import read_inputs

    _, kwargs = read_inputs(inputs)
    on_meta = any(parameter.device.type == "meta" for parameter in model.parameters())
    if on_meta:
        kwargs = {name: tensor.to("meta") for name, tensor in kwargs.items()}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(**kwargs)
    except Exception as error:
        asks_for_numbers = isinstance(error, NotImplementedError) or "on meta tensors" in str(error)
        return None if on_meta and asks_for_numbers else error
    return None


def _first_names(model: nn.Module, parameters: Iterable[Parameter]) -> list[str]:
    """Inputs without a default, what the library calls the main one, and what goes into a decoder."""
    variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    parameters = [parameter for parameter in parameters if parameter.kind not in variable]
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    usual = (getattr(model, "main_input_name", "input_ids"), "decoder_input_ids")
    return list(dict.fromkeys([*required, *(item.name for item in parameters if item.name in usual)]))


def _missed(problem: Exception, parameters: Iterable[str]) -> Iterator[str]:
    """The inputs that a model may miss, by its own complaint."""
    known = {*_WORDS, *_PICTURES, *_SOUNDS, *_SPECTRA, "bbox"} & {*parameters}
    yield from (word for word in re.findall(r"\w+", str(problem)) if word in known)
    if "NoneType" in str(problem):
        yield from (name for name in _USUAL if name in known)


# ---- how an input may look, the likeliest first ----


def _texts(name: str, configuration: Any) -> Iterator[str]:
    if name in _WORDS:
        # The last words of a small vocabulary mark places of images and sounds, and the example has none.
        words = getattr(configuration.get_text_config(), "vocab_size", None) or 100
        yield f"1x{_LENGTH}:int64:{max(2, words - 16)}"
    elif name in _PICTURES:
        yield from _pictures(configuration)
    elif name in _SOUNDS:
        bins, frames = _number(configuration, 80, "num_mel_bins"), _number(configuration, 100, "max_length")
        yield from (f"1x{shape}:float32" for shape in ("16000", "1x16000", f"{frames}x{bins}", f"1x{frames}x{bins}"))
    elif name in _SPECTRA:
        bins = _number(configuration, 80, "num_mel_bins", "feature_size", "feature_projection_input_dim", "input_dim")
        for frames in (2 * _number(configuration, 50, "max_source_positions"), 400):
            yield from (f"1x{shape}:float32" for shape in (f"{bins}x{frames}", f"{frames}x{bins}"))
    elif name == "bbox":
        yield f"1x{_LENGTH}x4:int64:1"  # boxes without an extent are boxes, and random numbers are none
    elif name in ("inputs_embeds", "query_embeds"):
        yield f"1x{_LENGTH}x{_number(configuration, 32, 'hidden_size', 'd_model')}:float32"


def _pictures(configuration: Any) -> Iterator[str]:
    channels = _number(configuration, 3, "num_channels", "in_channels", "in_chans")
    frames = _number(configuration, 4, "num_frames", "frames_per_clip")
    size = _field(configuration, "image_size") or 224
    for side in dict.fromkeys((tuple(size) if isinstance(size, (list, tuple)) else (size, size), (224, 224), (64, 64))):
        for count in dict.fromkeys((channels, 3)):
            shape = f"{count}x{side[0]}x{side[-1]}:float32"
            yield f"1x{shape}"
            yield f"1x{frames}x{shape}"


def _field(configuration: Any, *names: str) -> Any:
    """The first field of a configuration, or of one inside it, that goes by one of the names."""
    inner = [value for value in vars(configuration).values() if hasattr(value, "attribute_map")]
    found = (getattr(configuration, name, None) for name in names)
    return next((value for value in (*found, *(_field(part, *names) for part in inner)) if value is not None), None)


def _number(configuration: Any, default: int, *names: str) -> int:
    value = _field(configuration, *names)
    return value if isinstance(value, int) else default
