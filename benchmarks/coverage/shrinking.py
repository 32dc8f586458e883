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


def attempts(kind: str) -> Iterator[Any]:
    """Configurations of one architecture, the smallest first: fields hang together in ways that their names do not tell, and
    then a model cannot be built, or does not run."""
    import transformers

    make = transformers.AutoConfig.for_model
    yield lambda: narrower(smaller(make(kind)))
    yield lambda: smaller(make(kind))
    yield lambda: fewer_layers(make(kind))
    yield lambda: make(kind)


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
