"""Models of other libraries for the command line: `torchvision:`, `timm:` and `hf:`, with random weights and inputs that fit.
Nothing is downloaded. What the texts of MODEL and --input mean otherwise is in `models.py`.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
from collections.abc import Callable, Iterable, Iterator
from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from torchgraft.errors import GraftError, one_line

if TYPE_CHECKING:
    from torch import nn


class LibraryModel(NamedTuple):
    """A model, and the texts of --input that it is fed with where the user gives none; `as_list`: as one list of tensors."""

    model: nn.Module
    inputs: list[str]
    as_list: bool = False


def library_model(library: str, name: str, full: bool = False) -> LibraryModel:
    """The model of that name; GraftError says what is missing."""
    return LIBRARIES[library](name, full)


def _imported(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise GraftError(f"cannot import {package}: {error}\ninstall it with: pip install {package}") from error
    except Exception as error:  # torchvision raises RuntimeError where its operators do not fit this torch
        raise GraftError(f"cannot import {package}: {one_line(error)}") from error


def _unknown(library: str, name: str, names: Iterable[str]) -> NoReturn:
    close = difflib.get_close_matches(name, list(names), 3, 0.5)
    hint = (
        f"did you mean {' or '.join(map(repr, close))}?"
        if close
        else f"see the documentation of {library} for its names"
    )
    raise GraftError(f"no model named {name!r} in {library}; {hint}")


# ---- torchvision ----

_IMAGE = "1x3x224x224:float32"
# By the part of torchvision.models that a model lives in; detection takes a list of images.
_VISION_INPUTS = {
    "segmentation": [_IMAGE],
    "video": ["1x3x16x112x112:float32"],
    "optical_flow": ["1x3x128x128:float32"] * 2,
    "detection": ["3x224x224:float32"],
}


def _torchvision(name: str, full: bool) -> LibraryModel:
    _imported("torchvision")
    models = _imported("torchvision.models")
    if name not in models.list_models():
        _unknown("torchvision", name, models.list_models())
    kind = models.get_model_builder(name).__module__.removeprefix("torchvision.models.").partition(".")[0]
    options: dict[str, Any] = {"weights_backbone": None} if kind in ("segmentation", "detection") else {}
    if name in ("inception_v3", "googlenet"):
        options["init_weights"] = False  # it takes half a minute, and these weights are random anyway
    if name.startswith(("mvit", "swin3d")):
        inputs = ["1x3x16x224x224:float32"]
    else:
        inputs = ["1x3x299x299:float32"] if name == "inception_v3" else _VISION_INPUTS.get(kind, [_IMAGE])
    return LibraryModel(models.get_model(name, weights=None, **options), inputs, kind == "detection")


# ---- timm ----


def _timm(name: str, full: bool) -> LibraryModel:
    timm = _imported("timm")
    if not timm.is_model(name):
        _unknown("timm", name, timm.list_models())
    model = timm.create_model(name, pretrained=False)
    size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size") or (3, 224, 224)
    return LibraryModel(model, ["x".join(map(str, (1, *size))) + ":float32"])


# ---- transformers ----


def _transformers(name: str, full: bool) -> LibraryModel:
    transformers = _imported("transformers")
    transformers.logging.set_verbosity_error()
    hint = "" if full else "; use --full for the real size"
    with _explained(
        f"cannot import the model {name!r} of transformers", ""
    ):  # it imports its parts when they are asked for
        make, configuration = _architecture(transformers, name)
    if not full:
        from torchgraft.cli.small_configurations import smaller

        with _explained(f"cannot make a small configuration of {name!r}", hint):
            configuration = smaller(configuration)
    if hasattr(configuration, "use_cache"):
        configuration.use_cache = False  # it is for the next word, and one run has none; torch.export refuses it
    with _explained(f"cannot make the model {name!r} from its configuration", hint):
        model = make(configuration)
    return LibraryModel(model, _transformers_inputs(model, configuration))


@contextlib.contextmanager
def _explained(what: str, hint: str) -> Iterator[None]:
    """Errors of a library, which may be anything, as one of ours."""
    try:
        yield
    except GraftError:
        raise
    except Exception as error:
        raise GraftError(f"{what}: {one_line(error)}{hint}") from error


def _architecture(transformers: ModuleType, name: str) -> tuple[Callable[[Any], nn.Module], Any]:
    """How to make the model, and its usual configuration: by the type of a configuration, or by the name of a class."""
    found = getattr(transformers, name, None)
    if found is not None and hasattr(found, "config_class") and found.config_class is not None:
        return found, found.config_class()
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    if name not in auto.CONFIG_MAPPING:
        _unknown("transformers", name, auto.CONFIG_MAPPING.keys())
    configuration = transformers.AutoConfig.for_model(name)
    for factory in ("AutoModelForCausalLM", "AutoModel"):
        auto_class = getattr(transformers, factory)
        if type(configuration) in auto_class._model_mapping:
            return auto_class.from_config, configuration
    raise GraftError(
        f"transformers has a configuration {name!r} and no model for it\nname a class, such as hf:BertModel"
    )


def _transformers_inputs(model: nn.Module, configuration: Any) -> list[str]:
    kind = getattr(model, "main_input_name", "input_ids")
    if kind == "input_ids":
        words = getattr(configuration.get_text_config(), "vocab_size", None) or 100
        # The last words of a small vocabulary mark places of images and sounds, and the example has none.
        names = ["input_ids"]
        if (
            getattr(configuration, "is_encoder_decoder", False)
            and "decoder_input_ids" in signature(model.forward).parameters
        ):
            names.append("decoder_input_ids")
        return [f"{name}:1x16:int64:{max(2, words - 16)}" for name in names]
    if kind == "pixel_values":
        vision = getattr(configuration, "vision_config", configuration)
        size = getattr(vision, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return [f"pixel_values:1x{getattr(vision, 'num_channels', 3)}x{height}x{width}:float32"]
    return []


LIBRARIES: dict[str, Callable[[str, bool], LibraryModel]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "hf": _transformers,
}
