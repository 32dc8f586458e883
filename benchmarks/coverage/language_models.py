"""The causal language models of transformers: every architecture, with a configuration made small.
How a configuration is made small is in `shrinking`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.cases import Case, Inputs, MakeInputs
from benchmarks.coverage.shrinking import FIRST_MARKER, smaller
from benchmarks.coverage.torchvision_models import import_torchvision

# What is called a causal language model is their decoder, which takes a row of words for each of two codebooks.
DECODERS = {"musicgen": "MusicgenForCausalLM", "musicgen_melody": "MusicgenMelodyForCausalLM"}
GIVEN: dict[str, dict[str, Any]] = {
    "musicgen": {"rows": 2},
    "musicgen_melody": {"rows": 2},
    "blt": {"use_cache": False},
}

FIRST_WORD = 8
MOST_PARAMETERS = 50_000_000


def cases() -> Iterator[Case]:
    """One case for every kind of configuration that transformers has a causal language model for."""
    import_torchvision()
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        given = partial(words, **GIVEN.get(kind, {}))
        others = {"values": given(3, 7), "batch": given(5, 7), "size": given(3, 11)}
        yield Case("transformers", kind, partial(build, kind), given(3, 7), others)


def masked_cases() -> Iterator[Case]:
    """The same models with a mask beside the words: captured where it hides nothing, and tried where it hides padding."""
    for case in cases():
        others = {"values": _masked(case.example, padding=2), "size": _masked(case.others["size"], padding=3)}
        yield replace(case, collection="masked", example=_masked(case.example, padding=0), others=others)


def _masked(make: MakeInputs, padding: int) -> MakeInputs:
    def masked() -> Inputs:
        inputs = make()
        mask = torch.ones_like(inputs.args[0])
        mask[1:, :padding] = 0
        return Inputs(inputs.args, {**inputs.kwargs, "attention_mask": mask})

    return masked


def build(kind: str) -> nn.Module:
    """The model with random weights; whether it is small enough is seen before they are made."""
    import transformers

    configuration = small_configuration(kind)
    make = transformers.AutoModelForCausalLM.from_config
    if kind in DECODERS:
        configuration = configuration.decoder
        make = getattr(transformers, DECODERS[kind])
    with torch.device("meta"):
        size = sum(value.numel() for value in make(configuration).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"the shrunken configuration still has {size:,} parameters")
    return make(configuration)


def small_configuration(kind: str) -> Any:
    import transformers

    return smaller(transformers.AutoConfig.for_model(kind))


def words(batch: int, length: int, rows: int = 1, **options: Any) -> MakeInputs:
    """Makes a batch of texts, each of `rows` rows."""
    return lambda: Inputs((torch.randint(FIRST_WORD, FIRST_MARKER, (batch * rows, length)),), options)
