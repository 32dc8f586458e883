"""Small configurations: a transformers configuration of any architecture is made small by the names of its fields.
How a model is made from one, and what it is fed, is in `libraries.py`.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

# One number a meaning, and every name the meaning goes by. A head is 8 wide, there are 4, and 32 is their product: the
# commonest relation between fields holds without being looked for.
_MEANINGS: dict[int, str] = {
    0: "pad_token_id first_k_dense_replace num_nextn_predict_layers prompt_length num_kv_shared_layers",
    1: "bos_token_id topk_group n_group num_expert_group moe_layer_start_index mamba_n_groups mamba_ngroups n_groups "
    "n_shared_experts num_shared_experts moe_num_shared_experts num_dense_layers num_mem_blocks layer_group_size",
    2: "eos_token_id decoder_start_token_id forced_eos_token_id num_hidden_layers n_layer n_layers num_layers "
    "encoder_layers decoder_layers num_encoder_layers num_decoder_layers num_blocks num_key_value_heads num_kv_heads "
    "kv_n_heads num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k n_shared top_k_experts hc_mult "
    "hc_count linear_num_key_heads num_query_groups moe_layer_end_index o_groups swa_num_key_value_heads n_embed_layers "
    "max_window_layers heads_per_ngram index_topk_blocks audio_merge_size hc_sinkhorn_iters centroid_intermediate_top_k "
    "num_codebooks num_hidden_layers_cross_decoder",
    3: "sep_token_id cls_token_id mask_token_id eod_token_id unk_index mask_index",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads num_experts n_routed_experts num_local_experts moe_num_experts "
    "index_n_heads linear_num_value_heads linear_num_heads qk_rope_head_dim mamba_n_heads mamba_num_heads n_mamba_heads "
    "swa_num_attention_heads rotary_dim sliding_window sliding_window_size local_attention window_size attention_window_size "
    "attention_chunk_size mamba_dt_rank time_step_rank block_size zero_expert_num index_topk gated_norm_rank d_rel "
    "mamba_chunk_size chunk_size index_block_size num_centroids patch_size num_mel_bins num_channels ngram_vocab_size_base "
    "split_ngram_parts keep_window_size floor_scale rel_extent",
    8: "head_dim v_head_dim qk_nope_head_dim index_head_dim mamba_d_head mamba_head_dim mamba_d_state state_size "
    "ssm_state_size linear_key_head_dim linear_value_head_dim linear_head_dim d_head dim_head kv_channels d_kv "
    "attention_head_size swa_head_dim mamba_headdim query_pre_attn_scalar hc_lowrank",
    12: "qk_head_dim",
    16: "q_lora_rank kv_lora_rank o_lora_rank adapter_rank input_embedding_size prompt_mid_dim router_hidden_size "
    "position_bias_num_buckets num_buckets ple_embed_dim pronunciation_embed_dim shape_embed_dim image_size",
    32: "hidden_size d_model n_embd emb_dim embedding_dim embedding_size moe_intermediate_size "
    "shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size "
    "word_embed_proj_dim output_embedding_size attention_hidden_size lru_width mamba_d_ssm audio_embed_dim "
    "backbone_hidden_size hidden_size_global hidden_size_per_layer_input max_source_positions",
    64: "intermediate_size intermediate_size_mlp dense_intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim dim_ff dff d_ff "
    "d_inner ffn_hidden_size feed_forward_size max_position_embeddings original_max_position_embeddings n_positions n_ctx "
    "max_seq_len model_max_length max_target_positions context_length block_multiple_of relative_max_distance "
    "position_bias_max_distance",
    128: "vocab_size vocab_size_per_layer_input decoder_vocab_size encoder_hash_byte_group_vocab "
    "pronunciation_vocab_size shape_vocab_size",
}
FIELDS = {name: value for value, names in _MEANINGS.items() for name in names.split()}

LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_blocks",
    "decoder_layers",
    "num_decoder_layers",
)
DEPTHS = ("layers", "depth", "depths", *LAYER_COUNTS)
# Places for images and sounds in a text: the last words of the vocabulary, which no example contains.
MARKER_ENDINGS = ("_token_id", "_token_index")
VOCABULARY = FIELDS["vocab_size"]
FIRST_MARKER = VOCABULARY - 16

# Relations between fields that their names do not tell, an architecture at a time.
_SERIES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
PARTICULAR: dict[str, dict[str, Any]] = {
    "autoformer": {**_SERIES, "label_length": 4},
    "bamba": {"attn_layer_indices": [1]},
    "bridgetower": {"hidden_size": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 3, "pad_token_id": 0},
    "esmc": {"num_key_value_heads": 4},
    "gemma3n": {"vision_config": {"architecture": "mobilenetv3_small_050"}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "informer": _SERIES,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
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
    "time_series_transformer": _SERIES,
    "timm_backbone": {"backbone": "resnet18"},
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


def smaller(configuration: Any, **chosen: Any) -> Any:
    """A small configuration of the same class; `chosen` overrides what the names of the fields say.

    Values go in through the constructor, because configurations derive some fields from others there.
    """
    chosen = {**PARTICULAR.get(configuration.model_type, {}), **chosen}
    fields = {name: value for name, value in vars(configuration).items() if name in _parameters(type(configuration))}
    values = {name: FIELDS[name] for name, value in fields.items() if name in FIELDS and _is_number(value)}
    values |= _kinds_of_layers(fields)
    if "kv_lora_rank" in values:
        values |= _latent_attention(fields)
    values |= _state_space(fields)
    markers = [name for name, value in fields.items() if name.endswith(MARKER_ENDINGS) and _is_number(value)]
    values |= {name: FIRST_MARKER + number for number, name in enumerate(markers) if name not in FIELDS}
    values |= {name: [value] for name, value in values.items() if isinstance(fields[name], list) and _is_number(value)}
    parts = {name: value for name, value in fields.items() if hasattr(value, "attribute_map")}
    for name, part in parts.items():
        inner = chosen.pop(name, {})
        values[name] = smaller(part, **inner)
    small = type(configuration)(**(values | chosen))
    _three_positions(small)
    return small


def _three_positions(configuration: Any) -> None:
    """Where a word has a position in time, height and width, each rotates a part of half a head; the usual ones are wide."""
    fields = vars(configuration)  # asking for a field that each layer has of its own is an error
    rotation, width = fields.get("rope_parameters"), fields.get("head_dim", FIELDS["head_dim"])
    if isinstance(rotation, dict) and "rope_type" in rotation and _is_number(width):
        half = int(width * rotation.get("partial_rotary_factor", 1.0)) // 2
        rotation["mrope_section"] = [half - half // 4 * 2, half // 4, half // 4]


def fewer_layers(configuration: Any) -> Any:
    """The same configuration with one or two layers wherever it counts them, and few words; all else as it is."""
    for owner in parts(configuration):
        for name, value in list(vars(owner).items()):
            if name in ("vocab_size", "text_vocab_size") and _is_number(value):
                set_field(owner, name, VOCABULARY)
            elif name.endswith(DEPTHS) and _is_number(value) and value > 2:
                set_field(owner, name, 2)
            elif name.endswith(DEPTHS) and are_numbers(value):
                set_field(owner, name, type(value)(min(item, 1) for item in value))
    return configuration


def parts(configuration: Any) -> list[Any]:
    """A configuration and those inside it."""
    found = [configuration]
    for value in vars(configuration).values():
        if hasattr(value, "attribute_map"):
            found += parts(value)
    return found


def are_numbers(value: Any) -> bool:
    """Whether a field has one number for each of several stages."""
    return isinstance(value, (list, tuple)) and bool(value) and all(type(item) is int for item in value)


def set_field(owner: Any, name: str, value: Any) -> None:
    """Set a field, where that can be done."""
    with contextlib.suppress(Exception):  # a field that is computed
        setattr(owner, name, value)


def _parameters(cls: type) -> set[str]:
    return {name for name in inspect.signature(cls).parameters if name != "kwargs"}


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _latent_attention(fields: dict[str, Any]) -> dict[str, Any]:
    """Where keys and values are unfolded from a shared vector every head has its own, and a head rotates only a part."""
    values = {"num_key_value_heads": FIELDS["num_attention_heads"], "head_dim": FIELDS["qk_rope_head_dim"]}
    return {name: value for name, value in values.items() if _is_number(fields.get(name))}


def _state_space(fields: dict[str, Any]) -> dict[str, Any]:
    """The heads of a state space make up, with their width, a multiple of the width of a layer."""
    multiple = next((fields[name] for name in ("expand", "mamba_expand") if _is_number(fields.get(name))), None)
    names = ["mamba_n_heads", "mamba_num_heads", "n_mamba_heads"]
    names += ["num_heads"] if "num_attention_heads" not in fields else []
    heads = FIELDS["num_attention_heads"] * (multiple or 1)
    return (
        {}
        if multiple is None or "mamba_d_ssm" in fields
        else {name: heads for name in names if _is_number(fields.get(name))}
    )


def _kinds_of_layers(fields: dict[str, Any]) -> dict[str, Any]:
    """Lists with one entry a layer, cut so that every kind of layer is left, and the number of layers that takes.

    A list in which nothing occurs twice is no list of kinds but of indices, which the constructor makes anew.
    """
    for counter in LAYER_COUNTS:
        number = fields.get(counter)
        if not isinstance(number, int) or isinstance(number, bool):
            continue
        lists = {
            name: value
            for name, value in fields.items()
            if isinstance(value, (list, tuple))
            and len(value) == number > max(len(set(map(str, value))), FIELDS[counter])
        }
        if not lists:
            return {}
        kept = _one_of_each(list(zip(*lists.values(), strict=True)), FIELDS[counter])
        cut = {name: type(value)(value[index] for index in kept) for name, value in lists.items()}
        return {counter: len(kept), **cut}
    return {}


def _one_of_each(layers: list[tuple[Any, ...]], fewest: int) -> list[int]:
    """The indices of the first layer of every kind, and of as many more as it takes to have `fewest`."""
    seen: set[str] = set()
    first = []
    for index, layer in enumerate(layers):
        if str(layer) not in seen:
            seen.add(str(layer))
            first.append(index)
    others = [index for index in range(len(layers)) if index not in first]
    return sorted(first + others[: max(0, fewest - len(first))])
