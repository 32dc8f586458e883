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

# Relations between fields that their names do not tell, an architecture at a time.
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
PARTICULAR: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n": {"vision_config": {"architecture": "mobilenetv3_small_050"}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": (8, 8),
        "axial_pos_embds_dim": (16, 16),
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
    },
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}

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

    return smaller(transformers.AutoConfig.for_model(kind), **PARTICULAR.get(kind, {}))


def words(batch: int, length: int, rows: int = 1, **options: Any) -> MakeInputs:
    """Makes a batch of texts, each of `rows` rows."""
    return lambda: Inputs((torch.randint(FIRST_WORD, FIRST_MARKER, (batch * rows, length)),), options)
