"""Small configurations of transformers, as `graft` makes them for `hf:NAME`; which fields mean what is written down there.
Which architectures there are, and what their models are fed, is in `language_models` and `other_models`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchgraft.cli.small_configurations import (
    DEPTHS,
    FIELDS,
    FIRST_MARKER,
    PARTICULAR,
    VOCABULARY,
    are_numbers,
    fewer_layers,
    parts,
    set_field,
    smaller,
)

__all__ = ["FIELDS", "FIRST_MARKER", "VOCABULARY", "attempts", "fewer_layers", "smaller"]


def attempts(kind: str) -> Iterator[Any]:
    """Configurations of one architecture, the smallest first: fields hang together in ways that their names do not tell, and
    then a model cannot be built, or does not run."""
    import transformers

    def make() -> Any:
        return transformers.AutoConfig.for_model(kind, **PARTICULAR.get(kind, {}))

    yield lambda: narrower(smaller(make()))
    yield lambda: smaller(make())
    yield lambda: fewer_layers(make())
    yield make


def narrower(configuration: Any) -> Any:
    """The same configuration with an eighth of the channels where each stage has its own number of them."""
    for owner in parts(configuration):
        for name, value in list(vars(owner).items()):
            if not are_numbers(value):
                continue
            if name.endswith(DEPTHS):
                set_field(owner, name, type(value)(min(item, 1) for item in value))
            elif all(item >= 32 and item % 32 == 0 for item in value) and "size" in name + "_sizes" * ("dim" in name):
                set_field(owner, name, type(value)(item // 4 for item in value))
    return configuration
