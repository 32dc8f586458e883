"""Small configurations of transformers, as `graft` makes them for `hf:NAME`; which fields mean what is written down there.
Which architectures there are, and what their models are fed, is in `language_models` and `other_models`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchgraft.cli.small_configurations import FIELDS, FIRST_MARKER, VOCABULARY, smaller

__all__ = ["FIELDS", "FIRST_MARKER", "VOCABULARY", "attempts", "fewer_layers", "smaller"]

_DEPTHS = ("layers", "depth", "depths", "num_blocks", "n_layer", "n_layers", "num_hidden_layers", "num_layers")
_LARGE = {"vocab_size": VOCABULARY, "text_vocab_size": VOCABULARY}

_SERIES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]}
# Architectures whose words have three positions, each with a part of a head.
_THREE_POSITIONS = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen2_5_omni",
    "glm4v",
    "glm46v",
    "glm_image",
    "glm_ocr",
    "glmga",
    "paddleocr",
)
# Fields that have no default, or that hang together with others.
PARTICULAR: dict[str, dict[str, Any]] = {
    "autoformer": {**_SERIES, "label_length": 4},
    "bridgetower": {"hidden_size": 64},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 3, "pad_token_id": 0},
    "esmc": {"num_key_value_heads": 4},
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
    "timm_backbone": {"backbone": "resnet18"},
}


def attempts(kind: str) -> Iterator[Any]:
    """Configurations of one architecture, the smallest first: fields hang together in ways that their names do not tell, and
    then a model cannot be built, or does not run."""
    import transformers

    def make() -> Any:
        return transformers.AutoConfig.for_model(kind, **PARTICULAR.get(kind, {}))

    yield lambda: narrower(smaller(make(), **PARTICULAR.get(kind, {})))
    yield lambda: smaller(make(), **PARTICULAR.get(kind, {}))
    yield lambda: fewer_layers(make())
    yield make


def fewer_layers(configuration: Any) -> Any:
    """The same configuration with one or two layers wherever it counts them, and few words."""
    for owner in _parts(configuration):
        for name, value in list(vars(owner).items()):
            if name in _LARGE and isinstance(value, int):
                _set(owner, name, _LARGE[name])
            elif name.endswith(_DEPTHS) and isinstance(value, int) and not isinstance(value, bool) and value > 2:
                _set(owner, name, 2)
            elif name.endswith(_DEPTHS) and _are_numbers(value):
                _set(owner, name, type(value)(min(item, 1) for item in value))
    return configuration


def narrower(configuration: Any) -> Any:
    """The same configuration with an eighth of the channels where each stage has its own number of them."""
    for owner in _parts(configuration):
        for name, value in list(vars(owner).items()):
            if (
                isinstance(value, dict)
                and "rope_type" in value
                and configuration.model_type.startswith(_THREE_POSITIONS)
            ):
                value["mrope_section"] = [2, 1, 1]  # three parts of half a head
            if not _are_numbers(value):
                continue
            if name.endswith(_DEPTHS):
                _set(owner, name, type(value)(min(item, 1) for item in value))
            elif all(item >= 32 and item % 32 == 0 for item in value) and "size" in name + "_sizes" * ("dim" in name):
                _set(owner, name, type(value)(item // 4 for item in value))
    return configuration


def _parts(configuration: Any) -> list[Any]:
    found = [configuration]
    for value in vars(configuration).values():
        if hasattr(value, "attribute_map"):
            found += _parts(value)
    return found


def _are_numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(type(item) is int for item in value)


def _set(owner: Any, name: str, value: Any) -> None:
    try:
        setattr(owner, name, value)
    except Exception:
        return  # a field that is computed
